"""Output of ``moe_fc2_fp4_weight_only``."""

import torch


def moe_fc2_fp4_weight_only(
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> torch.Tensor:
    """Sums over the experts (M, N)."""
    return a.new_empty((a.shape[0], w.shape[0]), dtype=out_dtype or a.dtype)
