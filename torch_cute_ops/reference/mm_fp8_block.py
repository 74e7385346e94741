"""Reference of ``mm_fp8_block``."""

import torch

from torch_cute_ops.reference.mm_fp4 import finished

BLOCK = 128


def mm_fp8_block(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``alpha · a @ b + bias`` of e4m3 matrices under block scales, (M, N) in ``out_dtype``; see the op's docstring.

    Block after block of 128 elements of k, the last of which may be shorter: the block's sum, which float64 holds
    exactly, is rounded to fp32, multiplied by the product of both scales, itself rounded to fp32, and added to those
    before it with one rounding. Then ``finished``.
    """
    n = b.shape[1]
    total = torch.zeros(len(a), n, dtype=torch.float32, device=a.device)
    for block in range(a_scale.shape[0]):
        within = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = (a[:, within].double() @ b[within].double()).float()
        of_columns = b_scale[:, block].repeat_interleave(BLOCK)[:n]
        factor = a_scale[block][:, None] * of_columns
        total = (factor.double() * partial.double() + total.double()).float()
    return finished(total, alpha, bias, out_dtype or torch.bfloat16)
