"""Reference of ``add_rmsnorm_fp4quant_both_layouts``."""

from typing import Any

import torch

from torch_cute_ops.formats import resolve_scale_layout
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.reference.add_rmsnorm_fp4quant_with_norm import add_rmsnorm_fp4quant_with_norm


def both_layouts(**named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``add_rmsnorm_fp4quant_with_norm``; return the codes, the 128x4 scales, the linear scales and the
    normalised rows."""
    y, linear, norm = add_rmsnorm_fp4quant_with_norm(**named, scale_layout="linear")
    return y, from_linear(linear.reshape(-1, linear.shape[-1]), resolve_scale_layout("128x4")), linear, norm


def add_rmsnorm_fp4quant_both_layouts(**named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``add_rmsnorm_fp4quant`` with the scales in both layouts; see the op's docstring."""
    return both_layouts(**named)[:3]
