"""Reference of ``mm_fp8_block``."""

from typing import Any

import torch

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.formats.fp4 import decode_ue8m0
from torch_cute_ops.formats.scale_layout import layout_of_operand, to_linear
from torch_cute_ops.reference.mm_fp4 import apply_epilogue

BLOCK = 128
MX_GROUP = BLOCK // MXFP8.block_size
"""Number of MXFP8 scales that ``fold_mxfp8`` converts to one scale."""


def mm_fp8_block(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, **named: Any
) -> torch.Tensor:
    """Compute ``alpha · a @ b + bias`` for e4m3 matrices with block scales, (M, N); see the op's docstring."""
    if b_scale.dtype == torch.float32:
        return block_scaled_gemm(a, b.t(), a_scale, factors_of_columns(b_scale, b.shape[1]), **named)
    scales = linear_mx_scales(a_scale, *a.shape), linear_mx_scales(b_scale, *b.mT.shape)
    return mxfp8_gemm(a, b.t(), *scales, **named)


def linear_mx_scales(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Convert MXFP8 scales in any layout and dtype to linear bytes, uint8 (rows, K/32). Leading dimensions of linear
    scales are flattened into rows."""
    scale = scale.view(torch.uint8)
    return to_linear(scale, layout_of_operand(scale), rows, k // MXFP8.block_size)


def fold_mxfp8(codes: torch.Tensor, scale: torch.Tensor, by_row: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the MXFP8 scales of each 128 elements of a row, or of a row, to one scale (``kernels.mxfp8_fold``).

    Args:
        codes: (..., K) float8_e4m3fn.
        scale: (..., K/32) uint8, linear ue8m0 bytes.
        by_row: True if all elements of a row get one scale, False if each 128 elements do.

    Returns:
        Elements (..., K) float8_e4m3fn, rounded to nearest even, and the largest scale of each 128 elements, (...,
        ⌈K/128⌉) float32, or of each row, (..., 1).
    """
    blocks = scale.shape[-1]
    size = blocks if by_row else MX_GROUP
    groups = torch.nn.functional.pad(scale, (0, -blocks % size)).unflatten(-1, (-1, size))
    largest = groups.amax(-1)
    below = (largest[..., None].int() - groups).flatten(-2)[..., :blocks].repeat_interleave(MXFP8.block_size, -1)
    return torch.ldexp(codes.float(), -below).to(codes.dtype), decode_ue8m0(largest)


def mxfp8_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> torch.Tensor:
    """Compute ``alpha · a @ weight.T + bias`` for MXFP8 matrices, as ``block_scaled_gemm`` with blocks of 32 elements.

    ``a_scale`` (M, K/32) and ``b_scale`` (N, K/32) are bytes. The other arguments are ``block_scaled_gemm``'s.
    """
    scales = decode_ue8m0(a_scale), decode_ue8m0(b_scale)
    return block_scaled_gemm(a, weight, *scales, alpha, bias, out_dtype, k_block=MXFP8.block_size)


def factors_of_columns(b_scale: torch.Tensor, n: int) -> torch.Tensor:
    """Return the block scales of each row of the weight, (..., N, blocks). ``b_scale`` has this shape already, or the
    shape (..., ⌈N/128⌉, blocks) if 128 rows share block scales."""
    if b_scale.shape[-2] == n:  # N is a multiple of 8, so this differs from ⌈N/128⌉ unless both are 0
        return b_scale
    return b_scale.repeat_interleave(BLOCK, -2)[..., :n, :]


def block_scaled_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    factors: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    k_block: int = BLOCK,
    **_: Any,
) -> torch.Tensor:
    """Compute ``alpha · a @ weight.T + bias`` for e4m3 matrices with block scales.

    K is divided into blocks of ``k_block`` elements; the last block may be shorter. Each block's product is exact in
    float64 and rounded to fp32. It is multiplied by both scales, whose product is rounded to fp32, and added to the
    accumulator with one rounding. ``apply_epilogue`` then applies ``alpha`` and ``bias``.

    Args:
        a: (M, K) float8_e4m3fn.
        weight: (N, K) float8_e4m3fn.
        a_scale: (M, ⌈K/k_block⌉) float32, any strides.
        factors: (N, ⌈K/k_block⌉) float32, scales of the weight.
        alpha: (1,) or (N,) float32, or None for 1.
        bias: (N,), or None.
        out_dtype: dtype of the output, or None for bfloat16.
        k_block: number of elements of a block.
    """
    total = torch.zeros(len(a), len(weight), dtype=torch.float32, device=a.device)
    for block in range(a_scale.shape[1]):
        within = slice(block * k_block, (block + 1) * k_block)
        partial = (a[:, within].double() @ weight[:, within].t().double()).float()
        factor = a_scale[:, block, None] * factors[:, block]
        total = (factor.double() * partial.double() + total.double()).float()
    return apply_epilogue(total, alpha, bias, out_dtype or torch.bfloat16)
