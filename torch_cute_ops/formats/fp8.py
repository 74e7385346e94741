"""FP8: e4m3 elements with fp32 scales. A scale covers a tensor, a row (token), or 128 elements of a row (a block).

With blocks, a row's length is a multiple of 64, such as 2,880 in gpt-oss. So a row's last block may contain only 64
elements.

Block scales always have the shape (..., ⌈K/128⌉). Their strides define the layout. In row-major scales, the scales of
one row are contiguous. In column-major scales, the scales of one block of k are contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats.scale_layout import ScaleLayout


@dataclass(frozen=True)
class FP8Format:
    """Granularity of the scales of e4m3 elements.

    Attributes:
        granularity: ``"tensor"``, ``"token"`` or ``"block128"``, as in the ops' argument.
        block_size: number of elements of a row that share a scale, or 0 if all elements of a row share a scale.
        is_static: True if the caller passes the scale, False if the op computes it.
    """

    granularity: str
    block_size: int
    is_static: bool

    @property
    def width_multiple(self) -> int:
        """Number that must divide the length of a row: half a block, or 1 without blocks."""
        return self.block_size // 2 or 1

    def scales_per_row(self, width: int) -> int:
        """Return the number of scales of a row of ``width`` elements, or 1 if one scale covers the whole tensor."""
        return (width + self.block_size - 1) // self.block_size if self.block_size else 1


FP8_TENSOR: Final = FP8Format("tensor", 0, is_static=True)
FP8_TOKEN: Final = FP8Format("token", 0, is_static=False)
FP8_BLOCK128: Final = FP8Format("block128", 128, is_static=False)
FP8_FORMATS: Final = {fmt.granularity: fmt for fmt in (FP8_TENSOR, FP8_TOKEN, FP8_BLOCK128)}

ROW: Final = ScaleLayout("row", 0)
COLUMN: Final = ScaleLayout("column", 0)
"""Layout of block scales in which the scales of one block of k are contiguous. GEMMs read this layout."""
FP8_SCALE_LAYOUTS: Final = {layout.name: layout for layout in (ROW, COLUMN)}


def resolve_fp8_format(granularity: str, scale_layout: str | None) -> tuple[FP8Format, ScaleLayout]:
    """Return the format for the ops' argument ``granularity``, and the layout of its scales.

    Block scales are column-major unless ``scale_layout`` names the row-major layout. Scales per token or per tensor
    have only one layout, ``ROW``.

    Raises:
        ValueError: for an unknown name.
    """
    fmt = FP8_FORMATS.get(granularity)
    if fmt is None:
        raise ValueError(f"granularity={granularity!r} is unknown; use one of {', '.join(map(repr, FP8_FORMATS))}")
    layout = COLUMN if scale_layout is None else FP8_SCALE_LAYOUTS.get(scale_layout)
    if layout is None:
        names = ", ".join(map(repr, FP8_SCALE_LAYOUTS))
        raise ValueError(f"scale_layout={scale_layout!r} is unknown; use one of {names}, or None")
    return fmt, layout if fmt.block_size else ROW


def column_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of column-major scales (..., blocks) without padding. Such scales are a transposed view of
    (blocks, rows).

    All leading dimensions together form the rows, as in a contiguous tensor. Sizes may be symbols.
    """
    *lead, _ = shape
    strides, rows = [], 1
    for extent in reversed(lead):
        strides.append(rows)
        # As torch does, treat a dimension of size 0 as size 1 when computing strides. A symbolic size is at least 2.
        rows = rows * (max(extent, 1) if isinstance(extent, int) else extent)
    return (*reversed(strides), rows)


def new_column_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised column-major tensor of the shape, dtype and device of block scales (..., blocks)."""
    return scale.new_empty_strided(scale.shape, column_strides(scale.shape))


def is_row_major(scale: torch.Tensor) -> bool:
    """Return True if the scales of each row are contiguous. Strides of dimensions of size 1 do not matter."""
    return scale.dim() == 0 or scale.shape[-1] <= 1 or scale.stride(-1) == 1


def is_column_major(scale: torch.Tensor) -> bool:
    """Return True if, in scales (..., rows, blocks), the scales of each block of k are contiguous. Blocks may have
    padding between them.

    Strides of dimensions of size 1 do not matter. So a single row, or a single block, is in both layouts.
    """
    if scale.dim() < 2 or scale.shape[-1] <= 1:
        return scale.dim() < 2 or scale.shape[-2] <= 1 or scale.stride(-2) == 1
    return scale.shape[-2] <= 1 or (scale.stride(-2) == 1 and scale.stride(-1) >= scale.shape[-2])


def is_one_column(scale: torch.Tensor) -> bool:
    """Return True if, in scales (..., rows, blocks), the scales of each block of k form one contiguous column over all
    leading dimensions.

    The FP8 kernels read such scales without a copy. The distance between the columns may be arbitrary.
    """
    step = 1
    for dim in range(scale.dim() - 2, -1, -1):
        extent = scale.shape[dim]
        if extent != 1 and scale.stride(dim) != step:
            return False
        step *= extent
    return True


def is_packed_column(scale: torch.Tensor) -> bool:
    """Return True if the scales of each block of k form one contiguous column, and the columns follow each other
    without padding.

    The FP8 kernels write scales in this layout.
    """
    return is_one_column(scale) and (scale.shape[-1] <= 1 or scale.stride(-1) == scale.shape[:-1].numel())
