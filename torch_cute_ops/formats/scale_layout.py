"""Offset of the scale of (row, block): the linear layout, and the tiled layouts that block-scaled MMA units read.

A tiled layout divides the (rows × blocks) scale matrix into tiles of ``tile_rows × 4``, pads it to whole tiles, and
stores tile after tile. ``128x4`` is the order of cuBLAS's block-scaled GEMMs and of ``tcgen05`` (PTX ISA, "scale factor
layout"). ``8x4`` is its variant for few rows. Padding bytes are zero.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

TILE_BLOCKS: Final = 4
FP4ScaleLayout = Literal["linear", "128x4", "8x4"]


@dataclass(frozen=True)
class ScaleLayout:
    """Scale layout.

    Attributes:
        name: name in the ops' ``scale_layout`` argument.
        tile_rows: rows of a tile; 0 for the linear layout.
    """

    name: str
    tile_rows: int

    @property
    def is_linear(self) -> bool:
        """True if the scales are a plain row-major matrix, without tiles and padding."""
        return self.tile_rows == 0

    def padded_rows(self, rows: int) -> int:
        """Round ``rows`` up to whole tiles."""
        return rows if self.is_linear else -(-rows // self.tile_rows) * self.tile_rows

    def padded_blocks(self, blocks: int) -> int:
        """Round ``blocks`` (scales of one row) up to whole tiles."""
        return blocks if self.is_linear else (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS * TILE_BLOCKS

    # The offset of (row, block) is row_offset + block_offset, so a kernel computes the first once for each row.
    # Arguments may be ints, tensors or a kernel's integers: use only + * // %.

    def row_offset(self, row: Any, blocks: int) -> Any:
        """Return the row's share of an offset, for ``blocks`` scales in each row."""
        if self.is_linear:
            return row * blocks
        tile_row = row // self.tile_rows * (self.tile_rows * self.padded_blocks(blocks))
        row = row % self.tile_rows
        if self.tile_rows == 128:
            return tile_row + row % 32 * 16 + row // 32 * TILE_BLOCKS
        return tile_row + row * TILE_BLOCKS

    def block_offset(self, block: Any) -> Any:
        """Return the block's share of an offset."""
        if self.is_linear:
            return block
        return block // TILE_BLOCKS * (self.tile_rows * TILE_BLOCKS) + block % TILE_BLOCKS


SCALE_LAYOUTS: Final = {
    layout.name: layout for layout in (ScaleLayout("linear", 0), ScaleLayout("128x4", 128), ScaleLayout("8x4", 8))
}


def weight_layout(layout: ScaleLayout) -> ScaleLayout:
    """Return the layout of a weight's scales, given the layout of the activations' scales. 8x4 is for few rows only."""
    return SCALE_LAYOUTS["128x4"] if layout.tile_rows == 8 else layout


def resolve_scale_layout(name: str) -> ScaleLayout:
    """Return the layout with this name.

    Raises:
        ValueError: for an unknown name.
    """
    layout = SCALE_LAYOUTS.get(name)
    if layout is None:
        raise ValueError(f"scale_layout={name!r} is unknown; use one of {', '.join(map(repr, SCALE_LAYOUTS))}")
    return layout


def from_linear(scale: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Convert a (rows, blocks) scale matrix to ``layout``: the padded matrix, with zeros as padding."""
    if layout.is_linear:
        return scale
    rows, blocks = scale.shape
    padded = scale.view(torch.uint8)
    row_tiles, block_tiles = layout.padded_rows(rows) // layout.tile_rows, layout.padded_blocks(blocks) // TILE_BLOCKS
    sizes = row_tiles * layout.tile_rows, block_tiles * TILE_BLOCKS
    if sizes != (rows, blocks):
        padded = padded.new_zeros(sizes)
        padded[:rows, :blocks] = scale.view(torch.uint8)
    quads = _quads(padded.contiguous())
    width = TILE_BLOCKS // quads.itemsize
    if layout.tile_rows == 128:
        tiles = quads.view(row_tiles, 4, 32, block_tiles, width).permute(0, 3, 2, 1, 4)
    else:
        tiles = quads.view(row_tiles, layout.tile_rows, block_tiles, width).transpose(1, 2)
    return tiles.contiguous().view(torch.uint8).view(sizes).view(scale.dtype)


def _quads(codes: torch.Tensor) -> torch.Tensor:
    """View bytes (..., 4 n) as 32-bit numbers (..., n): no layout separates the scales of four blocks, and moving four
    bytes at once takes a tenth of the time. Compiled code moves bytes."""
    if torch.compiler.is_compiling() or not codes.numel() or codes.storage_offset() % TILE_BLOCKS:
        return codes
    return codes.view(torch.int32)


def to_linear(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    """Convert ``scale`` from ``layout`` to the (rows, blocks) scale matrix."""
    if layout.is_linear:
        return scale.reshape(rows, blocks)
    raw = scale.reshape(-1).view(torch.uint8)
    row_tiles, block_tiles = layout.padded_rows(rows) // layout.tile_rows, layout.padded_blocks(blocks) // TILE_BLOCKS
    quads = _quads(raw)
    width = TILE_BLOCKS // quads.itemsize
    if layout.tile_rows == 128:
        matrix = quads.view(row_tiles, block_tiles, 32, 4, width).permute(0, 3, 2, 1, 4)
    else:
        matrix = quads.view(row_tiles, block_tiles, layout.tile_rows, width).transpose(1, 2)
    padded = matrix.contiguous().view(torch.uint8).view(row_tiles * layout.tile_rows, block_tiles * TILE_BLOCKS)
    return padded[:rows, :blocks].contiguous().view(scale.dtype)


def convert_scales(
    scale: torch.Tensor, rows: int, k: int, source: FP4ScaleLayout, target: FP4ScaleLayout
) -> torch.Tensor:
    """Convert block scales of an FP4 matrix from one layout to another.

    Most checkpoints store linear scales; the ops expect 128x4 by default.

    Args:
        scale: scales of a matrix (rows, k) in the layout ``source``: float8_e4m3fn (NVFP4), uint8 or float8_e8m0fnu
            (MXFP4); any shape with the right number of elements.
        rows: number of rows of the matrix; for stacked matrices, such as experts' weights, the sum of their rows.
        k: number of elements of a row.
        source: ``"linear"``, ``"128x4"`` or ``"8x4"``.
        target: ``"linear"``, ``"128x4"`` or ``"8x4"``.

    Returns:
        Scales of the same dtype, with zeros as padding: (rows, k / block size) if linear, else
        (⌈rows/128⌉·128 or ⌈rows/8⌉·8, ⌈k/block size/4⌉·4).

    Raises:
        ValueError: for an unknown layout, a ``k`` that is no multiple of the block size, or a wrong number of elements.
        TypeError: for a wrong dtype or type of argument.
    """
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"scale is {scale!r}, a {type(scale).__name__}; expected a tensor")
    for name, value in (("rows", rows), ("k", k)):
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected an int")
    blocks = {torch.float8_e4m3fn: 16, torch.uint8: 32, torch.float8_e8m0fnu: 32}
    block_size = blocks.get(scale.dtype)
    if block_size is None:
        raise TypeError(f"got scale with dtype {scale.dtype}; expected float8_e4m3fn, uint8 or float8_e8m0fnu")
    if rows < 0 or k < 0 or k % block_size:
        raise ValueError(f"rows={rows} and k={k}; expected rows of whole blocks of {block_size} elements")
    before, after = resolve_scale_layout(source), resolve_scale_layout(target)
    count = before.padded_rows(rows) * before.padded_blocks(k // block_size)
    if scale.numel() != count:
        raise ValueError(
            f"got scale with shape {tuple(scale.shape)}; expected {count} elements: {source} scales of "
            f"{rows} rows of {k}"
        )
    return from_linear(to_linear(scale, before, rows, k // block_size), after)
