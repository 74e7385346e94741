"""add_rmsnorm_fp4quant_both_layouts: add_rmsnorm_fp4quant that also stores the scales in a second layout."""

from __future__ import annotations

from typing import ClassVar

from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE


class AddRmsnormFp4quantBothLayouts(Fp4Rows):
    op = "add_rmsnorm_fp4quant_both_layouts"
    settings: ClassVar = {**Fp4Rows.settings, "scale layout": "128x4 and linear"}
    adds = True

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, residual and weight) and writes (residual, packed data, and the
        scales in two layouts)."""
        m, h = case["M"], case["H"]
        return row_bytes(3 * m + 1, h, DTYPE.itemsize) + fp4_bytes(m, h) + row_bytes(m, h // 16, 1)


BENCHMARK = AddRmsnormFp4quantBothLayouts()
