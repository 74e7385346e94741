"""Reference of ``fp4_dequantize``."""

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.formats.fp4 import decode_e2m1, decode_scale, unpack_e2m1
from torch_cute_ops.formats.scale_layout import fitting_layouts, to_linear


def fp4_dequantize(
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    block_size: int,
    scale_format: str | None,
    scale_layout: str | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Decode packed codes ``y`` (..., K/2) with their scales to numbers (..., K); see the op's docstring."""
    fmt = resolve_fp4_format(block_size, scale_format)
    if scale_layout is None:
        (layout,) = fitting_layouts(scale.shape, y.shape[:-1], 2 * y.shape[-1] // fmt.block_size)
    else:
        layout = resolve_scale_layout(scale_layout)
    value = decode_rows(y, scale, fmt, layout)
    if global_scale is not None:
        value = value / global_scale.reshape(())
    return value.to(out_dtype or torch.bfloat16)


def decode_rows(y: torch.Tensor, scale: torch.Tensor, fmt: FP4Format, layout: ScaleLayout) -> torch.Tensor:
    """Compute ``e2m1(code) · scale`` in fp32, (..., K)."""
    blocks = y.shape[-1] * 2 // fmt.block_size
    rows = y.shape[:-1].numel()
    y, scale = y.view(torch.uint8), scale.view(fmt.scale_dtype)
    linear = to_linear(scale, layout, rows, blocks)
    codes = unpack_e2m1(y).reshape(rows, blocks, fmt.block_size)
    value = decode_e2m1(codes) * decode_scale(linear, fmt).unsqueeze(-1)
    return value.reshape(*y.shape[:-1], 2 * y.shape[-1])
