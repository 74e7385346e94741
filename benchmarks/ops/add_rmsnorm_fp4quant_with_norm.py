"""add_rmsnorm_fp4quant_with_norm: add_rmsnorm_fp4quant that also stores the normalised rows."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE


class AddRmsnormFp4quantWithNorm(Fp4Rows):
    op = "add_rmsnorm_fp4quant_with_norm"
    adds = True

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, residual and weight) and writes (residual, data, scales and
        normalised rows)."""
        m, h = case["M"], case["H"]
        return row_bytes(4 * m + 1, h, DTYPE.itemsize) + fp4_bytes(m, h)


BENCHMARK = AddRmsnormFp4quantWithNorm()
