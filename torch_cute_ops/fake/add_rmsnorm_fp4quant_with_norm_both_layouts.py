"""Outputs of ``add_rmsnorm_fp4quant_with_norm_both_layouts``."""

from typing import Any

import torch

from torch_cute_ops.fake.add_rmsnorm_fp4quant_both_layouts import add_rmsnorm_fp4quant_both_layouts
from torch_cute_ops.formats.shapes import OutputShapes


def add_rmsnorm_fp4quant_with_norm_both_layouts(input: torch.Tensor, **others: Any) -> OutputShapes:
    """Codes (..., H/2), scales in the 128x4 layout, linear ones, and the norm (..., H) in the input dtype."""
    return [*add_rmsnorm_fp4quant_both_layouts(input, **others), (tuple(input.shape), input.dtype)]
