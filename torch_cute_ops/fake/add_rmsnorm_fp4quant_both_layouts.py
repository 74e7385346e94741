"""Outputs of ``add_rmsnorm_fp4quant_both_layouts``."""

import torch

from torch_cute_ops.fake.fp4_quantize import empty_fp4


def add_rmsnorm_fp4quant_both_layouts(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (..., H/2), scales in the 128x4 layout, and linear ones."""
    y, tiled = empty_fp4(input.shape, input, block_size, scale_format, "128x4")
    _, linear = empty_fp4(input.shape, input, block_size, scale_format, "linear")
    return y, tiled, linear
