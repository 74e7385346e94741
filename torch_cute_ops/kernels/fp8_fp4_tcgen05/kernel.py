"""Device code of the FP8 x FP4 tcgen05 GEMM. The package's docstring describes the roles and the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common.blackwell.decoded import DecodedWeightKernel
from torch_cute_ops.kernels.common.blackwell.fp8_gemm import MMA_K_BYTES, weight_source
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import CODE_BYTES
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import WARP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES, fence_async
from torch_cute_ops.kernels.common.fp8.fp4_tables import (
    look_up,
    own_exponent,
    power_of_two,
    table_of_index,
    tables_of_own_unit,
)
from torch_cute_ops.kernels.common.fp8.gemm import arrive
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import PreparedWeight, piece_at
from torch_cute_ops.kernels.fp8_fp4_tcgen05.config import FACTOR_SLOTS, Config

HALVES = 2  # halves of a k tile, each with 64 elements: 32 bytes of codes, or 64 bytes of e4m3
PIECES = 4  # 16-byte pieces of e4m3 in a half


class FP8FP4Tcgen05Kernel(DecodedWeightKernel):
    """GEMM kernel, compiled for a ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, weight_source(config, CODE_BYTES))

    def _copy_activations(self, of_tile, boxes, k_tile, base, copied) -> None:
        to = base + MMA_M * K_TILE_BYTES
        self.copies.copy_box(of_tile, boxes, self.stage.mma_n, to, (Int32(0), k_tile), copied, None)

    # Decoders

    @cute.jit
    def _load_scales(self, decoder, work, smem):
        """Run a decoder warp. Each decoder group decodes the weight of every ``teams``-th k tile to the k tile's stage.
        With block scales, the group also writes the factors of the k tile to a slot of the factor pipeline.

        The scales of a k tile are loaded before the group decodes its previous k tile.
        """
        c = self.config
        row, team, lane = decoder % MMA_M, decoder // MMA_M, decoder % WARP
        before = Int32(0)  # number of k tiles of this CTA's earlier tiles
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, lane, work, smem)
            start = work.begin + (team + c.teams - before % c.teams) % c.teams
            following = self._scales_of(cutlass.min(start, work.end - 1), row, tile, work)
            scales = cute.make_rmem_tensor((len(following),), Uint32)
            for i in range_constexpr(len(following)):
                scales[i] = following[i]
            for k_tile in cutlass.range(start, work.end, c.teams, unroll=1):
                words = [scales[i] for i in range(len(following))]
                ahead = self._scales_of(cutlass.min(k_tile + c.teams, work.end - 1), row, tile, work)
                turn = before + k_tile - work.begin
                stage = turn % c.stages
                ptx.wait(smem.copied + stage, turn // c.stages % 2)
                self._decode(words, self._stage_at(stage, smem), row)
                fence_async()
                cute.arch.sync_warp()
                # The commit of the MMAs does not order these loads of codes before the copies of the next codes, so
                # this warp arrives at ``empty`` too.
                smem.pipeline.arrive_empty(stage, Uint32(lane == 0))
                smem.pipeline.arrive_full(stage, Uint32(lane == 0))
                if const_expr(c.has_blocks):
                    slot = turn % FACTOR_SLOTS
                    smem.factor_pipeline.wait_empty(slot, turn // FACTOR_SLOTS % 2 ^ 1)
                    self._store_factors(words, slot, row, smem)
                    arrive(smem.factor_pipeline.full + slot, lane)
                for i in range_constexpr(len(ahead)):
                    scales[i] = ahead[i]
            before += work.end - work.begin
        if const_expr(c.split_k > 1 and not c.has_blocks):
            self._await_stage_writers()

    def _scales_of(self, k_tile, row, tile: Tile, work) -> list:
        """Load the scales of weight row ``row`` of a tile in a k tile, as words. With block scales of ``a``, the last
        word is the scale of token ``row``. Scales of rows that do not exist are zero."""
        c, column = self.config, tile.column + row
        if isinstance(self.weight, PreparedWeight):
            at = self.weight.row_of_slab(work.b_scale, tile.expert, 1 + k_tile // c.slab_tiles, column)
            at = at + cute.assume(k_tile % c.slab_tiles * c.tile_scales, divby=c.tile_scales)
            return ptx.load_if(at, column < work.n, c.tile_scales // 4)
        first = Int64(k_tile) * c.tile_scales
        left = work.num_mmas * MMA_K_BYTES // c.fmt.block_size - k_tile * c.tile_scales
        words = self.weight.row_scales(work.b_scale, work.n, tile.expert, column, column < work.n, first, left)
        token = work.a_scale.iterator + (Int64(k_tile) * work.a_scale.stride[0] + tile.row + row)
        of_token = ptx.load_if(token, (row < c.tile_m) & (row < tile.rows), 1)
        return [*self.weight.without_padding(words, left), *of_token]

    def _decode(self, words: list, base: cute.Pointer, row) -> None:
        """Decode weight row ``row`` of the stage at ``base``."""
        c, stage = self.config, self.stage
        exponent = own_exponent(words, c.fmt) if c.has_blocks else None
        for half in range(HALVES):
            codes = []
            for piece in range(HALVES * half, HALVES * half + 2):
                # The swizzle permutes the 16-byte pieces of a 128-byte line by the index of the line. A line holds two
                # rows.
                codes += load_words(piece_at(base, stage.codes_offset + row * CODE_BYTES + (piece ^ row // 2 % 4) * 16))
            tables = self._tables(words, exponent, half)
            for piece in range(PIECES):
                table = tables[piece * len(tables) // PIECES]
                decoded = [word for one in codes[2 * piece : 2 * piece + 2] for word in look_up(table, one)]
                at = row * K_TILE_BYTES + (PIECES * half + piece ^ row % 8) * VECTOR_BYTES
                store_words(decoded, piece_at(base, at))

    def _tables(self, words: list, exponent, half: int) -> list:
        """Return the decoding tables of half a k tile of a weight row."""
        c = self.config
        word = words[0] >> 16 * half if c.fmt == MXFP4 else words[half]
        if exponent is not None:
            return tables_of_own_unit(word, exponent, c.fmt)
        indices = [Int32(word >> 8 * i & Uint32(0xFF)) for i in range(c.tile_scales // HALVES)]
        return [table_of_index(index, c.fmt) for index in indices]

    @cute.jit
    def _store_factors(self, words, slot, row, smem):
        """Write a token's scale, and the power of two of a weight row, to a k tile's slot."""
        tile_m = self.config.tile_m
        factors = self._slot(slot, smem)
        if row < tile_m:
            factors[row] = ptx.float_of(words[-1])
        factors[tile_m + row] = power_of_two(own_exponent(words, self.config.fmt))

    def _slot(self, slot, smem) -> cute.Tensor:
        """Return all words of a k tile's slot: the scales of the tokens, then the powers of two of the weight rows."""
        words = self.config.slot_words
        at = smem.factors + cute.assume(slot * (4 * words), divby=16)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Float32), cute.make_layout(words))

    # Results

    def _factors_of_row(self, factors: list, slot, tid, smem) -> list:
        power = self._slot(slot, smem)[self.config.tile_m + tid]
        return [ptx.mul_rn(factor, power) for factor in factors]
