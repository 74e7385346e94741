"""FP8: e4m3 elements with scales. A scale covers a tensor, a row (token), or a block of 128 or 32 elements of a row.

Scales of a tensor, a row or 128 elements are fp32. With blocks of 128, a row's length is a multiple of 64, such as
2,880 in gpt-oss. So a row's last block may contain only 64 elements. Block scales of 128 always have the shape (...,
⌈K/128⌉). Their strides define the layout. In row-major scales, the scales of one row are contiguous. In column-major
scales, the scales of one block of k are contiguous. The scales may be powers of two (ue8m0), still stored as fp32.

Blocks of 32 elements with ue8m0 scales are the format MXFP8. The scales are bytes in the layouts of FP4's block scales
(``formats.scale_layout``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats.fp4 import decode_ue8m0
from torch_cute_ops.formats.scale_layout import DEFAULT_SCALE_LAYOUT, SCALE_LAYOUTS, ScaleLayout

SHORT_BLOCK: Final = 64
"""Number of elements of the last block of a row whose length is not a multiple of 128."""


@dataclass(frozen=True)
class FP8Format:
    """Granularity of the scales of e4m3 elements.

    Attributes:
        granularity: ``"tensor"``, ``"token"``, ``"block128"`` or ``"block32"``, as in the ops' argument.
        block_size: number of elements of a row that share a scale, or 0 if all elements of a row share a scale.
        is_static: True if the caller passes the scale, False if the op computes it.
        scale_format: ``"ue8m0"`` if scales are powers of two, or None if they are any fp32 numbers.
        scale_dtype: dtype of the scale tensor that ops return.
    """

    granularity: str
    block_size: int
    is_static: bool
    scale_format: str | None = None
    scale_dtype: torch.dtype = torch.float32

    @property
    def width_multiple(self) -> int:
        """Number that must divide the length of a row: half a block of 128, a block of 32, or 1 without blocks."""
        return min(self.block_size, SHORT_BLOCK) or 1

    def scales_per_row(self, width: int) -> int:
        """Return the number of scales of a row of ``width`` elements, or 1 if one scale covers the whole tensor."""
        return (width + self.block_size - 1) // self.block_size if self.block_size else 1


FP8_TENSOR: Final = FP8Format("tensor", 0, is_static=True)
FP8_DYNAMIC_TENSOR: Final = FP8Format("tensor", 0, is_static=False)
"""One scale for the tensor, computed from the tensor."""
FP8_TOKEN: Final = FP8Format("token", 0, is_static=False)
FP8_BLOCK128: Final = FP8Format("block128", 128, is_static=False)
FP8_BLOCK128_UE8M0: Final = FP8Format("block128", 128, is_static=False, scale_format="ue8m0")
"""Blocks of 128 whose fp32 scales are powers of two, as in DeepSeek-V3.1."""
MXFP8: Final = FP8Format("block32", 32, is_static=False, scale_format="ue8m0", scale_dtype=torch.uint8)
FP8_FORMATS: Final = {fmt.granularity: fmt for fmt in (FP8_TENSOR, FP8_TOKEN, FP8_BLOCK128, MXFP8)}
"""Format of each granularity if the ops' argument ``scale_format`` is None."""
_BY_ARGUMENTS: Final[dict[tuple[str, str | None], FP8Format]] = {
    **{(fmt.granularity, None): fmt for fmt in FP8_FORMATS.values()},
    **{(fmt.granularity, fmt.scale_format): fmt for fmt in (FP8_BLOCK128_UE8M0, MXFP8)},
}

ROW: Final = ScaleLayout("row", 0)
COLUMN: Final = ScaleLayout("column", 0)
"""Layout of block scales in which the scales of one block of k are contiguous. GEMMs read this layout."""
FP8_SCALE_LAYOUTS: Final = {layout.name: layout for layout in (ROW, COLUMN)}
"""Layouts of block scales of 128. MXFP8 has the layouts of FP4's block scales instead, ``SCALE_LAYOUTS``."""


def resolve_fp8_format(
    granularity: str, scale_layout: str | None, scale_format: str | None = None
) -> tuple[FP8Format, ScaleLayout]:
    """Return the format for the ops' arguments ``granularity`` and ``scale_format``, and the layout of its scales.

    Block scales of 128 are column-major unless ``scale_layout`` names the row-major layout. MXFP8 scales are in the
    layout 128x4 unless ``scale_layout`` names another. Scales per token or per tensor have only one layout, ``ROW``.

    Raises:
        ValueError: for an unknown name, or names that do not fit each other.
    """
    if granularity not in FP8_FORMATS:
        raise ValueError(f"granularity={granularity!r} is unknown; use one of {', '.join(map(repr, FP8_FORMATS))}")
    fmt = _BY_ARGUMENTS.get((granularity, scale_format))
    if fmt is None:
        names = [repr(named) for of, named in _BY_ARGUMENTS if of == granularity]
        raise ValueError(
            f"scale_format={scale_format!r} does not fit granularity={granularity!r}; use {' or '.join(names)}"
        )
    layouts, default = (SCALE_LAYOUTS, DEFAULT_SCALE_LAYOUT) if fmt == MXFP8 else (FP8_SCALE_LAYOUTS, COLUMN.name)
    layout = layouts.get(default if scale_layout is None else scale_layout)
    if layout is None:
        names = [*map(repr, layouts)]
        raise ValueError(
            f"scale_layout={scale_layout!r} does not fit granularity={granularity!r}; use one of {', '.join(names)}, "
            "or None"
        )
    return fmt, layout if fmt.block_size else ROW


def float32_scales(scale: torch.Tensor) -> torch.Tensor:
    """Decode block scales in float8_e8m0fnu to float32, which is exact. Return scales in other dtypes unchanged."""
    return decode_ue8m0(scale.view(torch.uint8)) if scale.dtype == torch.float8_e8m0fnu else scale


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
