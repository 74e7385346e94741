"""FP8: e4m3 elements under fp32 scales, one for the tensor, for each row (token), or for each 128 elements of a row.

With blocks, the last block of a row may be short: a row is a multiple of 64 elements (gpt-oss is 2,880 wide).
"""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats.scale_layout import ScaleLayout


@dataclass(frozen=True)
class FP8Format:
    """What shares a scale.

    Attributes:
        granularity: ``"tensor"``, ``"token"`` or ``"block128"``, as in the ops' argument.
        block_size: elements of a row that share a scale; 0: all of them.
        is_static: whether the scale is given instead of computed.
    """

    granularity: str
    block_size: int
    is_static: bool

    @property
    def width_multiple(self) -> int:
        """What the length of a row is a multiple of: with blocks, half a block."""
        return self.block_size // 2 or 1

    def scales_per_row(self, width: int) -> int:
        """Scales of a row of ``width`` elements; the one of a tensor counts as each row's."""
        return (width + self.block_size - 1) // self.block_size if self.block_size else 1


FP8_TENSOR: Final = FP8Format("tensor", 0, is_static=True)
FP8_TOKEN: Final = FP8Format("token", 0, is_static=False)
FP8_BLOCK128: Final = FP8Format("block128", 128, is_static=False)
FP8_FORMATS: Final = {fmt.granularity: fmt for fmt in (FP8_TENSOR, FP8_TOKEN, FP8_BLOCK128)}

ROW: Final = ScaleLayout("row", 0)
COLUMN: Final = ScaleLayout("column", 0)
"""Scales of one block of columns side by side: (blocks, rows), as TMA reads them for a GEMM."""
FP8_SCALE_LAYOUTS: Final = {layout.name: layout for layout in (ROW, COLUMN)}


def resolve_fp8_format(granularity: str, scale_layout: str) -> tuple[FP8Format, ScaleLayout]:
    """The format and layout of these names.

    Raises:
        ValueError: for an unknown name, and for the column layout without blocks.
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
