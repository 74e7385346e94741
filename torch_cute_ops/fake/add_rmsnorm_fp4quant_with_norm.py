"""Outputs of ``add_rmsnorm_fp4quant_with_norm``."""

import torch

from torch_cute_ops.fake.fp4_quantize import empty_fp4


def add_rmsnorm_fp4quant_with_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (..., H/2), scales, and the norm (..., H) in the input dtype."""
    y, scale = empty_fp4(input.shape, input, block_size, scale_format, scale_layout)
    return y, scale, input.new_empty(input.shape)
