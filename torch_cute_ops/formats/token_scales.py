"""Rules that decide from shapes how the FP8 activations of a GEMM with an FP4 weight are scaled and stored."""

import torch

from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.prepared_scales import is_prepared


def is_interleaved(a: torch.Tensor, is_masked: bool = False) -> bool:
    """Return True if the activations have the shape (M, ⌈K/256⌉, 256) or, in the masked layout, (E, R, ⌈K/256⌉,
    256)."""
    return len(a.shape) == (4 if is_masked else 3) and bool(a.shape[-1] == INTERLEAVED_K)


def has_token_scales(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    block_size: int,
    is_masked: bool = False,
) -> bool:
    """Return True if a GEMM with the FP4 weight ``b``, (..., K/2, N), has a scale for each row of its activations, or
    one scale for all rows, and False if it has block scales.

    If K is at most 128, scales (M, 1) count as block scales, because the results are the same, unless prepared scales
    or interleaved activations require per-token scales.
    """
    if len(a_scale.shape) < 2 or is_prepared(b, b_scale, block_size) or is_interleaved(a, is_masked):
        return True
    return bool(a_scale.shape[-1] == 1 and 2 * b.shape[-2] > FP8_BLOCK128.block_size)


def with_alpha(b_scale: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
    """Multiply the per-channel scales of a weight, (N,), (E, N) or (E,), by ``alpha``, if any. With experts, ``alpha``
    may have one element per expert."""
    if alpha is None:
        return b_scale
    if alpha.numel() == 1:
        return b_scale * alpha.reshape(())
    if b_scale.dim() < alpha.dim():
        b_scale = b_scale[:, None]
    elif b_scale.dim() > alpha.dim():
        alpha = alpha[:, None]
    return b_scale * alpha
