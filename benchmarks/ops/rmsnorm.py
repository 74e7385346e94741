"""rmsnorm: RMSNorm in one pass."""

from __future__ import annotations

from .. import targets
from ..case import Case
from ..formulas import row_bytes
from ..rounded_rows import RoundedRows
from ..rows import DTYPE


class Rmsnorm(RoundedRows):
    op = "rmsnorm"
    most_over_quack = targets.NORM_OVER_QUACK

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input and weight) and writes (normalised rows)."""
        return row_bytes(2 * case["M"] + 1, case["H"], DTYPE.itemsize)


BENCHMARK = Rmsnorm()
