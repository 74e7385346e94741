"""Outputs of ``silu_mul_fp8quant``."""

import torch

from torch_cute_ops.fake.rmsnorm_fp8quant import empty_fp8
from torch_cute_ops.fake.silu_mul_fp4quant import halved


def silu_mul_fp8quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    granularity: str = "token",
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., I) and scales, of an input (..., 2I)."""
    return empty_fp8(halved(input.shape), input, granularity, scale_layout)
