"""Reference of ``mm_fp4``, and functions that all GEMM references use."""

from typing import Any

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.formats.scale_layout import layout_of_operand, weight_layout
from torch_cute_ops.reference.fp4_dequantize import decode_rows


def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    a_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    **formats: Any,
) -> torch.Tensor:
    """Compute ``a @ b · row_scale · alpha + bias``, (M, N); see the op's docstring. 16-bit activations need no
    scales."""
    dtype = out_dtype or default_dtype(a, a_scale)
    resolved = formats_of(b_scale if a_scale is None else a_scale, **formats)
    return fp4_gemm(a, a_scale, b.t(), b_scale, alpha, bias, dtype, *resolved, row_scale)


def formats_of(
    scale: torch.Tensor, *, block_size: int, scale_format: str | None, scale_layout: str | None, **_: Any
) -> tuple[FP4Format, ScaleLayout, ScaleLayout]:
    """Return the format of both operands, the scale layout of the activations, and the scale layout of the weight.

    If ``scale_layout`` is None, the layout is derived from the shape of ``scale``: the activations' scales, or the
    weight's scales if the activations have none.
    """
    layout = layout_of_operand(scale) if scale_layout is None else resolve_scale_layout(scale_layout)
    return resolve_fp4_format(block_size, scale_format), layout, weight_layout(layout)


def default_dtype(a: torch.Tensor, a_scale: torch.Tensor | None) -> torch.dtype:
    """Return the default dtype of the result: the dtype of ``a`` for 16-bit activations, or bfloat16 for FP4
    activations."""
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
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``a @ b.T · row_scale · alpha + bias`` for codes (rows, K/2), or for 16-bit ``a`` (M, K) without scales.

    The product is accumulated in float64 and rounded to float32, so that the order of the additions matters only if
    large terms cancel. The scales of the rows, ``alpha`` and ``bias`` are then applied, with a rounding to float32
    after each step.
    """
    assert b_layout is not None
    total = matmul_rows(activations(a, a_scale, fmt, a_layout), decode_rows(b, b_scale, fmt, b_layout).double()).float()
    if row_scale is not None:
        total = total * row_scale[:, None]
    return apply_epilogue(total, alpha, bias, out_dtype)


def activations(
    a: torch.Tensor, a_scale: torch.Tensor | None, fmt: FP4Format, layout: ScaleLayout | None
) -> torch.Tensor:
    """Decode the activations to float64 numbers (M, K), for a GEMM with an FP4 weight in ``fmt``.

    16-bit activations are first rounded to ``FP4Format.operand_dtype``.
    """
    if a_scale is not None and layout is not None:
        return decode_rows(a, a_scale, fmt, layout).double()
    return a.to(fmt.operand_dtype(a.dtype)).double()


def apply_epilogue(
    total: torch.Tensor, alpha: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply the fp32 product (M, N) by ``alpha`` and add ``bias``, rounding to fp32 after each step. Then round to
    ``out_dtype``."""
    if alpha is not None:
        total = total * (alpha.reshape(()) if alpha.numel() == 1 else alpha)
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype)


def matmul_rows(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``left @ weight.T`` for float64 matrices (M, K) and (N, K)."""
    total = left.new_empty(len(left), len(weight))
    # Multiply row by row, because the order of torch.mm's additions may depend on the number of rows.
    for row, result in zip(left, total, strict=True):
        torch.mv(weight, row, out=result)
    return total
