"""rmsnorm_fp4quant: RMSNorm and NVFP4 quantisation in one pass."""

from __future__ import annotations

from typing import ClassVar

from .. import targets
from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE, INDUCTOR_LARGE


class RmsnormFp4quant(Fp4Rows):
    op = "rmsnorm_fp4quant"
    most_over_quack = targets.NORM_OVER_QUACK
    least_over_inductor: ClassVar = {INDUCTOR_LARGE: targets.FP4_OVER_INDUCTOR}

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input and weight) and writes (packed data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m + 1, h, DTYPE.itemsize) + fp4_bytes(m, h)


BENCHMARK = RmsnormFp4quant()
