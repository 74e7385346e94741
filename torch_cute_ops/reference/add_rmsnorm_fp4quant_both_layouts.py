"""Reference of ``add_rmsnorm_fp4quant_both_layouts``."""

import torch

from torch_cute_ops.formats import resolve_scale_layout
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant


def add_rmsnorm_fp4quant_both_layouts(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``add_rmsnorm_fp4quant``, with the scales in both layouts; see the op's docstring."""
    y, linear = add_rmsnorm_fp4quant(input, residual, weight, global_scale, eps, block_size, scale_format, "linear")
    tiled = from_linear(linear.reshape(-1, linear.shape[-1]), resolve_scale_layout("128x4"))
    return y, tiled, linear
