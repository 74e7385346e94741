"""rmsnorm_fp8quant: RMSNorm and FP8 quantisation in one pass."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp8_bytes, row_bytes
from ..fp8_rows import Fp8Rows
from ..rows import DTYPE


class RmsnormFp8quant(Fp8Rows):
    op = "rmsnorm_fp8quant"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input and weight) and writes (data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m + 1, h, DTYPE.itemsize) + fp8_bytes(m, h, case.choices["granularity"])


BENCHMARK = RmsnormFp8quant()
