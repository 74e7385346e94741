"""Reference of ``mm_fp8_block``."""

from typing import Any

import torch

from torch_cute_ops.reference.mm_fp4 import apply_epilogue

BLOCK = 128


def mm_fp8_block(b: torch.Tensor, b_scale: torch.Tensor, **named: Any) -> torch.Tensor:
    """Compute ``alpha · a @ b + bias`` for e4m3 matrices with block scales, (M, N); see the op's docstring."""
    return block_scaled_gemm(weight=b.t(), factors=factors_of_columns(b_scale, b.shape[1]), **named)


def factors_of_columns(b_scale: torch.Tensor, n: int) -> torch.Tensor:
    """Repeat the scales of 128-row blocks, (..., ⌈N/128⌉, blocks), for each row of the weight: (..., N, blocks)."""
    return b_scale.repeat_interleave(BLOCK, -2)[..., :n, :]


def block_scaled_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    factors: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> torch.Tensor:
    """Compute ``alpha · a @ weight.T + bias`` for e4m3 matrices with block scales.

    K is divided into blocks of 128 elements; the last block may be shorter. Each block's product is exact in float64
    and rounded to fp32. It is multiplied by both scales, whose product is rounded to fp32, and added to the accumulator
    with one rounding. ``apply_epilogue`` then applies ``alpha`` and ``bias``.

    Args:
        a: (M, K) float8_e4m3fn.
        weight: (N, K) float8_e4m3fn.
        a_scale: (M, ⌈K/128⌉) float32, any strides.
        factors: (N, ⌈K/128⌉) float32, scales of the weight.
        alpha: (1,) or (N,) float32, or None for 1.
        bias: (N,), or None.
        out_dtype: dtype of the output, or None for bfloat16.
    """
    total = torch.zeros(len(a), len(weight), dtype=torch.float32, device=a.device)
    for block in range(a_scale.shape[1]):
        within = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = (a[:, within].double() @ weight[:, within].t().double()).float()
        factor = a_scale[:, block, None] * factors[:, block]
        total = (factor.double() * partial.double() + total.double()).float()
    return apply_epilogue(total, alpha, bias, out_dtype or torch.bfloat16)
