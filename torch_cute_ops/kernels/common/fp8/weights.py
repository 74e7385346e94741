"""Weight sources of FP8 GEMMs: arguments, views over experts, and layout in the stages of the pipeline.

Interface:

- ``arguments(n, k, blocks, experts)``: kernel arguments of the weight and its scales;
- ``views(b, b_scale)``: the weight and its scales as matrices over all experts;
- ``layout(stages)``: layout of copied weight rows in shared memory, (rows, bytes of a row, stages);
- ``stages(stages, smem)``: the weight's stages in shared memory;
- ``await_rows(expert, column, work)``: wait until a tile's weight rows and scales can be read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.formats import MXFP4, FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.common.fp8.gemm import Smem, k_tiles, k_tiles_layout, token_scales
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, FP8GemmConfig
from torch_cute_ops.kernels.common.fp8.tiles import Tile, by_expert
from torch_cute_ops.runtime.argspec import Dim, TensorArg

SLOT_PIECES = K_TILE // 2 // VECTOR_BYTES
"""Number of 16-byte pieces that the FP4 codes of a weight row fill in a k tile."""


def fp8_argument(n: Dim, k: Dim, experts: Dim | None) -> TensorArg:
    """Return the argument of an FP8 weight, a transposed view: (K, N) or (E, K, N)."""
    if experts is None:
        return TensorArg("Float8E4M3FN", (k, n), (1, k), align=16)
    return TensorArg("Float8E4M3FN", (experts, k, n), (Dim("b_of_expert", bits=64, divisibility=16), 1, k), align=16)


class FP8Weight:
    """An FP8 weight, copied to the stages.

    Args:
        tile_n: weight rows of a tile.
        is_plain: True for one weight matrix, False for one matrix per expert.
        has_blocks: True for block scales. If False, ``alpha`` contains the weight's scales.
    """

    def __init__(self, tile_n: int, is_plain: bool, has_blocks: bool = True):
        self.tile_n, self.is_plain, self.has_blocks = tile_n, is_plain, has_blocks

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg | None]:
        if not self.has_blocks:
            return fp8_argument(n, k, experts), None
        rows = Dim("b_scale_rows")
        if experts is None:
            scale = TensorArg("Float32", (rows, blocks), (blocks, 1), align=4)
        else:
            of_expert = Dim("b_scale_of_expert", bits=64)
            scale = TensorArg("Float32", (experts, rows, blocks), (of_expert, blocks, 1), align=4)
        return fp8_argument(n, k, experts), scale

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Return the weight (N, K, E) and its scales (⌈N / 128⌉, blocks, E), or None without block scales."""
        return by_expert(b, is_transposed=True), by_expert(b_scale) if self.has_blocks else None

    def layout(self, stages: int):
        return k_tiles_layout(self.tile_n, stages)

    def stages(self, stages: int, smem: Smem) -> cute.Tensor:
        return k_tiles(smem.b, self.tile_n, stages)

    def await_rows(self, expert, column, work) -> None:
        """Return immediately, because the weight is complete."""


class FP4Weight:
    """An FP4 weight. Its codes are copied to the stages unchanged.

    The codes are (K/2, N) or (E, K/2, N). Linear scales are (N, K/B) or (E, N, K/B); tiled scales are the scales of one
    matrix with the rows of all experts.

    Args:
        fmt, layout: format and scale layout.
        is_plain: True for one weight matrix, False for one matrix per expert.
        copied_n: weight rows that a CTA copies.
        line: bytes of codes of a row in a stage.
    """

    def __init__(self, fmt: FP4Format, layout: ScaleLayout, is_plain: bool, copied_n: int = 0, line: int = 0):
        self.fmt, self.scale_layout, self.is_plain = fmt, layout, is_plain
        self.copied_n, self.line = copied_n, line
        self.tile_scales = K_TILE // fmt.block_size

    # On the host

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        half, scales = Dim("k_bytes", divisibility=32), Dim("b_blocks", divisibility=64 // self.fmt.block_size)
        if experts is None:
            b = TensorArg("Uint8", (half, n), (1, half), align=16)
        else:
            of_expert = Dim("b_of_expert", bits=64, divisibility=16)
            b = TensorArg("Uint8", (experts, half, n), (of_expert, 1, half), align=16)
        if not self.scale_layout.is_linear:
            return b, scale_argument(self.fmt, self.scale_layout, n, scales, name="b_")
        if experts is None:
            return b, scale_argument(self.fmt, self.scale_layout, n, scales)
        dtype = DSL_DTYPES[self.fmt.scale_dtype].__name__
        of_expert = Dim("b_scale_of_expert", bits=64, divisibility=4)
        return b, TensorArg(dtype, (experts, n, scales), (of_expert, scales, 1), align=16)

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the codes (N, K/2, E), and the scales as bytes: linear (N, K/B, E), tiled unchanged."""
        b_scale = scale_matrix(b_scale, self.scale_layout)
        scale = cute.make_tensor(cute.recast_ptr(b_scale.iterator, dtype=Uint8), b_scale.layout)
        if self.scale_layout.is_linear:
            scale = by_expert(scale)
        return by_expert(b, is_transposed=True), scale

    # Codes in the stages

    def layout(self, stages: int):
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW64 if self.line == 64 else kinds.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, Uint8)
        return cute.tile_to_shape(atom, (self.copied_n, self.line, stages), order=(0, 1, 2))

    def stages(self, stages: int, smem: Smem) -> cute.Tensor:
        layout = self.layout(stages)
        return cute.make_tensor(cute.recast_ptr(smem.b, layout.inner, dtype=Uint8), layout.outer)

    def await_rows(self, expert, column, work) -> None:
        """Return immediately, because the weight is complete."""

    def line_offset(self, slot, row, index, span: int) -> Int32:
        """Return the offset of the ``index``-th 16-byte piece of a row's codes in a slot.

        A stage holds ``span`` k tiles, and its rows are lines of 128 bytes. The swizzle permutes the pieces of a line
        by the index of the row.
        """
        of_row = (slot // span * self.copied_n + row) * self.line
        return of_row + (slot % span * SLOT_PIECES + index ^ row % 8) * VECTOR_BYTES

    # Scales in memory

    def row_scales(self, scale: cute.Tensor, n, expert, row, exists, first, left) -> list:
        """Load a k tile's scales of a weight row as words of four scales. Scales that do not exist are zero.

        Args:
            scale: scales of the weight, as ``views`` returns them.
            n: number of rows of an expert's weight.
            expert, row: index of the expert, and index of the row in the expert's weight.
            exists: True if the row exists.
            first: index of the k tile's first scale in the row, an Int64.
            left: number of scales of the row from ``first`` on.
        """
        words = self.tile_scales // 4
        at = scale.iterator + self.scale_offset(scale, n, expert, row, first)
        if self.scale_layout.is_linear:
            if self.fmt == MXFP4:
                # The bytes of a row of scales are a multiple of two.
                halves = [ptx.load_narrow_if(at, exists & (2 * i < left), 2, 2 * i) for i in range(2)]
                return [halves[0] | (halves[1] << 16)]
            return [ptx.load_if(at, exists & (4 * i < left), 1, 4 * i)[0] for i in range(words)]
        offsets = [self.scale_layout.block_offset(4 * i) for i in range(words)]
        return [ptx.load_if(at, exists & (4 * i < left), 1, offset)[0] for i, offset in enumerate(offsets)]

    def scale_offset(self, scale: cute.Tensor, n, expert, row, place) -> Int64:
        """Return the offset in ``scale`` of scale ``place``, an Int64, of a weight row."""
        if self.scale_layout.is_linear:
            return Int64(expert) * scale.stride[2] + Int64(row) * scale.stride[0] + place
        offset = self.scale_layout.row_offset(Int64(expert) * n + row, Int64(scale.shape[1]))
        return offset + self.scale_layout.block_offset(place)

    def without_padding(self, words: list, left) -> list:
        """Replace the undefined scales after the end of a row by the scales of the k tile's first half, which fit the
        same unit. ``left`` is the number of scales that exist: half of a k tile's scales, or all."""
        if self.fmt == MXFP4:
            return [ptx.select(left > 2, word, ptx.prmt(word, word, 0x1010)) for word in words]
        return [words[0], ptx.select(left > 4, words[1], words[0])]

    def lane_scales(self, tile_n: int, tile: Tile, lane, k_tile, work) -> list:
        """Load the scales of a lane's weight rows in a k tile: every 32nd row from ``lane`` on. Return a list of words
        of four scales per row. The words of rows that do not exist are undefined."""
        layout, scale = self.scale_layout, work.b_scale
        words = self.tile_scales // 4
        left = work.width * 2 // self.fmt.block_size - k_tile * self.tile_scales
        first = Int64(k_tile) * self.tile_scales
        if self.is_plain and not layout.is_linear:
            # An output tile covers a whole tile of the scale layout, or half of it; in both cases the scales of these
            # rows follow each other.
            row = layout.row_offset(Int64(tile.column) + lane, Int64(scale.shape[1]))
            at = scale.iterator + (row + layout.block_offset(first))
            count = tile_n // 32
            found = [ptx.load_if(at, 4 * i < left, count, layout.block_offset(4 * i)) for i in range(words)]
            rows = [list(of_row) for of_row in zip(*found, strict=True)]
        else:
            rows = []
            for i in range(tile_n // 32):
                column = tile.column + lane + 32 * i
                rows.append(self.row_scales(scale, work.n, tile.expert, column, column < work.n, first, left))
        return [self.without_padding(row, left) for row in rows]


def piece_at(base: cute.Pointer, offset) -> cute.Tensor:
    """Return 16 bytes of shared memory as words."""
    at = base + cute.assume(offset, divby=VECTOR_BYTES)
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4))


def load_stage_scales(config: FP8GemmConfig, weight: FP4Weight, k_stage, tile: Tile, lane, work) -> list:
    """Load the scales of a stage. For each k tile, load the scales of ``a``, 32 rows at a time, and the scales of the
    lane's rows of the weight (``FP4Weight.lane_scales``).

    For a k tile beyond the end of K, the scales of ``a`` are zeros, and the last k tile's scales of the weight are
    used. The codes of that k tile are zeros.
    """
    if config.span == 1:
        of_rows = token_scales(config.tile_m, k_stage, tile, lane, work)
        return [(of_rows, weight.lane_scales(config.tile_n, tile, lane, k_stage, work))]
    loaded = []
    for i in range(config.span):
        k_tile = k_stage * config.span + i
        exists = k_tile < work.a_scale.shape[0]
        existing = tile._replace(rows=ptx.select(exists, tile.rows, Int32(0)))
        k_tile = cutlass.min(k_tile, work.a_scale.shape[0] - 1)
        of_rows = token_scales(config.tile_m, k_tile, existing, lane, work)
        loaded.append((of_rows, weight.lane_scales(config.tile_n, existing, lane, k_tile, work)))
    return loaded
