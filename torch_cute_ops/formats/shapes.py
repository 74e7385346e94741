"""Shapes of quantised tensors. Sizes may be symbols."""

from collections.abc import Sequence

import torch

from torch_cute_ops.formats.fp4 import FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_TENSOR, FP8Format
from torch_cute_ops.formats.scale_layout import ScaleLayout

Shape = tuple[int, ...]
OutputShapes = list[tuple[Shape, torch.dtype]]
"""Shape and dtype of each output of an op."""


def row_count(lead: Sequence[int]) -> int:
    """Return the number of rows of a tensor with leading dimensions ``lead``."""
    rows = 1
    for extent in lead:
        rows = rows * extent
    return rows


def fp4_shapes(shape: Sequence[int], fmt: FP4Format, layout: ScaleLayout) -> tuple[Shape, Shape]:
    """Return the shapes of the packed codes and of the scales of a tensor of ``shape`` (..., K)."""
    *lead, width = shape
    blocks = width // fmt.block_size
    if layout.is_linear:
        return (*lead, width // 2), (*lead, blocks)
    return (*lead, width // 2), (layout.padded_rows(row_count(lead)), layout.padded_blocks(blocks))


def fp8_shapes(shape: Sequence[int], fmt: FP8Format, layout: ScaleLayout) -> tuple[Shape, Shape]:
    """Return the shapes of the codes and of the scales of a tensor of ``shape`` (..., K)."""
    *lead, width = shape
    if fmt == FP8_TENSOR:
        return (*lead, width), (1,)
    blocks = fmt.scales_per_row(width)
    return (*lead, width), ((blocks, row_count(lead)) if layout == COLUMN else (*lead, blocks))
