"""Output of ``mm_fp8_block``."""

import torch


def mm_fp8_block(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Products (M, N)."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
