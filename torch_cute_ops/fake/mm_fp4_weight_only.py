"""Output of ``mm_fp4_weight_only``."""

import torch


def mm_fp4_weight_only(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> torch.Tensor:
    """Products (M, N)."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)
