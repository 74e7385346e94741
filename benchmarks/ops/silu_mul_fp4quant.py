"""silu_mul_fp4quant: SwiGLU's gate and NVFP4 quantisation in one pass. I is the width of the output."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE, GatedRows


class SiluMulFp4quant(GatedRows, Fp4Rows):
    op = "silu_mul_fp4quant"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (both halves of the input) and writes (packed data and scales)."""
        m, i = case["M"], case["I"]
        return row_bytes(m, 2 * i, DTYPE.itemsize) + fp4_bytes(m, i)


BENCHMARK = SiluMulFp4quant()
