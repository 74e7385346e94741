"""Shapes of quantised tensors. Sizes may be symbols."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_cute_ops.formats.fp4 import FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_DYNAMIC_TENSOR, FP8_TENSOR, MXFP8, FP8Format, column_strides
from torch_cute_ops.formats.scale_layout import ScaleLayout

Shape = tuple[int, ...]


class Output(NamedTuple):
    """Shape, dtype and strides of one output of an op.

    Attributes:
        shape: shape of the output. Sizes may be symbols.
        dtype: dtype of the output.
        strides: strides of a new tensor, or None for a contiguous tensor.
        scale_layouts: if the output contains FP8 block scales, names of the layouts in which the op can write them to a
            caller's tensor. None for an output that must be contiguous.
    """

    shape: Shape
    dtype: torch.dtype
    strides: Shape | None = None
    scale_layouts: tuple[str, ...] | None = None


OutputShapes = Sequence[tuple[Shape, torch.dtype] | Output]
"""Shape and dtype of each output of an op. An output that is not contiguous is an ``Output``."""


def fp4_shapes(shape: Sequence[int], fmt: FP4Format, layout: ScaleLayout) -> tuple[Shape, Shape]:
    """Return the shapes of the packed codes and of the block scales for a tensor of ``shape`` (..., K)."""
    *lead, width = shape
    return (*lead, width // 2), layout.shape(lead, width // fmt.block_size)


def fp8_outputs(
    shape: Sequence[int], fmt: FP8Format, layout: ScaleLayout, scale_layouts: Sequence[str]
) -> list[Output]:
    """Describe the codes and the scales for a tensor of ``shape`` (..., K).

    Args:
        shape: shape of the codes.
        fmt: format of the codes.
        layout: layout of the scales if the op creates their tensor.
        scale_layouts: names of the layouts that block scales of 128 in a caller's tensor may have.
    """
    *lead, width = shape
    y = Output((*lead, width), torch.float8_e4m3fn)
    scale: Shape = (1,) if fmt in (FP8_TENSOR, FP8_DYNAMIC_TENSOR) else layout.shape(lead, fmt.scales_per_row(width))
    if not fmt.block_size or fmt == MXFP8:
        return [y, Output(scale, fmt.scale_dtype)]
    strides = column_strides(scale) if layout == COLUMN else None
    return [y, Output(scale, torch.float32, strides, tuple(scale_layouts))]
