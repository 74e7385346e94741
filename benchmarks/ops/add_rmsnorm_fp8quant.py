"""add_rmsnorm_fp8quant: residual addition, RMSNorm and FP8 quantisation in one pass."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp8_bytes, row_bytes
from ..fp8_rows import Fp8Rows
from ..rows import DTYPE


class AddRmsnormFp8quant(Fp8Rows):
    op = "add_rmsnorm_fp8quant"
    adds = True

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, residual and weight) and writes (residual, data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(3 * m + 1, h, DTYPE.itemsize) + fp8_bytes(m, h, case.choices["granularity"])


BENCHMARK = AddRmsnormFp8quant()
