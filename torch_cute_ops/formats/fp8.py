"""FP8: e4m3 elements with fp32 scales, one for a tensor, for each row (token), or for each 128 elements of a row.

A row's last block may be shorter than 128: with blocks, a row's length is a multiple of 64 (gpt-oss: 2,880).
"""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats.scale_layout import ScaleLayout


@dataclass(frozen=True)
class FP8Format:
    """Granularity of the scales of e4m3 elements.

    Attributes:
        granularity: ``"tensor"``, ``"token"`` or ``"block128"``, as in the ops' argument.
        block_size: number of elements of a row that share a scale; 0 for all.
        is_static: True if the caller gives the scale, False if the op computes it.
    """

    granularity: str
    block_size: int
    is_static: bool

    @property
    def width_multiple(self) -> int:
        """Required divisor of a row's length: half a block, or 1 without blocks."""
        return self.block_size // 2 or 1

    def scales_per_row(self, width: int) -> int:
        """Return the number of scales of a row of ``width`` elements. A tensor's scale counts as one for each row."""
        return (width + self.block_size - 1) // self.block_size if self.block_size else 1


FP8_TENSOR: Final = FP8Format("tensor", 0, is_static=True)
FP8_TOKEN: Final = FP8Format("token", 0, is_static=False)
FP8_BLOCK128: Final = FP8Format("block128", 128, is_static=False)
FP8_FORMATS: Final = {fmt.granularity: fmt for fmt in (FP8_TENSOR, FP8_TOKEN, FP8_BLOCK128)}

ROW: Final = ScaleLayout("row", 0)
COLUMN: Final = ScaleLayout("column", 0)
"""Transposed scales, (blocks, rows): the scales of one block are contiguous, as TMA copies of a GEMM need them."""
FP8_SCALE_LAYOUTS: Final = {layout.name: layout for layout in (ROW, COLUMN)}


def resolve_fp8_format(granularity: str, scale_layout: str) -> tuple[FP8Format, ScaleLayout]:
    """Return the format and layout with these names.

    Raises:
        ValueError: for an unknown name, or for the column layout without blocks.
    """
    fmt, layout = FP8_FORMATS.get(granularity), FP8_SCALE_LAYOUTS.get(scale_layout)
    if fmt is None:
        raise ValueError(f"granularity={granularity!r} is unknown; use one of {', '.join(map(repr, FP8_FORMATS))}")
    if layout is None:
        names = ", ".join(map(repr, FP8_SCALE_LAYOUTS))
        raise ValueError(f"scale_layout={scale_layout!r} is unknown; use one of {names}")
    if layout == COLUMN and not fmt.block_size:
        raise ValueError(
            f"scale_layout='column' with granularity={granularity!r}: only block128 has scales to lay out; use 'row'"
        )
    return fmt, layout
