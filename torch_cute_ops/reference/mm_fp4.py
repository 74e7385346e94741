"""Reference of ``mm_fp4``."""

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.reference.fp4_dequantize import decode_rows


def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> torch.Tensor:
    """``alpha · a @ b`` of packed operands, (M, N) in ``out_dtype``; see the op's docstring."""
    fmt, layout = resolve_fp4_format(block_size, scale_format), resolve_scale_layout(scale_layout)
    return product(a, a_scale, b.t(), b_scale, alpha, out_dtype, fmt, layout, weight_layout(layout))


def product(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    fmt: FP4Format,
    a_layout: ScaleLayout | None,
    b_layout: ScaleLayout,
) -> torch.Tensor:
    """``alpha · a @ b.T`` of codes (rows, K/2), or of numbers ``a`` (M, K) that have no scales.

    Summed in float64 and rounded to float32, which any order of the sum leaves the same but where large terms cancel;
    then multiplied by ``alpha`` in float32, and rounded to ``out_dtype``.
    """
    left = a.double() if a_scale is None or a_layout is None else decode_rows(a, a_scale, fmt, a_layout).double()
    total = row_sums(left, decode_rows(b, b_scale, fmt, b_layout).double()).float()
    return (total if alpha is None else total * alpha.reshape(())).to(out_dtype)


def row_sums(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``left @ weight.T`` of float64 matrices (M, K) and (N, K)."""
    total = left.new_empty(len(left), len(weight))
    # Row by row: a matrix product may add up in an order that depends on the number of rows.
    for row, sums in zip(left, total, strict=True):
        torch.mv(weight, row, out=sums)
    return total
