"""add_rmsnorm_fp4quant_per_token: residual addition, RMSNorm and NVFP4 quantisation with a scale per row."""

from __future__ import annotations

from ..case import Case
from ..formulas import row_bytes
from ..fp4_token_rows import Fp4TokenRows, written_bytes
from ..rows import DTYPE


class AddRmsnormFp4quantPerToken(Fp4TokenRows):
    op = "add_rmsnorm_fp4quant_per_token"
    adds = True

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, residual and weight) and writes (residual, codes and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(3 * m + 1, h, DTYPE.itemsize) + written_bytes(m, h)


BENCHMARK = AddRmsnormFp4quantPerToken()
