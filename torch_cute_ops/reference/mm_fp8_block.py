"""Reference of ``mm_fp8_block``."""

from typing import Any

import torch

from torch_cute_ops.reference.mm_fp4 import finished

BLOCK = 128


def mm_fp8_block(b: torch.Tensor, b_scale: torch.Tensor, **named: Any) -> torch.Tensor:
    """``alpha · a @ b + bias`` of e4m3 matrices under block scales, (M, N) in ``out_dtype``; see the op's docstring."""
    return block_scaled_gemm(weight=b.t(), factors=factors_of_columns(b_scale, b.shape[1]), **named)


def factors_of_columns(b_scale: torch.Tensor, n: int) -> torch.Tensor:
    """Scales (..., ⌈N/128⌉, blocks) of blocks of 128 rows as those of each row, (..., N, blocks)."""
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
    """``alpha · a @ weight.T + bias`` of e4m3 matrices (M, K) and (N, K) under scales (⌈K/128⌉, M) and (N, ⌈K/128⌉).

    Block after block of 128 elements of k, the last of which may be shorter: the block's sum, which float64 holds
    exactly, is rounded to fp32, multiplied by the product of both scales, itself rounded to fp32, and added to those
    before it with one rounding. Then ``finished``, in bfloat16 where no dtype is given.
    """
    total = torch.zeros(len(a), len(weight), dtype=torch.float32, device=a.device)
    for block in range(a_scale.shape[0]):
        within = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = (a[:, within].double() @ weight[:, within].t().double()).float()
        factor = a_scale[block][:, None] * factors[:, block]
        total = (factor.double() * partial.double() + total.double()).float()
    return finished(total, alpha, bias, out_dtype or torch.bfloat16)
