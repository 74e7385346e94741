"""silu_mul: SwiGLU's gate in one pass. I is the width of the output."""

from __future__ import annotations

from ..case import Case
from ..formulas import row_bytes
from ..rounded_rows import RoundedRows
from ..rows import DTYPE, GatedRows


class SiluMul(GatedRows, RoundedRows):
    op = "silu_mul"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (both halves of the input) and writes (gated values)."""
        return row_bytes(case["M"], 3 * case["I"], DTYPE.itemsize)


BENCHMARK = SiluMul()
