"""Outputs of ``silu_mul_fp4quant``, and the shape that the silu_mul fakes share."""

import torch

from torch_cute_ops.fake.fp4_quantize import empty_fp4


def halved(shape: torch.Size) -> tuple[int, ...]:
    """(..., I) of (..., 2I)."""
    return (*shape[:-1], shape[-1] // 2)


def silu_mul_fp4quant(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., I/2) and scales, of an input (..., 2I)."""
    return empty_fp4(halved(input.shape), input, block_size, scale_format, scale_layout)
