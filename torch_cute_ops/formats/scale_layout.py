"""Layouts of FP4 and MXFP8 block scales: the linear layout, and the tiled layouts that block-scaled MMA units read.

A tiled layout divides the (rows × blocks) scale matrix into tiles of ``tile_rows × 4``, pads it to whole tiles, and
stores tile after tile. ``128x4`` is the order that cuBLAS's block-scaled GEMMs and ``tcgen05`` read (PTX ISA, "scale
factor layout"). ``8x4`` is a variant of ``128x4`` for few rows. Bytes of padding are zero.

The shape of a scale tensor identifies its layout. For M rows of K elements in blocks of B, the scale of row m and block
k has these indices:

=======  =================================  =============================================
layout   shape                              index of (m, k)
=======  =================================  =============================================
128x4    (⌈M/128⌉, ⌈K/B/4⌉, 32, 4, 4)       [m // 128, k // 4, m % 32, m % 128 // 32, k % 4]
8x4      (⌈M/8⌉, ⌈K/B/4⌉, 8, 4)             [m // 8, k // 4, m % 8, k % 4]
linear   (…, K/B), as the matrix's rows     [m, k]
=======  =================================  =============================================
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

TILE_BLOCKS: Final = 4
DEFAULT_SCALE_LAYOUT: Final = "128x4"
"""Layout that quantising ops write by default."""
FP4ScaleLayout = Literal["linear", "128x4", "8x4"]


@dataclass(frozen=True)
class ScaleLayout:
    """Layout of a tensor's block scales.

    Attributes:
        name: name in the ops' ``scale_layout`` argument.
        tile_rows: number of rows of a tile, or 0 for the linear layout.
    """

    name: str
    tile_rows: int

    @property
    def is_linear(self) -> bool:
        """True if the scales are a plain row-major matrix, without tiles and padding."""
        return self.tile_rows == 0

    @property
    def tile(self) -> tuple[int, ...]:
        """Shape of one tile in memory, row-major, or empty for the linear layout."""
        return () if self.is_linear else (32, 4, 4) if self.tile_rows == 128 else (self.tile_rows, TILE_BLOCKS)

    def shape(self, lead: Sequence[int], blocks: int) -> tuple[int, ...]:
        r"""Return the shape of the scales of a tensor (\*lead, blocks · B), where B is the block size. Sizes may be
        symbols."""
        if self.is_linear:
            return (*lead, blocks)
        return -(-row_count(lead) // self.tile_rows), -(-blocks // TILE_BLOCKS), *self.tile

    def padded_rows(self, rows: int) -> int:
        """Round a number of rows up to whole tiles."""
        return rows if self.is_linear else -(-rows // self.tile_rows) * self.tile_rows

    def padded_blocks(self, blocks: int) -> int:
        """Round a number of blocks per row up to whole tiles."""
        return blocks if self.is_linear else (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS * TILE_BLOCKS

    # The offset of (row, block) is row_offset + block_offset, so that a kernel can compute row_offset once per row.
    # Arguments may be ints, tensors or the DSL's integers, so use only + * // %.

    def row_offset(self, row: Any, blocks: int) -> Any:
        """Return the part of a scale's offset that depends on the row. Each row consists of ``blocks`` blocks."""
        if self.is_linear:
            return row * blocks
        tile_row = row // self.tile_rows * (self.tile_rows * self.padded_blocks(blocks))
        row = row % self.tile_rows
        if self.tile_rows == 128:
            return tile_row + row % 32 * 16 + row // 32 * TILE_BLOCKS
        return tile_row + row * TILE_BLOCKS

    def block_offset(self, block: Any) -> Any:
        """Return the part of a scale's offset that depends on the block."""
        if self.is_linear:
            return block
        return block // TILE_BLOCKS * (self.tile_rows * TILE_BLOCKS) + block % TILE_BLOCKS


SCALE_LAYOUTS: Final = {
    layout.name: layout for layout in (ScaleLayout("linear", 0), ScaleLayout("128x4", 128), ScaleLayout("8x4", 8))
}


def row_count(lead: Sequence[int]) -> int:
    """Return the number of rows of a tensor with leading dimensions ``lead``."""
    rows = 1
    for extent in lead:
        rows = rows * extent
    return rows


def weight_layout(layout: ScaleLayout) -> ScaleLayout:
    """Return the scale layout of a weight for activations with this scale layout. Only activations use 8x4; the
    weight's layout is then 128x4."""
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


def layout_of_operand(scale: torch.Tensor) -> ScaleLayout:
    """Return the layout of the scales of a GEMM's operand, from their number of dimensions.

    Scales with more than three dimensions are tiled: an operand has at most three dimensions (a stack of experts'
    weights), and linear scales have as many dimensions as their operand. The sizes are not checked.
    """
    return _BY_DIMENSIONS.get(len(scale.shape), SCALE_LAYOUTS["linear"])


_BY_DIMENSIONS: Final = {2 + len(layout.tile): layout for layout in SCALE_LAYOUTS.values() if not layout.is_linear}


def fitting_layouts(shape: Sequence[int], lead: Sequence[int], blocks: int) -> list[ScaleLayout]:
    r"""Return all layouts in which the scales of a tensor (\*lead, blocks · B) have the shape ``shape``."""
    # Compare lengths first. Comparing tuples of unequal lengths would compare elements, and add a guard on a symbolic
    # number of rows.
    sizes = [(layout, layout.shape(lead, blocks)) for layout in SCALE_LAYOUTS.values()]
    return [layout for layout, size in sizes if len(shape) == len(size) and tuple(shape) == size]


def reason_no_tiles(scale: torch.Tensor, lead: Sequence[int], blocks: int, layout: ScaleLayout) -> str | None:
    r"""Return the reason why ``scale`` cannot contain the tiles of a tensor (\*lead, blocks · B), or None if it can.

    Tiles may have the shape of ``ScaleLayout.shape``, be flat, or be the padded matrix (padded rows, padded blocks).
    Scales of stacked matrices (``lead`` has two dimensions) may also have a first dimension for the matrices. This is
    allowed only if no matrix needs padding rows, because only then is the order of the bytes the same with and without
    this dimension.
    """
    tiles, padded_blocks = layout.shape(lead, blocks), layout.padded_blocks(blocks)
    count = row_count(tiles)
    shape = tuple(scale.shape)
    if shape == tiles:
        return None
    rows = layout.padded_rows(row_count(lead))
    if len(lead) == 2 and lead[0] != 1:
        experts, own = lead
        padded_own = layout.padded_rows(own)
        separate = (experts, padded_own, padded_blocks), (experts, *layout.shape((own,), blocks))
        if own % layout.tile_rows:
            of_experts = experts * padded_own * padded_blocks
            if shape in separate or (scale.numel() == of_experts and len(shape) <= 2):
                return (
                    f"they may be padded expert by expert, {own} rows to whole tiles of {layout.tile_rows}; expected "
                    f"tiles over the rows of all experts, {tiles}. Convert each expert's scales to linear: "
                    f"torch.stack([convert_scales(one, {own}, K, {layout.name!r}, 'linear') for one in scale])"
                )
        elif shape in separate:
            return None
    if shape in ((count,), (rows, padded_blocks)):
        return None
    return f"expected {tiles}, or the same tiles as a matrix {(rows, padded_blocks)} or flat, {(count,)}"


def as_tiles(scale: torch.Tensor, rows: int, k: int, layout: FP4ScaleLayout) -> torch.Tensor:
    """View another library's tiled scales in the shape that identifies their layout, without a copy.

    Ops read the layout from the shape. Call ``as_tiles(scale, rows, k, "128x4")`` for the two-dimensional padded scales
    of FlashInfer, vLLM and cuBLAS, or for the flat scales of torchao. If the bytes are in another layout, no check can
    detect it.

    Args:
        scale: scales of a matrix (rows, k), contiguous, in the order of ``layout``. The shape may be flat, (padded
            rows, padded blocks), or already the shape of tiles. The dtype is float8_e4m3fn (NVFP4), or uint8 or
            float8_e8m0fnu (MXFP4, MXFP8). Scales of experts, (experts, padded rows, padded blocks), are accepted if the
            rows of an expert are whole tiles.
        rows: number of rows of the matrix; for stacked matrices, such as experts' weights, the sum of their rows.
        k: number of elements of a row.
        layout: ``"128x4"`` or ``"8x4"``.

    Returns:
        A view of ``scale``: (⌈rows/128⌉, ⌈k/B/4⌉, 32, 4, 4) for 128x4, or (⌈rows/8⌉, ⌈k/B/4⌉, 8, 4) for 8x4. B is 16
            for float8_e4m3fn and otherwise 32.

    Raises:
        ValueError: for an unknown or linear layout, a ``k`` that is not a multiple of B, a wrong shape, or scales that
            are not contiguous.
        TypeError: for a wrong dtype or type of argument.

    Example:
        >>> import torch
        >>> from torch_cute_ops import as_tiles
        >>> scale = torch.zeros(256 * 8, dtype=torch.uint8).view(torch.float8_e4m3fn)  # flat, as torchao holds it
        >>> tuple(as_tiles(scale, 200, 128, "128x4").shape)
        (2, 2, 32, 4, 4)
    """
    blocks = _blocks_of("as_tiles", scale, rows, k)
    resolved = resolve_scale_layout(layout)
    if resolved.is_linear:
        raise ValueError("as_tiles: linear scales have no tiles; use convert_scales, or scale.view(rows, -1)")
    lead: tuple[int, ...] = (rows,)
    if scale.dim() in (3, 3 + len(resolved.tile)) and scale.shape[0] > 1 and rows % scale.shape[0] == 0:
        lead = scale.shape[0], rows // scale.shape[0]
    reason = reason_no_tiles(scale, lead, blocks, resolved)
    if reason is not None:
        hint = _hint_of_dtype(scale, rows, k)
        raise ValueError(f"as_tiles: got scale with shape {tuple(scale.shape)}; {reason}{hint}")
    if not scale.is_contiguous():
        raise ValueError(f"as_tiles: got scale with strides {scale.stride()}; pass scale.contiguous()")
    return scale.view(resolved.shape((rows,), blocks))


def from_linear(scale: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Convert a (rows, blocks) scale matrix to ``layout``. Tiles are padded with zeros."""
    if layout.is_linear:
        return scale
    rows, blocks = scale.shape
    codes = scale.view(torch.uint8)
    sizes = layout.padded_rows(rows), layout.padded_blocks(blocks)
    if sizes != (rows, blocks):
        codes = codes.new_zeros(sizes)
        codes[:rows, :blocks] = scale.view(torch.uint8)
    tiles = _reordered(codes.contiguous(), layout, sizes, from_tiles=False)
    return tiles.view(layout.shape((rows,), blocks)).view(scale.dtype)


def to_linear(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    """Convert ``scale`` from ``layout`` to the (rows, blocks) scale matrix."""
    if layout.is_linear:
        return scale.reshape(rows, blocks)
    sizes = layout.padded_rows(rows), layout.padded_blocks(blocks)
    padded = _reordered(scale.contiguous().view(torch.uint8).view(-1), layout, sizes, from_tiles=True).view(sizes)
    return padded[:rows, :blocks].contiguous().view(scale.dtype)


def _reordered(codes: torch.Tensor, layout: ScaleLayout, sizes: tuple[int, int], *, from_tiles: bool) -> torch.Tensor:
    """Copy contiguous bytes from tiles to the padded matrix, whose ``sizes`` are (rows, blocks), or back to tiles."""
    quads = _quads(codes)
    width = TILE_BLOCKS // quads.itemsize
    row_tiles, block_tiles = sizes[0] // layout.tile_rows, sizes[1] // TILE_BLOCKS
    groups, rows = (4, 32) if layout.tile_rows == 128 else (1, layout.tile_rows)
    matrix, tiles = (row_tiles, groups, rows, block_tiles, width), (row_tiles, block_tiles, rows, groups, width)
    # The same permutation serves both directions, because it is its own inverse.
    reordered = quads.view(tiles if from_tiles else matrix).permute(0, 3, 2, 1, 4)
    return reordered.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _quads(codes: torch.Tensor) -> torch.Tensor:
    """View bytes (..., 4 n) as 32-bit numbers (..., n), except in compiled code.

    Every layout stores the scales of four neighbouring blocks together. Moving four bytes at once takes a tenth of the
    time.
    """
    if torch.compiler.is_compiling() or not codes.numel() or codes.storage_offset() % TILE_BLOCKS:
        return codes
    return codes.view(torch.int32)


def convert_scales(
    scale: torch.Tensor, rows: int, k: int, source: FP4ScaleLayout, target: FP4ScaleLayout
) -> torch.Tensor:
    """Convert block scales of an FP4 or MXFP8 matrix from one layout to another.

    Most checkpoints store linear scales; quantisers write 128x4 by default.

    Args:
        scale: scales of a matrix (rows, k) in the layout ``source``: float8_e4m3fn (NVFP4), uint8 or float8_e8m0fnu
            (MXFP4, MXFP8). Linear scales: (…, k / B), with any leading dimensions for the rows. Tiled scales: the shape
            that :func:`as_tiles` returns. Another library's flat or padded matrix is accepted too, except in a shape
            that linear scales could also have.
        rows: number of rows of the matrix; for stacked matrices, such as experts' weights, the sum of their rows.
        k: number of elements of a row.
        source: ``"linear"``, ``"128x4"`` or ``"8x4"``.
        target: ``"linear"``, ``"128x4"`` or ``"8x4"``.

    Returns:
        Scales of the same dtype, with zeros as padding: (rows, k/B) if linear, (⌈rows/128⌉, ⌈k/B/4⌉, 32, 4, 4) for
        128x4, (⌈rows/8⌉, ⌈k/B/4⌉, 8, 4) for 8x4. B is 16 for float8_e4m3fn and otherwise 32.

    Raises:
        ValueError: for an unknown layout, a ``k`` that is not a multiple of the block size, or a wrong shape. A shape
            is also wrong if it fits linear scales as well as tiles.
        TypeError: for a wrong dtype or type of argument.
    """
    blocks = _blocks_of("convert_scales", scale, rows, k)
    before, after = resolve_scale_layout(source), resolve_scale_layout(target)
    shape = tuple(scale.shape)
    fits_linear = scale.dim() > 0 and shape[-1] == blocks and scale.numel() == rows * blocks
    if before.is_linear:
        tiles = [each.name for each in fitting_layouts(shape, (rows,), blocks) if not each.is_linear]
        if tiles:
            raise ValueError(
                f"convert_scales: got scale with shape {shape}, the shape of {tiles[0]} scales; for linear scales pass "
                f"scale.reshape({rows}, {blocks})"
            )
        if not fits_linear:
            hint = _hint_of_dtype(scale, rows, k)
            raise ValueError(
                f"convert_scales: got scale with shape {shape}; expected linear scales, {(rows, blocks)}{hint}"
            )
    elif shape != before.shape((rows,), blocks):
        reason = reason_no_tiles(scale, (rows,), blocks, before)
        if reason is not None:
            hint = _hint_of_dtype(scale, rows, k)
            raise ValueError(f"convert_scales: got scale with shape {shape}; {reason}{hint}")
        if fits_linear:
            raise ValueError(
                f"convert_scales: got scale with shape {shape}, which linear scales of {rows} rows of {k} elements "
                f"have too; if it holds tiles, pass as_tiles(scale, {rows}, {k}, {source!r})"
            )
    return from_linear(to_linear(scale, before, rows, blocks), after)


def _hint_of_dtype(scale: torch.Tensor, rows: int, k: int) -> str:
    """Return advice to view uint8 scales as float8_e4m3fn if the number of scales fits NVFP4, else an empty string."""
    if scale.dtype != torch.uint8 or k % 16:
        return ""
    counts = [row_count(layout.shape((rows,), k // 16)) for layout in SCALE_LAYOUTS.values()]
    fix = "; bytes are MXFP4's scales: for NVFP4 pass scale.view(torch.float8_e4m3fn)"
    return fix if scale.numel() in counts else ""


def _blocks_of(name: str, scale: torch.Tensor, rows: int, k: int) -> int:
    """Check the arguments of the public function ``name``. Return the number of blocks in a row of ``k`` elements."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name}: scale is {scale!r}, a {type(scale).__name__}; expected a tensor")
    for argument, value in (("rows", rows), ("k", k)):
        if not isinstance(value, (numbers.Integral, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {value!r}, a {type(value).__name__}; expected an int")
    block_size = _BLOCK_SIZES.get(scale.dtype)
    if block_size is None:
        raise TypeError(
            f"{name}: got scale with dtype {scale.dtype}; expected float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu "
            "(MXFP4)"
        )
    if rows < 0 or k < 0 or k % block_size:
        raise ValueError(f"{name}: rows={rows} and k={k}; expected rows of whole blocks of {block_size} elements")
    return k // block_size


_BLOCK_SIZES: Final = {torch.float8_e4m3fn: 16, torch.uint8: 32, torch.float8_e8m0fnu: 32}
"""Number of elements of a block, keyed by the dtype of its scale."""
