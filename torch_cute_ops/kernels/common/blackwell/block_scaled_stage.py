"""A stage of operands for block-scaled ``tcgen05.mma``: no device code."""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.fp4.activation_layout import CHUNK
from torch_cute_ops.kernels.common.fp4.weight_chunks import SCALE_TILE

ROWS: Final = 128
"""Rows of the operand on the M side that a CTA has: the lanes of tensor memory."""
LINE: Final = CHUNK // 2
"""Bytes of codes of a row in a chunk."""
STEP: Final = 64
"""Elements of k of an MMA."""
COLUMNS: Final = 512
"""Of tensor memory."""
STORING_WARPS: Final = ROWS // 32
"""Warps that load sums: each can load those of 32 lanes."""
ARRANGING_WARPS: Final = 4
"""Warps that put linear scales into tiles."""
SCALE_BUFFERS: Final = 2
"""Chunks whose scales are in tensor memory."""
ALIGNMENT: Final = 1024
"""Of a stage: that of the 128-byte swizzle."""


@dataclass(frozen=True)
class BlockScaledStage:
    """A chunk of both operands in shared memory: codes of the M side, codes of the N side, scales of the N side, scales
    of the M side.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        columns: rows of the operand on the N side: columns of the accumulator.
        group: CTAs of an MMA, each of which copies the codes of as many of these rows.
        spread: whether chunks may begin in the middle of a tile of scales.
    """

    fmt: FP4Format
    layout: ScaleLayout
    columns: int
    group: int = 1
    spread: bool = False

    @property
    def arranges(self) -> bool:
        """Whether warps of the CTA put the scales in the order of tiles."""
        return self.layout.is_linear

    @property
    def own_columns(self) -> int:
        """Rows of the operand on the N side whose codes a CTA copies."""
        return self.columns // self.group

    @property
    def tile_elements(self) -> int:
        """Elements of k of a tile of scales."""
        return TILE_BLOCKS * self.fmt.block_size

    @property
    def scale_tiles(self) -> int:
        """Tiles of scales of 128 rows of a chunk."""
        return CHUNK // self.tile_elements + self.spread

    @property
    def scale_row_tiles(self) -> int:
        """Times 128 rows that the operand on the N side has."""
        return -(-self.columns // ROWS)

    @property
    def code_bytes(self) -> int:
        """Codes: those of the M side, then those of the N side."""
        return (ROWS + self.own_columns) * LINE

    @property
    def column_scale_bytes(self) -> int:
        """Scales of the N side."""
        return self.scale_row_tiles * self.scale_tiles * SCALE_TILE

    @property
    def size_bytes(self) -> int:
        """All of it."""
        size = self.code_bytes + self.column_scale_bytes + self.scale_tiles * SCALE_TILE
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory with the scales of a chunk, those of the M side first: four for each tile."""
        return (1 + self.scale_row_tiles) * self.scale_tiles * TILE_BLOCKS

    @property
    def threads(self) -> int:
        """Threads of a CTA: warps that store, copy, multiply and arrange."""
        return 32 * (STORING_WARPS + 2 + (ARRANGING_WARPS if self.arranges else 0))

    def reason_unsupported(self) -> str | None:
        """Why there is no such stage; ``None`` if there is."""
        if self.layout.tile_rows not in (0, ROWS):
            return f"scales are linear or in tiles of {ROWS} rows, not {self.layout.name}"
        return None
