"""Where the scale of (row, block) lies: the linear layout and the tiled ones that block-scaled MMA units read.

A tiled layout cuts the (rows × blocks) scale matrix into tiles of ``tile_rows × 4``, pads it to whole tiles, and stores
tile after tile. ``128x4`` is the order of cuBLAS's block-scaled products and of ``tcgen05`` (PTX ISA, "scale factor
layout"); ``8x4`` is its small-row sibling. Padding bytes are zero.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

TILE_BLOCKS: Final = 4


@dataclass(frozen=True)
class ScaleLayout:
    """A scale layout.

    Attributes:
        name: as in the ops' ``scale_layout`` argument.
        tile_rows: rows of a tile; 0 for the linear layout.
    """

    name: str
    tile_rows: int

    @property
    def is_linear(self) -> bool:
        """Whether the scales are a plain row-major matrix, without tiles and padding."""
        return self.tile_rows == 0

    def padded_rows(self, rows: int) -> int:
        """``rows``, rounded up to whole tiles."""
        return rows if self.is_linear else -(-rows // self.tile_rows) * self.tile_rows

    def padded_blocks(self, blocks: int) -> int:
        """``blocks`` (scales of one row), rounded up to whole tiles."""
        return blocks if self.is_linear else (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS * TILE_BLOCKS

    # The offset of (row, block) is a sum of one part a row and one part a block, so that a kernel computes the first
    # once a row. Arguments may be ints, tensors or a kernel's integers: only + * // % are used.

    def row_offset(self, row: Any, blocks: int) -> Any:
        """What ``row`` adds to the offset in a matrix of ``blocks`` scales a row."""
        if self.is_linear:
            return row * blocks
        tile_row = row // self.tile_rows * (self.tile_rows * self.padded_blocks(blocks))
        row = row % self.tile_rows
        if self.tile_rows == 128:
            return tile_row + row % 32 * 16 + row // 32 * TILE_BLOCKS
        return tile_row + row * TILE_BLOCKS

    def block_offset(self, block: Any) -> Any:
        """What ``block`` adds to the offset."""
        if self.is_linear:
            return block
        return block // TILE_BLOCKS * (self.tile_rows * TILE_BLOCKS) + block % TILE_BLOCKS


SCALE_LAYOUTS: Final = {
    layout.name: layout for layout in (ScaleLayout("linear", 0), ScaleLayout("128x4", 128), ScaleLayout("8x4", 8))
}


def weight_layout(layout: ScaleLayout) -> ScaleLayout:
    """The layout of a weight's scales where the activations' have ``layout``: 8x4 is for few rows only."""
    return SCALE_LAYOUTS["128x4"] if layout.tile_rows == 8 else layout


def resolve_scale_layout(name: str) -> ScaleLayout:
    """The layout of that name.

    Raises:
        ValueError: for an unknown name.
    """
    layout = SCALE_LAYOUTS.get(name)
    if layout is None:
        raise ValueError(f"scale_layout={name!r} is unknown; use one of {', '.join(map(repr, SCALE_LAYOUTS))}")
    return layout


def _offsets(layout: ScaleLayout, rows: int, blocks: int, device: torch.device) -> torch.Tensor:
    row = torch.arange(rows, device=device).unsqueeze(1)
    block = torch.arange(blocks, device=device).unsqueeze(0)
    offsets: torch.Tensor = layout.row_offset(row, blocks) + layout.block_offset(block)
    return offsets


def from_linear(scale: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """A (rows, blocks) scale matrix in ``layout``: the padded matrix, padding zero."""
    if layout.is_linear:
        return scale
    rows, blocks = scale.shape
    raw = scale.view(torch.uint8)
    tiled = raw.new_zeros(layout.padded_rows(rows) * layout.padded_blocks(blocks))
    tiled[_offsets(layout, rows, blocks, raw.device)] = raw
    return tiled.view(layout.padded_rows(rows), layout.padded_blocks(blocks)).view(scale.dtype)


def to_linear(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    """The (rows, blocks) scale matrix that ``scale`` holds in ``layout``."""
    if layout.is_linear:
        return scale.reshape(rows, blocks)
    raw = scale.reshape(-1).view(torch.uint8)
    return raw[_offsets(layout, rows, blocks, raw.device)].view(scale.dtype)
