"""Output of ``grouped_mm_fp8``."""

import torch


def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Products (R, N), or (E, rows of an expert, N)."""
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype)
