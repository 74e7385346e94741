"""Sizes of the chunks of an FP4 weight in shared memory: no device code."""

import math
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats import SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.fp4.activation_layout import CHUNK

TILE_ROWS: Final = SCALE_LAYOUTS["128x4"].tile_rows
"""Rows of a tile of scales; tiles are copied whole."""
SCALE_TILE: Final = TILE_ROWS * TILE_BLOCKS
"""Bytes of a tile of scales, 128 rows x 4 blocks."""
BOX_BYTES: Final = 16
"""The least bytes of a row in a box of a tensor map."""


@dataclass(frozen=True)
class WeightChunks:
    """Chunks of ``elements`` of k, 256 or 128, of ``rows`` rows, a multiple of 8. ``spread``: whether their k may begin
    in the middle of a tile of scales; rows may anyway."""

    fmt: FP4Format
    layout: ScaleLayout
    rows: int
    elements: int = CHUNK
    spread: bool = False

    @property
    def line(self) -> int:
        """Bytes of codes of a row in a chunk: a whole cache line, or half of one."""
        return self.elements // 2

    @property
    def blocks(self) -> int:
        """Blocks of a row in a chunk."""
        return self.elements // self.fmt.block_size

    @property
    def scale_columns(self) -> int:
        """Scales of a row in a stage: those of a chunk; spread, of whole tiles around it."""
        return self.blocks + TILE_BLOCKS * self.spread

    @property
    def code_bytes(self) -> int:
        """Codes of a chunk."""
        return self.rows * self.line

    @property
    def scale_row_tiles(self) -> int:
        """Most tiles of scales that a chunk spans along the rows; 0 in the linear layout."""
        last_start = TILE_ROWS - math.gcd(self.rows, TILE_ROWS)
        return 0 if self.layout.is_linear else -(-(last_start + self.rows) // TILE_ROWS)

    @property
    def scale_bytes(self) -> int:
        """Scales of a chunk."""
        return (self.scale_row_tiles * TILE_ROWS or self.rows) * self.scale_columns

    @property
    def reason_not_copied(self) -> str | None:
        """Why a tensor map cannot copy a chunk's scales; ``None`` if one can, or none is needed."""
        if self.layout.is_linear and self.blocks < BOX_BYTES:
            return f"a box of linear scales has {BOX_BYTES} bytes of a row; {self.elements} elements have {self.blocks}"
        return None

    @property
    def size_bytes(self) -> int:
        """A chunk, codes and scales."""
        return self.code_bytes + self.scale_bytes
