"""Outputs of ``fp4_quantize`` and of other ops that quantise rows to FP4."""

from typing import Any

import torch

from torch_cute_ops.formats import resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.formats.shapes import OutputShapes, fp4_shapes


def fp4_quantize(
    input: torch.Tensor, block_size: int, scale_format: str | None, scale_layout: str, **_: Any
) -> OutputShapes:
    """Describe the codes (..., H/2) and the block scales."""
    return fp4_outputs(input.shape, block_size, scale_format, scale_layout)


def fp4_outputs(
    shape: tuple[int, ...], block_size: int, scale_format: str | None, scale_layout: str = "128x4"
) -> OutputShapes:
    """Describe the codes and the block scales that quantising a tensor of ``shape`` (..., K) to FP4 gives."""
    fmt = resolve_fp4_format(block_size, scale_format)
    y, scale = fp4_shapes(shape, fmt, resolve_scale_layout(scale_layout))
    return [(y, torch.uint8), (scale, fmt.scale_dtype)]
