"""Device code of the FP8 GEMM by mma.sync.

The package's docstring describes the roles of the warps and the data path.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0
from torch_cute_ops.kernels.common.fp8.consumers import GemmEpilogue
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE
from torch_cute_ops.kernels.common.fp8.warp_gemm import (
    PIECE,
    PIECES,
    BlockRows,
    LaneRows,
    MatrixRows,
    Promotion,
    TokenPromotion,
    WarpGemm,
    Work,
)
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight
from torch_cute_ops.kernels.fp8_mma.config import TILE_N, Config


class FP8MmaKernel(FP8Kernel):
    """GEMM kernel by mma.sync, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        rows: Any
        promotion: Any
        weight: type[CopiedWeight] = CopiedWeight
        if config.has_scaled_mmas:
            rows, promotion, weight = MatrixRows(), ScaledMmas(config), ScaledWeight
        elif config.is_mx:
            rows, promotion = BlockRows(), MXPromotion(config)
        elif config.scales_by_row:
            rows, promotion = LaneRows(), RowPromotion(config)
        else:
            rows, promotion = LaneRows(), BlockPromotion(config) if config.has_blocks else TokenPromotion(config)
        source = FP8Weight(TILE_N, config.rows.is_plain, config.has_blocks, config.scales_by_row)
        self.gemm = WarpGemm(config, source, rows, weight(config, rows), promotion, GemmEpilogue(config))


class CopiedWeight:
    """Weight whose FP8 rows follow the rows of ``a`` in a stage. ``rows`` is the layout of both."""

    scale_words = 0

    def __init__(self, config: Config, rows: Any):
        self.config, self.rows = config, rows

    @cute.jit
    def load(self, k_tile, at, tile, work):
        """Start this thread's part of the copies of a k tile's weight rows to the stage at ``at``."""
        c = self.config
        piece = work.tid % PIECES
        begin = k_tile * K_TILE + piece * PIECE
        for i in range_constexpr(c.tile_m * PIECES // c.threads, (c.tile_m + TILE_N) * PIECES // c.threads):
            row = work.tid // PIECES + i * (c.threads // PIECES)
            column = tile.column + row - c.tile_m
            exists = (column < work.n) & (begin < work.k)
            offset = Int64(tile.expert) * work.b.stride[2] + Int64(column) * work.k + begin
            source = work.b.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=PIECE)
            ptx.copy_async_16(at + cute.assume(self.rows.place(row, piece), divby=PIECE), source, exists)

    def words(self, at: cute.Pointer, slot, column, lane) -> list:
        """Load this lane's words of one of eight weight rows, of which the first is ``column``."""
        return self.rows.words(at, self.config.tile_m + column + lane // 4, lane)


class ScaledWeight(CopiedWeight):
    """Weight for ``ScaledMmas``.

    The threads also load the scales of both operands, one k tile ahead, and store them in a slot: a word for each
    column of the tile, and then a word for each row of ``a``.
    """

    def __init__(self, config: Config, rows: MatrixRows):
        super().__init__(config, rows)
        self.scale_words = -(-(TILE_N + config.tile_m) // config.threads)

    @cute.jit
    def load_scales(self, words: cute.Tensor, k_tile, tile, work):
        """Load this thread's words of a k tile. For a row or column that does not exist, load the word of the last. Its
        results are not stored."""
        c = self.config
        for i in range_constexpr(self.scale_words):
            place = work.tid + i * c.threads
            if place < TILE_N:
                column = cutlass.min(tile.column + place, work.n - 1)
                words[i] = ptx.bits_of(work.b_scale[column, k_tile, tile.expert])
            elif place < TILE_N + c.tile_m:
                row = Int64(tile.row) + cutlass.min(place - TILE_N, tile.rows - 1)
                words[i] = ptx.bits_of(work.a_scale[k_tile, row])

    @cute.jit
    def store_scales(self, words: cute.Tensor, slot: cute.Pointer, k_tile, work):
        """Store this thread's words in a slot."""
        c = self.config
        for i in range_constexpr(self.scale_words):
            place = work.tid + i * c.threads
            if place < TILE_N + c.tile_m:
                store_words([words[i]], _word(slot, place))


class BlockPromotion(Promotion):
    """Promotion with block scales of both operands, whose products are factors of a k tile's results."""

    @cute.jit
    def factors(self, k_tile, tile, work) -> list:
        """Return the products of both operands' scales for the lane's rows, which are two of every 16 rows."""
        scale = work.b_scale[tile.column // K_TILE, k_tile, tile.expert]
        factors = []
        for i in range_constexpr(self.config.warp_m // 8):
            # For a row that does not exist, load the factor of the expert's last row. Its results are not stored.
            row = cutlass.min(work.row + i * 8 + work.lane // 4, tile.rows - 1)
            factors.append(ptx.mul_rn(work.a_scale[k_tile, Int64(tile.row) + row], scale))
        return factors

    def of_rows(self, factors: list, slot, i: int, work: Work) -> list:
        return factors[2 * i : 2 * i + 2]

    def add(self, acc, total, of_rows: list, row: int, of_columns: list, column: int) -> Float32:
        return ptx.fma_rn(of_rows[row], total, acc)


class RowPromotion(Promotion):
    """Promotion with block scales of the rows of ``a`` and of the weight rows. The factor of a result is the product of
    both scales."""

    @cute.jit
    def factors(self, k_tile, tile, work) -> list:
        """Return the scales of the lane's rows, which are two of every 16 rows, and then the scales of its columns,
        which are two of every eight."""
        return _scales_of_lane(self.config, k_tile, tile, work)

    def of_rows(self, factors: list, slot, i: int, work: Work) -> list:
        return factors[2 * i : 2 * i + 2]

    def of_columns(self, factors: list, slot, group: int, column, lane) -> list:
        first = self.config.warp_m // 8 + 2 * group
        return factors[first : first + 2]

    def add(self, acc, total, of_rows: list, row: int, of_columns: list, column: int) -> Float32:
        return ptx.fma_rn(ptx.mul_rn(of_rows[row], of_columns[column]), total, acc)


class MXPromotion(Promotion):
    """Promotion of MXFP8 operands: the result of each MMA, of 32 elements, is multiplied by the product of both
    operands' scales.

    The scales of a row and a k tile are one word of four ue8m0 bytes. The arguments declare these words as fp32.
    """

    by_step = True

    @cute.jit
    def factors(self, k_tile, tile, work) -> list:
        """Return the words of the lane's rows, which are two of every 16 rows, and then the words of its columns, which
        are two of every eight."""
        return [ptx.bits_of(scale) for scale in _scales_of_lane(self.config, k_tile, tile, work)]

    def of_rows(self, factors: list, slot, i: int, work: Work) -> list:
        return [_scales_of(word) for word in factors[2 * i : 2 * i + 2]]

    def of_columns(self, factors: list, slot, group: int, column, lane) -> list:
        first = self.config.warp_m // 8 + 2 * group
        return [_scales_of(word) for word in factors[first : first + 2]]

    def multiply(self, a: list, b: list, values: list, of_rows: list, of_columns: list, step: int) -> list:
        totals = ptx.mma_16x8x32(a, b, [Float32(0.0)] * 4)
        return [
            ptx.fma_rn(ptx.mul_rn(of_rows[j // 2][step], of_columns[j % 2][step]), totals[j], values[j])
            for j in range(4)
        ]


class ScaledMmas(Promotion):
    """Block-scaled MMAs of MXFP8 operands, which apply both scales and add to the accumulators: nothing is promoted.

    A word of a slot holds the four ue8m0 bytes of a row or column in a k tile (``ScaledWeight``). For 32 columns, or 32
    rows of ``a``, each lane loads one word. An MMA selects the lanes whose words it uses: lane 4 i + s holds the word
    of column i of the s-th eight columns; lanes 4 i + 2 s and 4 i + 2 s + 1 hold the words of rows i and i + 8 of the
    s-th 16 rows.
    """

    by_step = True

    def of_rows(self, factors: list, slot: cute.Pointer, i: int, work: Work) -> tuple:
        """Load the word of a lane's row. Return it and the index of the lanes that hold the ``i``-th 16 rows."""
        lane, rows = work.lane, min(self.config.warp_m, 32)
        place = TILE_N + work.row + i // 2 * 32 + lane % (rows // 8) * 8 + lane // 4
        return load_words(_word(slot, place))[0], i % 2

    def of_columns(self, factors: list, slot: cute.Pointer, group: int, column, lane) -> tuple:
        """Load the word of a lane's column. Return it and the index of the lanes that hold these eight columns."""
        place = column - group % 4 * 8 + lane % 4 * 8 + lane // 4
        return load_words(_word(slot, place))[0], group % 4

    def multiply(self, a: list, b: list, values: list, of_rows: tuple, of_columns: tuple, step: int) -> list:
        return ptx.mma_16x8x32_scaled(a, b, values, of_rows, of_columns, step)


@cute.jit
def _scales_of_lane(config: Config, k_tile, tile, work) -> list:
    """Load the scales of a lane's rows of ``a`` in a k tile, and then the scales of its columns. For a row or column
    that does not exist, load the scale of the last. Its results are not stored."""
    scales = []
    for i in range_constexpr(config.warp_m // 8):
        row = cutlass.min(work.row + i * 8 + work.lane // 4, tile.rows - 1)
        scales.append(work.a_scale[k_tile, Int64(tile.row) + row])
    for i in range_constexpr(config.warp_n // 4):
        column = tile.column + work.column + i // 2 * 8 + work.lane % 4 * 2 + i % 2
        scales.append(work.b_scale[cutlass.min(column, work.n - 1), k_tile, tile.expert])
    return scales


def _word(slot: cute.Pointer, place) -> cute.Tensor:
    """View a word of a slot."""
    at = slot + cute.assume(place * 4, divby=4)
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1))


def _scales_of(word: Uint32) -> list:
    """Return the values of a word of four ue8m0 bytes."""
    return [float_of_ue8m0(word >> 8 * i & Uint32(0xFF)) for i in range(4)]
