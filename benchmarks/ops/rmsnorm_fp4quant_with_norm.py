"""rmsnorm_fp4quant_with_norm: RMSNorm and NVFP4 quantisation in one pass, which also stores the normalised rows."""

from __future__ import annotations

from ..case import Case
from ..formulas import row_bytes
from ..rows import DTYPE
from .rmsnorm_fp4quant import RmsnormFp4quant


class RmsnormFp4quantWithNorm(RmsnormFp4quant):
    op = "rmsnorm_fp4quant_with_norm"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input and weight) and writes (packed data, scales and normalised
        rows)."""
        return super().bytes_moved(case) + row_bytes(case["M"], case["H"], DTYPE.itemsize)


BENCHMARK = RmsnormFp4quantWithNorm()
