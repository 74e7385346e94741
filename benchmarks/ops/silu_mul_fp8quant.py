"""silu_mul_fp8quant: SwiGLU's gate and FP8 quantisation in one pass. I is the width of the output."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp8_bytes, row_bytes
from ..fp8_rows import Fp8Rows
from ..rows import DTYPE, GatedRows


class SiluMulFp8quant(GatedRows, Fp8Rows):
    op = "silu_mul_fp8quant"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (both halves of the input) and writes (data and scales)."""
        m, i = case["M"], case["I"]
        return row_bytes(m, 2 * i, DTYPE.itemsize) + fp8_bytes(m, i, case.choices["granularity"])


BENCHMARK = SiluMulFp8quant()
