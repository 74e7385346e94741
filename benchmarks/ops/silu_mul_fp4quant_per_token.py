"""silu_mul_fp4quant_per_token: SwiGLU's gate and NVFP4 quantisation with a scale per row, in one pass."""

from __future__ import annotations

from ..case import Case
from ..formulas import row_bytes
from ..fp4_token_rows import Fp4TokenRows, written_bytes
from ..rows import DTYPE, GatedRows


class SiluMulFp4quantPerToken(GatedRows, Fp4TokenRows):
    op = "silu_mul_fp4quant_per_token"
    peers = Fp4TokenRows.peers

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (both halves of the input) and writes (codes and scales)."""
        m, i = case["M"], case["I"]
        return row_bytes(m, 2 * i, DTYPE.itemsize) + written_bytes(m, i)


BENCHMARK = SiluMulFp4quantPerToken()
