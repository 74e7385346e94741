"""Row-wise ops whose output is NVFP4, with 128x4 scales."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from .case import Case, Tensors
from .rows import POISON, RowBenchmark


def scale_shape_128x4(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the 128x4 scale tensor of a (rows, columns) NVFP4 tensor."""
    return math.ceil(rows / 128) * 128, math.ceil(columns / 16 / 4) * 4


class Fp4Rows(RowBenchmark):
    """Codes, and scales in the 128x4 layout."""

    settings: ClassVar = {"dtype": "bfloat16", "format": "NVFP4", "scale layout": "128x4", "global scale": "none"}
    keywords: ClassVar = {"scale_layout": "128x4"}

    def make_outputs(self, case: Case, device: torch.device) -> Tensors:
        m, width = case["M"], case[self.width]
        y = torch.full((m, width // 2), POISON, dtype=torch.uint8, device=device)
        scale = torch.full(scale_shape_128x4(m, width), POISON, dtype=torch.uint8, device=device)
        return {"y": y, "scale": scale.view(torch.float8_e4m3fn)}
