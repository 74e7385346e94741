"""Weight sources of FP8 GEMMs. A weight source defines the weight's arguments, and its layout in the pipeline's stages.

Methods of a weight source:

- ``arguments(n, k, blocks, experts)``: describe the kernel arguments of the weight and its scales;
- ``views(b, b_scale)``: return the weight and its scales as matrices over all experts;
- ``layout(stages)``: return the shared-memory layout of copied weight rows: (rows, bytes of a row, stages);
- ``stages(stages, smem)``: return the weight's stages in shared memory;
- ``await_rows(expert, column, work)``: wait until a tile's weight rows and scales can be read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.formats import MXFP4, SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.prepared_scales import SLAB_K
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.common.fp8.gemm import Smem, k_tiles, k_tiles_layout, token_scales
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, FP8GemmConfig
from torch_cute_ops.kernels.common.fp8.tiles import Tile, by_expert
from torch_cute_ops.runtime.argspec import Dim, TensorArg

SLOT_PIECES = K_TILE // 2 // VECTOR_BYTES
"""Number of 16-byte pieces of the FP4 codes of a weight row in one k tile."""


def fp8_argument(n: Dim, k: Dim, experts: Dim | None) -> TensorArg:
    """Return the description of an argument for an FP8 weight, a transposed view: (K, N) or (E, K, N)."""
    if experts is None:
        return TensorArg("Float8E4M3FN", (k, n), (1, k), align=16)
    return TensorArg("Float8E4M3FN", (experts, k, n), (Dim("b_of_expert", bits=64, divisibility=16), 1, k), align=16)


class FP8Weight:
    """Weight source for an FP8 weight, which the producer copies to the stages.

    Args:
        tile_n: number of weight rows of a tile.
        is_plain: True for a single weight matrix, False for one matrix per expert.
        has_blocks: True if the weight has block scales. If False, ``alpha`` contains the weight's scales.
        by_row: True if the weight has a block scale for each row and 128 elements (1 × 128), column-major, False if 128
            rows share a row of row-major block scales.
    """

    def __init__(self, tile_n: int, is_plain: bool, has_blocks: bool = True, by_row: bool = False):
        self.tile_n, self.is_plain, self.has_blocks, self.by_row = tile_n, is_plain, has_blocks, by_row

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg | None]:
        if not self.has_blocks:
            return fp8_argument(n, k, experts), None
        if self.by_row:
            shape, stride = (n, blocks), (1, Dim("b_scale_pitch", bits=64))
            if experts is not None:
                shape, stride = (experts, *shape), (Dim("b_scale_of_expert", bits=64), *stride)
            return fp8_argument(n, k, experts), TensorArg("Float32", shape, stride, align=4)
        rows = Dim("b_scale_rows")
        if experts is None:
            scale = TensorArg("Float32", (rows, blocks), (blocks, 1), align=4)
        else:
            of_expert = Dim("b_scale_of_expert", bits=64)
            scale = TensorArg("Float32", (experts, rows, blocks), (of_expert, blocks, 1), align=4)
        return fp8_argument(n, k, experts), scale

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Return the weight as (N, K, E), and its block scales as (⌈N / 128⌉, blocks, E), (N, blocks, E) or None."""
        weight = by_expert(b, is_transposed=True)
        if self.by_row:
            shape = (*b_scale.shape[-2:], *(b_scale.shape[:-2] or [1]))
            strides = (*b_scale.stride[-2:], *(b_scale.stride[:-2] or [0]))
            return weight, cute.make_tensor(b_scale.iterator, cute.make_layout(shape, stride=strides))
        return weight, by_expert(b_scale) if self.has_blocks else None

    def layout(self, stages: int):
        return k_tiles_layout(self.tile_n, stages)

    def stages(self, stages: int, smem: Smem) -> cute.Tensor:
        return k_tiles(smem.b, self.tile_n, stages)

    def await_rows(self, expert, column, work) -> None:
        """Return at once, because the weight was complete before the kernel started."""


class FP4Weight:
    """Weight source for an FP4 weight, whose codes the producer copies to the stages unchanged.

    The codes are (K/2, N) or (E, K/2, N). Linear scales are (N, K/B) or (E, N, K/B). Tiled scales are one matrix that
    contains the rows of all experts.

    Args:
        fmt, layout: format and scale layout.
        is_plain: True for a single weight matrix, False for one matrix per expert.
        copied_n: number of weight rows that a CTA copies.
        line: bytes of a row's codes in a stage.
        code_align: alignment of an expert's codes in bytes. The number of bytes of a row of codes is a multiple of
            twice this alignment.
    """

    def __init__(
        self,
        fmt: FP4Format,
        layout: ScaleLayout,
        is_plain: bool,
        copied_n: int = 0,
        line: int = 0,
        code_align: int = 16,
    ):
        self.code_align = code_align
        self.fmt, self.scale_layout, self.is_plain = fmt, layout, is_plain
        self.copied_n, self.line = copied_n, line
        self.tile_scales = K_TILE // fmt.block_size

    # On the host

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        align = self.code_align
        half, scales = Dim("k_bytes", divisibility=2 * align), Dim("b_blocks", divisibility=64 // self.fmt.block_size)
        if experts is None:
            b = TensorArg("Uint8", (half, n), (1, half), align=align)
        else:
            of_expert = Dim("b_of_expert", bits=64, divisibility=align)
            b = TensorArg("Uint8", (experts, half, n), (of_expert, 1, half), align=align)
        if not self.scale_layout.is_linear:
            return b, scale_argument(self.fmt, self.scale_layout, n, scales, name="b_")
        if experts is None:
            return b, scale_argument(self.fmt, self.scale_layout, n, scales)
        dtype = DSL_DTYPES[self.fmt.scale_dtype].__name__
        of_expert = Dim("b_scale_of_expert", bits=64, divisibility=4)
        return b, TensorArg(dtype, (experts, n, scales), (of_expert, scales, 1), align=16)

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the codes as (N, K/2, E), and the scales as bytes: linear scales as (N, K/B, E), tiled scales
        unchanged."""
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
        """Return at once, because the weight was complete before the kernel started."""

    def line_offset(self, slot, row, index, span: int) -> Int32:
        """Return the offset, in the weight's stages, of the 16-byte piece ``index`` of a row's codes in a k tile.

        A stage holds ``span`` k tiles. Its rows are lines of 128 bytes. The swizzle permutes the pieces of a line by
        the index of the row.
        """
        of_row = (slot // span * self.copied_n + row) * self.line
        return of_row + (slot % span * SLOT_PIECES + index ^ row % 8) * VECTOR_BYTES

    # Scales in memory

    def row_scales(self, scale: cute.Tensor, n, expert, row, exists, first, left) -> list:
        """Load the scales of one weight row in a k tile, as words of four scales. Scales that do not exist are zero.

        Args:
            scale: scales of the weight, a result of ``views``.
            n: number of rows of an expert's weight.
            expert, row: index of the expert, and index of the row in the expert's weight.
            exists: True if the row exists.
            first: index, in the row, of the k tile's first scale; an Int64.
            left: number of scales between ``first`` and the end of the row.
        """
        words = self.tile_scales // 4
        at = scale.iterator + self.scale_offset(scale, n, expert, row, first)
        if self.scale_layout.is_linear:
            if self.fmt == MXFP4:
                # The number of a row's scale bytes is even, but may not be a multiple of four, so load two at a time.
                halves = [ptx.load_narrow_if(at, exists & (2 * i < left), 2, 2 * i) for i in range(2)]
                return [halves[0] | (halves[1] << 16)]
            return [ptx.load_if(at, exists & (4 * i < left), 1, 4 * i)[0] for i in range(words)]
        offsets = [self.scale_layout.block_offset(4 * i) for i in range(words)]
        return [ptx.load_if(at, exists & (4 * i < left), 1, offset)[0] for i, offset in enumerate(offsets)]

    def scale_offset(self, scale: cute.Tensor, n, expert, row, place) -> Int64:
        """Return the offset, in ``scale``, of scale number ``place`` (an Int64) of a weight row."""
        if self.scale_layout.is_linear:
            return Int64(expert) * scale.stride[2] + Int64(row) * scale.stride[0] + place
        offset = self.scale_layout.row_offset(Int64(expert) * n + row, Int64(scale.shape[1]))
        return offset + self.scale_layout.block_offset(place)

    def without_padding(self, words: list, left) -> list:
        """Replace undefined scales after the end of a row by the scales of the k tile's first half, which fit the same
        unit.

        ``left`` is the number of existing scales: all scales of a k tile, or half of them.
        """
        if self.fmt == MXFP4:
            return [ptx.select(left > 2, word, ptx.prmt(word, word, 0x1010)) for word in words]
        return [words[0], ptx.select(left > 4, words[1], words[0])]

    def lane_scales(self, tile_n: int, tile: Tile, lane, k_tile, work) -> list:
        """Load the scales of this lane's weight rows in a k tile. The lane's rows are every 32nd row, starting at row
        ``lane`` of the tile.

        Return a list of words of four scales per row. The words of rows that do not exist are undefined.
        """
        layout, scale = self.scale_layout, work.b_scale
        words = self.tile_scales // 4
        left = work.width * 2 // self.fmt.block_size - k_tile * self.tile_scales
        first = Int64(k_tile) * self.tile_scales
        if self.is_plain and not layout.is_linear:
            # An output tile covers 128 or 64 rows of one scale tile. The scales of a lane's rows are contiguous there.
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


class PreparedWeight(FP4Weight):
    """Weight source for an FP4 weight whose scales are prepared: (slabs, N, scale_bytes) or (E, slabs, N, scale_bytes).

    The first slab holds the rows' units as float32, in the first four bytes of each row. Each further slab holds the
    indices of the decoding tables of 256 elements of K.

    Args:
        fmt, is_plain, copied_n, line, code_align: as in ``FP4Weight``.
    """

    def __init__(self, fmt: FP4Format, is_plain: bool, copied_n: int, line: int, code_align: int = 16):
        super().__init__(fmt, SCALE_LAYOUTS["linear"], is_plain, copied_n, line, code_align)
        self.scale_bytes = SLAB_K // fmt.block_size

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        b, _ = super().arguments(n, k, blocks, experts)
        shape, strides = (Dim("slabs"), n, self.scale_bytes), (Dim("b_scale_slab", bits=64, divisibility=64),)
        if experts is not None:
            shape, strides = (experts, *shape), (Dim("b_scale_of_expert", bits=64, divisibility=64), *strides)
        return b, TensorArg("Uint8", shape, (*strides, self.scale_bytes, 1), align=16)

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the codes as (N, K/2, E), and the prepared scales unchanged."""
        codes, _ = super().views(b, b_scale)
        return codes, b_scale

    def row_of_slab(self, scale: cute.Tensor, expert, slab, row) -> cute.Pointer:
        """Return the address of a weight row in a slab of the prepared scales."""
        offset = Int64(slab) * scale.stride[-3] + Int64(row) * self.scale_bytes
        if not self.is_plain:
            offset += Int64(expert) * scale.stride[0]
        return scale.iterator + cute.assume(offset, divby=self.scale_bytes)

    def units(self, scale: cute.Tensor, expert, column, count: int, n, after: int = 0) -> list:
        """Load the units of ``count`` weight rows, starting at row ``column + after``. Rows ``n`` and above do not
        exist and get zeros."""
        at, units = self.row_of_slab(scale, expert, 0, column), []
        for i in range(after, after + count):
            units += ptx.load_if(at, column + i < n, 1, i * self.scale_bytes)
        return [ptx.float_of(unit) for unit in units]


def piece_at(base: cute.Pointer, offset) -> cute.Tensor:
    """View the 16 bytes of shared memory at ``base + offset`` as a tensor of words."""
    at = base + cute.assume(offset, divby=VECTOR_BYTES)
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4))


def load_stage_scales(config: FP8GemmConfig, weight: FP4Weight, k_stage, tile: Tile, lane, work) -> list:
    """Load a stage's scales of ``a`` (``token_scales``) and of the weight (``FP4Weight.lane_scales``), for each k tile.

    The last stage may contain a k tile beyond the end of K, whose codes are zeros. Its scales of ``a`` are then zeros,
    and its scales of the weight are the scales of the last k tile.
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
