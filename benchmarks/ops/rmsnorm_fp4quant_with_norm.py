"""rmsnorm_fp4quant_with_norm: RMSNorm and NVFP4 quantisation in one pass, which also stores the normalised rows."""

from __future__ import annotations

from typing import ClassVar

from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE, INDUCTOR_LARGE


class RmsnormFp4quantWithNorm(Fp4Rows):
    op = "rmsnorm_fp4quant_with_norm"
    has_norm = True
    quack_goal = 1.15
    inductor_goals: ClassVar = {INDUCTOR_LARGE: 5.0}

    def bytes_moved(self, case: Case) -> int:
        """Input and weight read; packed data, scales and normalised rows written; bytes."""
        m, h = case["M"], case["H"]
        return row_bytes(2 * m + 1, h, DTYPE.itemsize) + fp4_bytes(m, h)


BENCHMARK = RmsnormFp4quantWithNorm()
