"""The device code; the package's docstring describes the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish, TileEpilogue
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async_global
from torch_cute_ops.kernels.common.experts.tiles import ExpertTiles, by_expert
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Tile
from torch_cute_ops.kernels.fp4_to_fp8.config import COLUMNS, GROUP, RANGE, Notes
from torch_cute_ops.kernels.fp8_fp4_recoded.config import RASTER, Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import power_of_two
from torch_cute_ops.kernels.fp8_fp4_wgmma.units import HAS_OWN, UnitsKernel
from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class RecodedTiles(ExpertTiles):
    """``ExpertTiles`` of a recoded weight, with its notes in place of scales."""

    raster = RASTER

    def weight_arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        b, _ = super().weight_arguments(n, k, blocks, experts)
        return b, TensorArg("Int32", (Dim("note_words", bits=64),), (1,), align=16)

    def weight_views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        return by_expert(b, self.rows.is_plain, is_transposed=True), b_scale


class FP8FP4RecodedKernel(UnitsKernel):
    """The kernel of one ``Config``."""

    config: Config

    def __init__(self, config: Config):
        super().__init__(config, RecodedTiles)

    @cute.jit
    def _await_weight(self, expert, column, share):
        """Wait until ``fp4_to_fp8`` has recoded the tile's rows, if it runs beside this kernel."""
        if const_expr(self.config.beside):
            at = share.b_scale.iterator + (self._notes(expert, column, share) + Notes.done(share.blocks))
            done = ptx.load_acquire(at)
            while done < Uint32(Notes.pieces(share.blocks)):
                done = ptx.load_acquire(at)
            fence_async_global()

    # Scales

    @cute.jit
    def _begin_scales(self, tile: Tile, lane, share) -> tuple:
        """Where the notes of the tile's rows of the weight begin; whether a lane's rows exist, four that follow each
        other; and whether any of the tile has a power of its own in some K block."""
        exists = tile.column + GROUP * lane < share.n
        notes = self._notes(tile.expert, tile.column, share)
        found = Uint32(0)
        for range_ in cutlass.range(Notes.ranges(share.blocks), unroll=4):
            found |= ptx.load_if(share.b_scale.iterator + (notes + Notes.owns(range_) + lane), exists, 1)[0]
        return notes, exists, cute.arch.vote_any_sync(found != Uint32(0))

    def _notes(self, expert, column, share) -> Int64:
        """The first word of the notes of a tile."""
        tile = expert * cute.ceil_div(share.n, COLUMNS) + column // COLUMNS
        return Int64(tile) * Notes.words(share.blocks)

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows of ``a``, 32 at a time; and the K block."""
        return self._token_scales(block, tile, lane, share), block

    @cute.jit
    def _store_scales(self, loaded, begun, is_last, place, lane, share, smem):
        of_rows, block = loaded
        self._store_token_scales(self._scales(place, smem), of_rows, lane)
        notes, exists, has_own = begun
        flags = Uint32(0)
        if has_own:
            flags = self._store_own_units(notes, exists, block, place, lane, share, smem)
        if lane == 0:
            store_words([flags], self._flags(place, smem))

    @cute.jit
    def _store_own_units(self, notes, exists, block, place, lane, share, smem) -> Uint32:
        """Leave the powers that bring a K block's sums to the units of their rows. Returns the flags."""
        at, blocks = share.b_scale.iterator + notes, share.blocks
        (owns,) = ptx.load_if(at + (Notes.owns(block // RANGE) + lane), exists, 1)
        has_own = (owns >> Uint32(block % RANGE) & Uint32(1)) != Uint32(0)
        units = ptx.load_if(at + (Notes.exponents(blocks, 0) + 2 * lane), exists, 2)
        own = ptx.load_if(at + (Notes.exponents(blocks, block + 1) + 2 * lane), has_own, 2)
        own = [ptx.select(has_own, word, unit) for word, unit in zip(own, units, strict=True)]
        votes = Uint32(cute.arch.vote_ballot_sync(has_own))
        flags = Uint32(HAS_OWN)
        for group in range_constexpr(COLUMNS // 32):
            # Eight lanes have the rows of a group.
            changed = (votes & Uint32(0xFF << 8 * group)) != Uint32(0)
            flags |= ptx.select(changed, Uint32(1 << group), Uint32(0))
        for i in range_constexpr(GROUP):
            shift = const_expr(16 - 16 * (i % 2))
            unit, of_sums = (Int32(words[i // 2] << shift) >> 16 for words in (units, own))
            row = GROUP * lane + i
            self._powers(place, smem, 0)[row] = Float32(1.0)  # Totals are in their units already.
            self._powers(place, smem, 1)[row] = power_of_two(of_sums - unit)
        return flags

    # Sums

    @cute.jit
    def _multiply_tile(
        self, multiply, sums, partials: list, kept, stage, parity, consumer, share, smem, prepares: bool = True
    ):
        """As in ``fp8_wgmma``, unless rows have powers of their own."""
        (flags,) = load_words(self._flags(stage, smem))
        if flags != Uint32(0):
            self._store_kept(sums, kept, consumer, share)
            count = share.end - share.begin
            stage, parity = self._add_some(multiply, sums, partials, count, 0, stage, parity, consumer, smem)
        else:
            stage, parity = FP8WgmmaKernel._multiply_tile(
                self, multiply, sums, partials, kept, stage, parity, consumer, share, smem, prepares=False
            )
        return stage, parity

    def _epilogue(self, expert, share) -> TileEpilogue:
        """Totals are over the units of their rows of the weight."""
        of_tile = super()._epilogue(expert, share)

        def of_columns(column, count: int, after: int = 0) -> Finish:
            finish = of_tile(column, count, after)
            at = self._notes(expert, column, share) + column % COLUMNS
            at = share.b_scale.iterator + cute.assume(at, divby=count)
            # Of four columns two loads, as in ``load_terms``
            starts = range(0, count, 2)
            words = [word for i in starts for word in ptx.load_if(at, column < share.n - after, 2, 4 * (after + i))]
            units = [ptx.float_of(word) for word in words]
            return lambda total, i: finish(ptx.mul_rn(total, units[i]), i)

        return of_columns
