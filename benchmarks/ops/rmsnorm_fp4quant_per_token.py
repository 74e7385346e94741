"""rmsnorm_fp4quant_per_token: RMSNorm and NVFP4 quantisation with a scale per row, in one pass."""

from __future__ import annotations

from ..case import Case
from ..formulas import row_bytes
from ..fp4_token_rows import Fp4TokenRows, written_bytes
from ..rows import DTYPE


class RmsnormFp4quantPerToken(Fp4TokenRows):
    op = "rmsnorm_fp4quant_per_token"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input and weight) and writes (packed data, scales and row scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m + 1, h, DTYPE.itemsize) + written_bytes(m, h)


BENCHMARK = RmsnormFp4quantPerToken()
