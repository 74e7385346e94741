"""Outputs of ``add_rmsnorm_fp8quant``."""

import torch

from torch_cute_ops.fake.rmsnorm_fp8quant import empty_fp8


def add_rmsnorm_fp8quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., H) and scales."""
    return empty_fp8(input.shape, input, granularity, scale_layout)
