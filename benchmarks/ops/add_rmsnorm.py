"""add_rmsnorm: residual addition and RMSNorm in one pass."""

from __future__ import annotations

from .. import targets
from ..case import Case
from ..formulas import row_bytes
from ..rounded_rows import RoundedRows
from ..rows import DTYPE


class AddRmsnorm(RoundedRows):
    op = "add_rmsnorm"
    adds = True
    most_over_quack = targets.ADD_NORM_OVER_QUACK

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, residual and weight) and writes (residual and normalised rows)."""
        return row_bytes(4 * case["M"] + 1, case["H"], DTYPE.itemsize)


BENCHMARK = AddRmsnorm()
