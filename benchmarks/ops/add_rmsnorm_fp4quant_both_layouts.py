"""add_rmsnorm_fp4quant_both_layouts: as add_rmsnorm_fp4quant, in a pass that stores the scales in two layouts."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..case import Case, Tensors
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE, POISON


class AddRmsnormFp4quantBothLayouts(Fp4Rows):
    op = "add_rmsnorm_fp4quant_both_layouts"
    settings: ClassVar = {**Fp4Rows.settings, "scale layout": "128x4 and linear"}
    keywords: ClassVar = {}
    adds = True

    def bytes_moved(self, case: Case) -> int:
        """Input, residual and weight read; residual, packed data and twice the scales written; bytes."""
        m, h = case["M"], case["H"]
        return row_bytes(3 * m + 1, h, DTYPE.itemsize) + fp4_bytes(m, h) + row_bytes(m, h // 16, 1)

    def make_outputs(self, case: Case, device: torch.device) -> Tensors:
        linear = torch.full((case["M"], case["H"] // 16), POISON, dtype=torch.uint8, device=device)
        return {**super().make_outputs(case, device), "scale_linear": linear.view(torch.float8_e4m3fn)}


BENCHMARK = AddRmsnormFp4quantBothLayouts()
