"""Output of ``fp4_dequantize``."""

import torch


def fp4_dequantize(
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Values (..., K)."""
    return y.new_empty((*y.shape[:-1], y.shape[-1] * 2), dtype=out_dtype)
