"""Reference of ``grouped_mm_fp8``."""

from typing import Any

import torch

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.formats.experts import expert_of_rows, used_rows, zeroed_rows
from torch_cute_ops.formats.fp4 import decode_ue8m0
from torch_cute_ops.reference.mm_fp8 import scaled_gemm
from torch_cute_ops.reference.mm_fp8_block import BLOCK, block_scaled_gemm, factors_of_columns, linear_mx_scales


def grouped_mm_fp8(b: torch.Tensor, b_scale: torch.Tensor, **named: Any) -> torch.Tensor:
    """Apply ``mm_fp8_block``, or ``mm_fp8`` with per-token scales, to each expert's rows with the expert's weight,
    alpha and bias; see the op's docstring."""
    if b_scale.dtype != torch.float32:
        return grouped_mxfp8_gemm(weights=b.mT, b_scale=b_scale, **named)
    if b_scale.dim() < 3:
        return grouped_token_gemm(weights=b.mT, b_scale=b_scale, **named)
    return grouped_gemm(weights=b.mT, factors=factors_of_columns(b_scale, b.shape[2]), **named)


def grouped_token_gemm(
    a: torch.Tensor,
    weights: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> torch.Tensor:
    """Apply ``scaled_gemm`` to each expert's rows. Rows without an expert become 0. The arguments are as for
    ``grouped_gemm``, except:

    Args:
        a_scale: (R, 1) or (E, rows of an expert, 1) float32, or (1,).
        b_scale: (E, N) or (E,) float32, scales of the weights, already multiplied by ``alpha``.
    """
    experts, n, k = weights.shape
    rows, dtype = a.reshape(-1, k), out_dtype or torch.bfloat16
    scales = a_scale.reshape(-1, 1).expand(len(rows), 1)
    out = rows.new_zeros((len(rows), n), dtype=dtype)
    owner = expert_of_rows(len(rows), offsets, counts)
    for expert in range(experts):
        is_own = owner == expert
        some = slice(None) if is_own.is_cuda else is_own
        factor = b_scale[expert].reshape(-1)
        if alpha is not None:
            factor = factor * (alpha if alpha.numel() == 1 else alpha[expert]).reshape(-1)
        own_rows = rows.view(torch.uint8)[some].view(rows.dtype)
        added = None if bias is None else bias[expert]
        result = scaled_gemm(own_rows, weights[expert], scales[some], factor, added, dtype)
        out[some] = torch.where(is_own[some, None], result, out[some])
    return out.view(*a.shape[:-1], n)


def grouped_mxfp8_gemm(
    a: torch.Tensor,
    weights: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> torch.Tensor:
    """Apply ``mxfp8_gemm`` to each expert's rows. The other arguments are ``grouped_gemm``'s.

    Args:
        a: (R, K) or (E, rows of an expert, K) float8_e4m3fn.
        weights: (E, N, K) float8_e4m3fn.
        a_scale, b_scale: MXFP8 scales in any layout, uint8 or float8_e8m0fnu.
    """
    experts, n, k = weights.shape
    a_factors = decode_ue8m0(linear_mx_scales(a_scale, a.shape[:-1].numel(), k))
    factors = decode_ue8m0(linear_mx_scales(b_scale, experts * n, k)).view(experts, n, k // MXFP8.block_size)
    return grouped_gemm(
        a, weights, a_factors, factors, offsets, counts, alpha, bias, out_dtype, k_block=MXFP8.block_size
    )


def grouped_gemm(
    a: torch.Tensor,
    weights: torch.Tensor,
    a_scale: torch.Tensor,
    factors: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    k_block: int = BLOCK,
    **_: Any,
) -> torch.Tensor:
    """Apply ``block_scaled_gemm`` to each expert's rows. Rows without an expert become 0.

    Args:
        a: (R, K) or (E, rows of an expert, K) float8_e4m3fn.
        weights: (E, N, K) float8_e4m3fn.
        a_scale: (R, ⌈K/k_block⌉) or (E, rows of an expert, ⌈K/k_block⌉) float32, any strides.
        factors: (E, N, ⌈K/k_block⌉) float32, scales of the weights.
        offsets: (E + 1,) int32, first row of each expert, or None if all experts own equally many rows.
        counts: (E,) int32, number of rows of each expert, or None if all rows between an expert's offsets belong to it.
        alpha: (1,) or (E,) float32, or None for 1.
        bias: (E, N), or None.
        out_dtype: dtype of the output, or None for bfloat16.
        k_block: number of elements of a block.
    """
    experts, n, k = weights.shape
    rows = a.reshape(-1, k)
    scales = a_scale.reshape(-1, a_scale.shape[-1])
    out = rows.new_zeros((len(rows), n), dtype=out_dtype or torch.bfloat16)
    owner = expert_of_rows(len(rows), offsets, counts)
    for expert in range(experts):
        is_own = owner == expert
        # On a GPU compute all rows, because selecting the expert's rows would synchronise.
        some = slice(None) if is_own.is_cuda else is_own
        factor = alpha if alpha is None or alpha.numel() == 1 else alpha[expert]
        added = None if bias is None else bias[expert]
        weight = weights[expert], scales[some], factors[expert]
        own_rows = rows.view(torch.uint8)[some].view(rows.dtype)  # torch 2.9 does not index FP8
        result = block_scaled_gemm(own_rows, *weight, factor, added, out_dtype, k_block)
        out[some] = torch.where(is_own[some, None], result, out[some])
    return out.view(*a.shape[:-1], n)


def defined(
    outputs: tuple[torch.Tensor, ...], offsets: torch.Tensor | None, counts: torch.Tensor | None, **_: Any
) -> tuple[torch.Tensor, ...]:
    """Set rows without an expert to zero, because the op leaves them unspecified."""
    (out,) = outputs
    used = used_rows(out.shape[:-1].numel(), offsets, counts).view(out.shape[:-1])
    return (zeroed_rows(out, used[..., None]),)
