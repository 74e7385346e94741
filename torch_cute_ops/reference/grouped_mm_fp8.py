"""Reference of ``grouped_mm_fp8``."""

import inspect
from typing import Any

import torch

from torch_cute_ops.formats.experts import expert_of_rows, used_rows, zeroed_rows
from torch_cute_ops.reference.mm_fp8_block import block_scaled_gemm, factors_of_columns


def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    static_weight: bool = False,
) -> torch.Tensor:
    """``mm_fp8_block`` of each expert's rows, with its ``alpha`` and bias; zero in other rows; see
    the op's docstring."""
    factors = factors_of_columns(b_scale, b.shape[1])
    return grouped_gemm(a, b, a_scale, factors, offsets, counts, alpha, bias, out_dtype or torch.bfloat16)


def grouped_gemm(
    a: torch.Tensor,
    weights: torch.Tensor,
    a_scale: torch.Tensor,
    factors: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``block_scaled_gemm`` of each expert's rows, weight (N, K) and ``factors`` (N, ⌈K/128⌉); zero in other rows."""
    experts, n, k = weights.shape
    rows = a.reshape(-1, k)
    scales = a_scale.reshape(a_scale.shape[0], -1)
    out = rows.new_zeros((len(rows), n), dtype=out_dtype)
    owner = expert_of_rows(len(rows), offsets, counts)
    for expert in range(experts):
        is_own = owner == expert
        # A GPU computes all rows: which are the expert's would have to be waited for.
        some = slice(None) if is_own.is_cuda else is_own
        factor = alpha if alpha is None or alpha.numel() == 1 else alpha[expert]
        added = None if bias is None else bias[expert]
        weight = weights[expert], scales[:, some], factors[expert]
        result = block_scaled_gemm(rows[some], *weight, factor, added, out_dtype)
        out[some] = torch.where(is_own[some, None], result, out[some])
    return out.view(*a.shape[:-1], n)


def defined(outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The result with zeros in rows that no expert has."""
    return defined_rows(outputs, **inspect.signature(grouped_mm_fp8).bind(*args, **kwargs).arguments)


def defined_rows(
    outputs: tuple[torch.Tensor, ...],
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """The result with zeros in rows that no expert has, for arguments by name."""
    (out,) = outputs
    used = used_rows(out.shape[:-1].numel(), offsets, counts).view(out.shape[:-1])
    return (zeroed_rows(out, used[..., None]),)
