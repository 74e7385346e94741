"""add_rmsnorm_fp4quant: residual addition, RMSNorm and NVFP4 quantisation in one pass."""

from __future__ import annotations

from .. import targets
from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE


class AddRmsnormFp4quant(Fp4Rows):
    op = "add_rmsnorm_fp4quant"
    adds = True
    most_over_quack = targets.ADD_NORM_OVER_QUACK

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, residual and weight) and writes (residual, packed data and
        scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(3 * m + 1, h, DTYPE.itemsize) + fp4_bytes(m, h)


BENCHMARK = AddRmsnormFp4quant()
