"""Outputs of ``add_rmsnorm_fp4quant_both_layouts``."""

from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_outputs
from torch_cute_ops.formats.shapes import OutputShapes


def add_rmsnorm_fp4quant_both_layouts(
    input: torch.Tensor, block_size: int, scale_format: str | None, **others: Any
) -> OutputShapes:
    """Describe the codes (..., H/2), the scales in the 128x4 layout, and the linear scales."""
    linear = fp4_outputs(input.shape, block_size, scale_format, "linear")[1]
    return [*fp4_outputs(input.shape, block_size, scale_format), linear]
