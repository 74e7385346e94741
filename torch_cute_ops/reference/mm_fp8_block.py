"""Reference of ``mm_fp8_block``."""

import torch

BLOCK = 128


def mm_fp8_block(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``a @ b`` of e4m3 matrices under block scales, (M, N) in ``out_dtype``; see the op's docstring."""
    return block_product(a, b.t(), a_scale, b_scale).to(out_dtype)


def block_product(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` of e4m3 matrices (M, K) and (N, K), in fp32; ``a_scale`` (K/128, M), ``b_scale`` (⌈N/128⌉, K/128).

    Block after block of 128 elements of k: the block's sum, which float64 holds exactly, is rounded to fp32, multiplied
    by the product of both scales, itself rounded to fp32, and added to those before it with one rounding.
    """
    total = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    for block in range(a.shape[1] // BLOCK):
        within = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = (a[:, within].double() @ b[:, within].double().t()).float()
        of_columns = b_scale[:, block].repeat_interleave(BLOCK)[: len(b)]
        factor = a_scale[block][:, None] * of_columns
        total = (factor.double() * partial.double() + total.double()).float()
    return total
