"""Outputs of ``add_rmsnorm_fp4quant_with_norm_both_layouts``."""

from typing import Any

import torch

from torch_cute_ops.fake.add_rmsnorm_fp4quant_both_layouts import add_rmsnorm_fp4quant_both_layouts
from torch_cute_ops.formats.shapes import OutputShapes


def add_rmsnorm_fp4quant_with_norm_both_layouts(input: torch.Tensor, **others: Any) -> OutputShapes:
    """Describe the codes (..., H/2), 128x4 scales, linear scales, and the normalised rows (..., H) in the input's
    dtype."""
    return [*add_rmsnorm_fp4quant_both_layouts(input, **others), (tuple(input.shape), input.dtype)]
