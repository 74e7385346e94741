"""Device code of the GEMM with a recoded weight. The package's docstring describes roles, data path and pipelines."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish, TileEpilogue
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async_global
from torch_cute_ops.kernels.common.fp8.consumers import (
    Consumers,
    GemmEpilogue,
    MainLoop,
    Results,
    SmemMma,
    TokenScaled,
)
from torch_cute_ops.kernels.common.fp8.fp4_tables import power_of_two
from torch_cute_ops.kernels.common.fp8.gemm import (
    FP8Gemm,
    Smem,
    Stages,
    Work,
    WorkSchedule,
    k_tiles,
    k_tiles_layout,
    store_token_scales,
    token_scales,
)
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.tiles import Tile, by_expert
from torch_cute_ops.kernels.common.fp8.units import ACC, HAS_OWN, PARTIAL, Units
from torch_cute_ops.kernels.common.fp8.weights import fp8_argument
from torch_cute_ops.kernels.fp8_fp4_recode.config import NOTE_ROWS, RANGE, RASTER, WARP_ROWS, Config, Notes
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class FP8FP4RecodeKernel(FP8Kernel):
    """GEMM kernel for a recoded weight, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        units = Units(config, stages)
        schedule = WorkSchedule(config, RecodedWeight(config), RASTER)
        results = Results(config, stages, schedule, UnitEpilogue(config))
        loop = RecodedLoop(config, stages, units, results)
        consumers = Consumers(config, stages, SmemMma(config), loop, results)
        self.gemm = FP8Gemm(config, schedule, NoteScales(config, stages, units), consumers)


def notes_of(expert, column, work: Work) -> Int64:
    """Return the offset in words of the notes of an output tile's weight rows, among the notes of all rows."""
    tile = expert * cute.ceil_div(work.n, NOTE_ROWS) + column // NOTE_ROWS
    return Int64(tile) * Notes.words(work.k_stages)


class RecodedWeight:
    """Weight source for an FP8 weight that another kernel recodes from FP4. Notes (see ``Notes``) replace its
    scales."""

    def __init__(self, config: Config):
        self.config = config

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        return fp8_argument(n, k, experts), TensorArg("Int32", (Dim("note_words", bits=64),), (1,), align=16)

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the weight viewed as (N, K, E), and the notes (see ``Notes``) unchanged."""
        return by_expert(b, is_transposed=True), b_scale

    def layout(self, stages: int):
        return k_tiles_layout(self.config.tile_n, stages)

    def stages(self, stages: int, smem: Smem) -> cute.Tensor:
        return k_tiles(smem.b, self.config.tile_n, stages)

    @cute.jit
    def await_rows(self, expert, column, work):
        """If another kernel recodes the weight while this kernel runs, wait until an output tile's weight rows have
        been recoded."""
        if const_expr(self.config.overlaps_recode):
            at = work.b_scale.iterator + (notes_of(expert, column, work) + Notes.done(work.k_stages))
            done = ptx.load_acquire(at)
            while done < Uint32(Notes.work_tiles(work.k_stages)):
                done = ptx.load_acquire(at)
            fence_async_global()


class NoteScales:
    """Scale source of a recoded weight. The source stores the scales of the rows of ``a``. For k tiles that use their
    own exponents, the source also stores the factors that convert results to the rows' units."""

    def __init__(self, config: Config, stages: Stages, units: Units):
        self.config, self.stages, self.units = config, stages, units

    @cute.jit
    def begin(self, tile: Tile, lane, work) -> tuple:
        """Return the offset of an output tile's notes, and two flags. The first is True if this lane's ``WARP_ROWS``
        weight rows exist. The second is True if some row of the tile uses a k tile's own exponent instead of the row's
        unit."""
        exists = tile.column + WARP_ROWS * lane < work.n
        notes = notes_of(tile.expert, tile.column, work)
        found = Uint32(0)
        for range_ in cutlass.range(Notes.ranges(work.k_stages), unroll=4):
            found |= ptx.load_if(work.b_scale.iterator + (notes + Notes.owns(range_) + lane), exists, 1)[0]
        return notes, exists, cute.arch.vote_any_sync(found != Uint32(0))

    def load(self, k_tile, tile: Tile, lane, work) -> tuple:
        """Load a k tile's scales of ``a``. Each lane loads one row's scale per 32 rows. Return the scales and the k
        tile's index."""
        return token_scales(self.config.tile_m, k_tile, tile, lane, work), k_tile

    @cute.jit
    def store(self, loaded, begun, is_last, slot, lane, work, smem):
        of_rows, k_tile = loaded
        store_token_scales(self.config.tile_m, self.stages.scales(slot, smem), of_rows, lane)
        notes, exists, has_own = begun
        flags = Uint32(0)
        if has_own:
            flags = self._store_own_units(notes, exists, k_tile, slot, lane, work, smem)
        if lane == 0:
            store_words([flags], self.units.flag_word(slot, smem))

    @cute.jit
    def _store_own_units(self, notes, exists, k_tile, slot, lane, work, smem) -> Uint32:
        """Store powers of two for the weight rows that use the k tile's own exponent. These powers convert the k tile's
        results to the rows' units. Return the flags."""
        at, k_stages = work.b_scale.iterator + notes, work.k_stages
        (owns,) = ptx.load_if(at + (Notes.owns(k_tile // RANGE) + lane), exists, 1)
        has_own = (owns >> Uint32(k_tile % RANGE) & Uint32(1)) != Uint32(0)
        units = ptx.load_if(at + (Notes.exponents(k_stages, 0) + 2 * lane), exists, 2)
        own = ptx.load_if(at + (Notes.exponents(k_stages, k_tile + 1) + 2 * lane), has_own, 2)
        own = [ptx.select(has_own, word, unit) for word, unit in zip(own, units, strict=True)]
        votes = Uint32(cute.arch.vote_ballot_sync(has_own))
        flags = Uint32(HAS_OWN)
        for group in range_constexpr(NOTE_ROWS // 32):
            # A lane handles ``WARP_ROWS`` rows, so eight lanes handle a group of 32 rows.
            changed = (votes & Uint32(0xFF << 8 * group)) != Uint32(0)
            flags |= ptx.select(changed, Uint32(1 << group), Uint32(0))
        for i in range_constexpr(WARP_ROWS):
            shift = const_expr(16 - 16 * (i % 2))
            unit, of_partial = (Int32(words[i // 2] << shift) >> 16 for words in (units, own))
            row = WARP_ROWS * lane + i
            self.units.powers(slot, smem, ACC)[row] = Float32(1.0)  # accumulators are already in the rows' units
            self.units.powers(slot, smem, PARTIAL)[row] = power_of_two(of_partial - unit)
        return flags


class RecodedLoop:
    """Mainloop for a recoded weight.

    If all weight rows of the tile use their units in all k tiles, whole rounds through the stages run as in
    ``fp8_wgmma``. In all other tiles, and in the k tiles before and after whole rounds, ``Units`` checks the flags of
    each k tile. If a flag is set, ``Units`` multiplies the results by powers of two that convert them to the rows'
    units.
    """

    def __init__(self, config: Config, stages: Stages, units: Units, results: Results):
        self.units = units
        self.loop = MainLoop(config, stages, TokenScaled(config, stages), results, units)

    @cute.jit
    def run(self, multiply, acc, partials: list, pending, stage, parity, consumer, work, smem):
        """Multiply this CTA's k tiles of an output tile, stage by stage. The caller has waited for the first stage.
        Return the next stage and its parity."""
        (flags,) = load_words(self.units.flag_word(stage, smem))
        return self.loop.run(
            multiply, acc, partials, pending, stage, parity, consumer, work, smem, is_plain=flags == Uint32(0)
        )


class UnitEpilogue:
    """Epilogue that first multiplies accumulators by the units of their weight rows."""

    def __init__(self, config: Config):
        self.plain: Any = GemmEpilogue(config)

    def of_tile(self, expert, tile_column, work) -> TileEpilogue:
        """Return a function that loads units, alpha and bias for columns of a tile, and applies the epilogue."""
        of_tile, notes = self.plain.of_tile(expert, tile_column, work), notes_of(expert, tile_column, work)

        def of_columns(column, count: int, after: int = 0) -> Finish:
            finish = of_tile(column, count, after)
            at = notes + column % NOTE_ROWS
            at = work.b_scale.iterator + cute.assume(at, divby=count)
            # Load two words at a time, because few aligned groups of four registers are free (see ``load_terms``).
            starts = range(0, count, 2)
            words = [word for i in starts for word in ptx.load_if(at, column < work.n - after, 2, 4 * (after + i))]
            units = [ptx.float_of(word) for word in words]
            return lambda total, i: finish(ptx.mul_rn(total, units[i]), i)

        return of_columns
