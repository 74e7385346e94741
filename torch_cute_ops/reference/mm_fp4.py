"""Reference of ``mm_fp4``, and what the references of GEMMs share."""

from typing import Any

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.reference.fp4_dequantize import decode_rows


def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    a_scale: torch.Tensor | None = None,
    **formats: Any,
) -> torch.Tensor:
    """``alpha · a @ b + bias``, (M, N) in ``out_dtype``; see the op's docstring. 16-bit activations have no scales."""
    dtype = out_dtype or default_dtype(a, a_scale)
    return fp4_gemm(a, a_scale, b.t(), b_scale, alpha, bias, dtype, *formats_of(**formats))


def formats_of(
    block_size: int, scale_format: str | None, scale_layout: str, **_: Any
) -> tuple[FP4Format, ScaleLayout, ScaleLayout]:
    """Of an op's arguments: the format of both operands, and the scale layouts of the activations and of the weight."""
    layout = resolve_scale_layout(scale_layout)
    return resolve_fp4_format(block_size, scale_format), layout, weight_layout(layout)


def default_dtype(a: torch.Tensor, a_scale: torch.Tensor | None) -> torch.dtype:
    """The dtype of a result that is given none: that of 16-bit activations, which have no scales, or bfloat16."""
    return a.dtype if a_scale is None else torch.bfloat16


def fp4_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fmt: FP4Format,
    a_layout: ScaleLayout | None,
    b_layout: ScaleLayout | None,
) -> torch.Tensor:
    """``alpha · a @ b.T + bias`` of codes (rows, K/2), or of numbers ``a`` (M, K) that have no scales.

    Summed in float64 and rounded to float32, which any order of the sum leaves the same but where large terms cancel;
    then ``finished``.
    """
    assert b_layout is not None
    total = row_sums(activations(a, a_scale, fmt, a_layout), decode_rows(b, b_scale, fmt, b_layout).double()).float()
    return finished(total, alpha, bias, out_dtype)


def activations(
    a: torch.Tensor, a_scale: torch.Tensor | None, fmt: FP4Format, layout: ScaleLayout | None
) -> torch.Tensor:
    """The numbers (M, K) in float64 that are multiplied with an FP4 weight in ``fmt``.

    16-bit activations are rounded to ``FP4Format.operand_dtype`` first.
    """
    if a_scale is not None and layout is not None:
        return decode_rows(a, a_scale, fmt, layout).double()
    return a.to(fmt.operand_dtype(a.dtype)).double()


def finished(
    total: torch.Tensor, alpha: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp32 sums (M, N), times ``alpha``, plus ``bias``, with a rounding each, and rounded to the dtype."""
    if alpha is not None:
        total = total * (alpha.reshape(()) if alpha.numel() == 1 else alpha)
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype)


def row_sums(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``left @ weight.T`` of float64 matrices (M, K) and (N, K)."""
    total = left.new_empty(len(left), len(weight))
    # Row by row: torch.mm may add up in an order that depends on the number of rows.
    for row, sums in zip(left, total, strict=True):
        torch.mv(weight, row, out=sums)
    return total
