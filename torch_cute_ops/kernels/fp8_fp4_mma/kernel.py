"""Device code of the FP8 x FP4 GEMM with mma.sync.

The package's docstring describes the roles of the warps and the data path.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.prepared_scales import SLAB_K
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.fp8.consumers import GemmEpilogue, UnitEpilogue
from torch_cute_ops.kernels.common.fp8.fp4_tables import (
    look_up,
    number_of_index,
    numbers_of_own_unit,
    own_exponent,
    power_of_two,
    table_of,
)
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.warp_gemm import (
    PIECE,
    InterleavedRows,
    LaneRows,
    Promotion,
    TokenPromotion,
    WarpGemm,
    Work,
)
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, PreparedWeight
from torch_cute_ops.kernels.fp8_fp4_mma.config import CODE_BYTES, TILE_N, Config

PIECES = CODE_BYTES // PIECE  # pieces of 16 bytes of codes in a weight row of a k tile, one for each of four lanes
SPAN = SLAB_K // K_TILE  # k tiles whose elements are interleaved with each other, and whose indices form a slab


class FP8FP4MmaKernel(FP8Kernel):
    """GEMM kernel with mma.sync, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        given = config.rows.is_plain, TILE_N, CODE_BYTES
        rows = InterleavedRows() if config.is_interleaved else LaneRows(are_neighbours=True)
        source: FP4Weight
        promotion: Any
        epilogue: Any
        if config.layout is None:
            source = prepared = PreparedWeight(config.fmt, *given)
            scales: Any = PreparedScales(config, prepared)
            promotion, epilogue = TokenPromotion(config), UnitEpilogue(config, prepared)
        else:
            source = FP4Weight(config.fmt, config.layout, *given)
            scales = BlockScales(config, source)
            promotion, epilogue = UnitPromotion(config), GemmEpilogue(config)
        self.gemm = WarpGemm(config, source, rows, DecodedWeight(config, scales), promotion, epilogue)


class DecodedWeight:
    """Weight whose FP4 codes follow the rows of ``a`` in a stage. A lane decodes a quarter of a weight row in
    registers.

    The first threads of a CTA handle the scales: each thread loads the scales of a weight row, and stores *numbers* in
    a slot. A number is a scale divided by the row's unit, in float16. A lane computes the decoding table of each block
    from the block's number.

    Args:
        config: configuration.
        scales: ``BlockScales`` or ``PreparedScales``.
    """

    def __init__(self, config: Config, scales: Any):
        self.config, self.scales = config, scales
        self.scale_words = scales.words

    @cute.jit
    def load(self, k_tile, at, tile, work):
        """Start the copies that this thread makes of a k tile's codes, to the stage at ``at``.

        If ``a`` is interleaved, the k tile consists of every second run of 32 elements of 256 elements.
        """
        c = self.config
        codes = at + c.tile_m * K_TILE
        piece = work.tid % PIECES
        begin = k_tile * CODE_BYTES + piece * PIECE
        if const_expr(c.is_interleaved):
            begin = k_tile // SPAN * (SPAN * CODE_BYTES) + (piece * SPAN + k_tile % SPAN) * PIECE
        # Keep the compiler from computing these offsets ahead of the loop over k tiles: registers would then spill on
        # sm_90a, which converts the operands of these MMAs to 16 bits.
        width = ptx.opaque(work.b.shape[1])
        for i in range_constexpr(TILE_N * PIECES // c.threads):
            row = work.tid // PIECES + i * (c.threads // PIECES)
            column = tile.column + row
            exists = (column < work.n) & (begin < width)
            offset = Int64(tile.expert) * work.b.stride[2] + Int64(column) * width + begin
            source = work.b.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=PIECE)
            place = row * CODE_BYTES + piece * PIECE
            ptx.copy_async_16(codes + cute.assume(place, divby=PIECE), source, exists)

    def words(self, at: cute.Pointer, slot: cute.Pointer, column, lane) -> list:
        """Decode this lane's quarter of one of the eight weight rows that begin with row ``column``."""
        row, quarter = column + lane // 4, lane % 4
        place = self.config.tile_m * K_TILE + row * CODE_BYTES + quarter * PIECE
        codes = load_words(_words(at, place, 4))
        tables = [table_of(number) for number in self._numbers(slot, row, quarter)]
        each = len(codes) // len(tables)
        return [word for i, code in enumerate(codes) for word in look_up(tables[i // each], code)]

    def _numbers(self, slot: cute.Pointer, row, quarter) -> list:
        """Load the numbers of the blocks in a quarter of a weight row. Each word of the result holds one number
        twice."""
        if self.config.fmt == MXFP4:
            (word,) = load_words(_words(slot, row * 8 + quarter // 2 * 4, 1))
            return [ptx.prmt_by(word, word, ptx.select(quarter % 2 == 0, Uint32(0x1010), Uint32(0x3232)))]
        (word,) = load_words(_words(slot, row * 16 + quarter * 4, 1))
        return [ptx.prmt(word, word, selector) for selector in (0x1010, 0x3232)]

    # Scales

    @cute.jit
    def load_scales(self, words: cute.Tensor, k_tile, tile, work):
        """Load this thread's scales in a k tile into registers. Scales that do not exist become zeros."""
        loaded = self.scales.load(k_tile, tile, work)
        for i in range_constexpr(self.scale_words):
            words[i] = loaded[i]

    def store_scales(self, words: cute.Tensor, slot: cute.Pointer, k_tile, work: Work) -> None:
        """Store this thread's scales in a slot, in the form in which lanes read them."""
        self.scales.store([words[i] for i in range(self.scale_words)], slot, k_tile, work)


class BlockScales:
    """Block scales of both operands. The unit of a weight row is ``2^t``, different in each k tile.

    Thread ``i`` handles the scales of weight row ``i``, thread ``TILE_N + i`` the scale of row ``i`` of ``a``. A slot
    contains the numbers, then the units, then the scales of ``a``.
    """

    def __init__(self, config: Config, weight: FP4Weight):
        self.config, self.weight, self.words = config, weight, weight.tile_scales // 4 + 1

    def load(self, k_tile, tile: Tile, work: Work) -> list:
        c, column, row = self.config, tile.column + work.tid, work.tid - TILE_N
        first, blocks = Int64(k_tile) * c.tile_scales, work.b.shape[1] * 2 // c.fmt.block_size
        left = blocks - k_tile * c.tile_scales
        exists = (work.tid < TILE_N) & (column < work.n)
        words = self.weight.row_scales(work.b_scale, work.n, tile.expert, column, exists, first, left)
        at = work.a_scale.iterator + (Int64(k_tile) * work.a_scale.stride[0] + tile.row + row)
        of_row = ptx.load_if(at, (row >= 0) & (row < cutlass.min(tile.rows, Int32(c.tile_m))), 1)
        return [*self.weight.without_padding(words, left), *of_row]

    @cute.jit
    def store(self, words: list, slot, k_tile, work):
        c, row = self.config, work.tid
        if row < TILE_N:
            exponent = own_exponent(words[:-1], c.fmt)
            numbers = numbers_of_own_unit(words[:-1], exponent, c.fmt)
            store_words(numbers, _words(slot, row * (4 * len(numbers)), len(numbers)))
            store_words([ptx.bits_of(power_of_two(exponent))], _words(slot, c.units_at + row * 4, 1))
        elif row < TILE_N + c.tile_m:
            store_words(words[-1:], _words(slot, c.a_scales_at + (row - TILE_N) * 4, 1))


class PreparedScales:
    """Prepared scales of the weight (``formats.prepared_scales``). The unit of a weight row is ``2^u`` in all k tiles,
    so the epilogue can multiply by the unit once."""

    def __init__(self, config: Config, weight: PreparedWeight):
        self.config, self.weight = config, weight
        self.words = weight.scale_bytes // 4 if config.is_interleaved else config.tile_scales // 4

    def load(self, k_tile, tile: Tile, work: Work) -> list:
        """Load the indices of a weight row in a k tile. If ``a`` is interleaved, load the indices of two k tiles."""
        column = tile.column + work.tid
        at = self.weight.row_of_slab(work.b_scale, tile.expert, 1 + k_tile // SPAN, column)
        if not self.config.is_interleaved:
            scales = self.config.tile_scales
            at = at + cute.assume(k_tile % SPAN * scales, divby=scales)
        return ptx.load_if(at, (work.tid < TILE_N) & (column < work.n), self.words)

    @cute.jit
    def store(self, words: list, slot, k_tile, work):
        c, row = self.config, work.tid
        if row < TILE_N:
            bytes_ = self._bytes(words, k_tile)
            halves = [number_of_index(Int32(byte & Uint32(0xFF)), c.fmt) for byte in bytes_]
            numbers = [halves[i] | halves[i + 1] << 16 for i in range(0, len(halves), 2)]
            store_words(numbers, _words(slot, row * (4 * len(numbers)), len(numbers)))

    def _bytes(self, words: list, k_tile) -> list:
        """Return words whose lowest bytes are the indices of a k tile."""
        if not self.config.is_interleaved:
            return [word >> 8 * i for word in words for i in range(4)]
        # The k tile contains either the first or the second 32 of each 64 elements.
        size = K_TILE // 4 // self.config.fmt.block_size
        first = Uint32(k_tile % SPAN) * Uint32(8 * size)
        runs = range(0, 4, SPAN * size)
        return [word >> first + Uint32(8 * (run + i)) for word in words for run in runs for i in range(size)]


class UnitPromotion(Promotion):
    """Promotion for block scales of ``a`` and for units of weight rows that depend on the k tile. ``BlockScales``
    stores both in a slot."""

    def of_rows(self, factors: list, slot: cute.Pointer, i: int, work: Work) -> list:
        """Load the scales of two rows of ``a``."""
        at = self.config.a_scales_at + (work.row + 16 * i + work.lane // 4) * 4
        return [ptx.float_of(load_words(_words(slot, at + 32 * r, 1))[0]) for r in range(2)]

    def of_columns(self, factors: list, slot: cute.Pointer, group: int, column, lane) -> list:
        """Load the units of two weight rows."""
        words = load_words(_words(slot, self.config.units_at + (column + lane % 4 * 2) * 4, 2))
        return [ptx.float_of(word) for word in words]

    def add(self, acc, total, of_rows: list, row: int, of_columns: list, column: int) -> Float32:
        return ptx.fma_rn(ptx.mul_rn(of_rows[row], of_columns[column]), total, acc)


def _words(base: cute.Pointer, offset, count: int) -> cute.Tensor:
    """View ``count`` words of shared memory, ``offset`` bytes after ``base``, which is a multiple of their size."""
    at = base + cute.assume(offset, divby=4 * count)
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(count))
