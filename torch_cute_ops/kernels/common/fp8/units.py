"""Units of FP4 weight rows. A row's *unit* is a power of two by which the row's accumulators are divided.

Usually a row's numbers in a k tile fit the row's unit: divided by the unit, they neither exceed e4m3's range nor become
subnormal (``common.fp8.fp4_tables``). Consumers then promote MMA results without a change of units. If a row does not
fit in some k tile, all rows of its group of 32 are decoded with the k tile's own exponents. ``Units`` then multiplies
the MMA results of the k tile by powers of two that the scale loaders store in the stage. After the last k tile of an
output tile, ``Units`` multiplies all accumulators by their units, so that the epilogue needs no units.

Starting at word ``units_at``, a slot (the place of one k tile) stores two factors per weight row (one for the
accumulators, one for the k tile's MMA results), and a word of flags.
"""

from typing import Any, Final

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.fp8.consumers import Consumer, pair, promote, token_factors
from torch_cute_ops.kernels.common.fp8.fp4_tables import (
    over_shared_unit,
    own_exponent,
    power_of_two,
    shared_exponent,
)
from torch_cute_ops.kernels.common.fp8.gemm import Smem, Stages, store_token_scales
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, load_stage_scales

ACC, PARTIAL = 0, 1
"""Indices of the two factors of a weight row: for the accumulators, and for a k tile's MMA results."""
IS_LAST: Final = 0x10
"""Flag that marks the last k tile of an output tile."""
HAS_OWN: Final = 0x20
"""Flag that marks an output tile in which some k tiles are decoded with their own exponents."""


class Units:
    """Promotion of MMA results to accumulators that are divided by the units of their weight rows.

    In each k tile's slot, ``Units`` reads the words that begin at the configuration's ``units_at``. Scale sources write
    these words (``store_powers`` and ``flag_word``).
    """

    def __init__(self, config: Any, stages: Stages):
        self.config, self.stages = config, stages

    def powers(self, slot, smem: Smem, which: int) -> cute.Tensor:
        """Return the factors of all weight rows: for the accumulators if ``which`` is ``ACC``, for a k tile's MMA
        results if it is ``PARTIAL``."""
        c = self.config
        at = self.stages.scales(slot, smem).iterator + (c.units_at + c.tile_n * which)
        return cute.make_tensor(at, cute.make_layout(c.tile_n))

    def store_powers(self, of_acc, of_partial, slot, row, smem: Smem) -> None:
        """Store the two factors of a weight row, which are powers of two. The arguments ``of_acc`` and ``of_partial``
        are their exponents."""
        for which, exponent in enumerate((of_acc, of_partial)):
            self.powers(slot, smem, which)[row] = power_of_two(exponent)

    def flag_word(self, slot, smem: Smem) -> cute.Tensor:
        """Return the word of flags of a k tile. Bit i is set if some of the weight rows 32 i to 32 i + 31 do not fit
        their units. ``IS_LAST`` marks the last k tile."""
        return self.stages.words(slot, Int32(self.config.units_at + 2 * self.config.tile_n), 1, smem)

    def factors(self, slot, consumer: Consumer, smem: Smem) -> list:
        return token_factors(self.config, self.stages, slot, consumer, smem)

    def flags(self, slot, consumer: Consumer, smem: Smem) -> Uint32:
        """Load the flags of a k tile. In swapped tiles, return only ``IS_LAST`` and the flag of this warp's own
        rows."""
        (flags,) = load_words(self.flag_word(slot, smem))
        if self.config.is_swapped:
            return flags & (Uint32(1) << consumer.first // 32 | IS_LAST)
        return flags

    @cute.jit
    def prepare(self, acc, partial, flags, slot, consumer, smem):
        """Multiply the accumulators and the MMA results of a k tile by their factors, for the rows whose flags are
        set."""
        if flags != Uint32(0):
            if const_expr(self.config.is_swapped):
                for values, which in ((acc, ACC), (partial, PARTIAL)):
                    powers = self.powers(slot, smem, which)
                    of_rows = [powers[consumer.row], powers[consumer.row + 8]]
                    for i in range_constexpr(self.config.mma_n // 2):
                        values[i] = ptx.mul_rn(values[i], of_rows[i // 2 % 2])
            else:
                acc_powers, partial_powers = self.powers(slot, smem, ACC), self.powers(slot, smem, PARTIAL)
                for i in range_constexpr(self.config.tile_n // 32):
                    if (flags & Uint32(1 << i | IS_LAST)) != Uint32(0):
                        for group in range_constexpr(4 * i, 4 * i + 4):
                            of_acc = pair(acc_powers, group, consumer)
                            of_partial = pair(partial_powers, group, consumer)
                            for j in range_constexpr(4):
                                at = 4 * group + j
                                acc[at] = ptx.mul_rn(acc[at], of_acc[j % 2])
                                partial[at] = ptx.mul_rn(partial[at], of_partial[j % 2])

    def promote(self, acc, partial, factors: list) -> None:
        promote(self.config, acc, partial, factors)


class UnitScales:
    """Scale source of an FP4 weight with units. It stores records for the decoder, and factors for ``Units``.

    A record is four words per weight row, two for each half of the k tile. If all rows of the group of 32 fit their
    units, these two words are ``SharedUnit.ones`` and ``SharedUnit.one_and_halves``. Otherwise they are the scales and
    the exponent of the k tile's own unit.
    """

    def __init__(self, config: Any, stages: Stages, weight: FP4Weight, units: Units):
        self.config, self.stages, self.weight, self.units = config, stages, weight, units

    def begin(self, tile: Tile, lane, work) -> tuple:
        """Return the exponents of the units of this lane's weight rows, and the number of weight rows from the lane's
        first row to the end of the weight.

        The lane's rows are every 32nd row of the tile. Each exponent takes one byte of a word.
        """
        c = self.config
        first = work.begin if c.span == 1 else work.begin * c.span
        words = self.weight.lane_scales(c.tile_n, tile, lane, first, work)
        exponents = Uint32(0)
        for i, one in enumerate(words):
            exponents |= Uint32(shared_exponent(one, c.fmt) & 0xFF) << 8 * i
        return exponents, work.n - tile.column - lane

    def load(self, k_stage, tile: Tile, lane, work) -> list:
        return load_stage_scales(self.config, self.weight, k_stage, tile, lane, work)

    def store(self, loaded: list, begun: tuple, is_last, stage, lane, work, smem) -> None:
        # ``is_last`` holds for all k tiles of the last stage: with two K groups, each group has its own last k tile.
        for i, of_slot in enumerate(loaded):
            slot = stage if self.config.span == 1 else stage * self.config.span + i
            self._store_slot(of_slot, begun, is_last, slot, lane, work, smem)

    @cute.jit
    def _store_slot(self, loaded, begun, is_last, slot, lane, work, smem):
        """Store the scales of a k tile in its slot.

        If all rows of a group of 32 fit their units, the records are computed for these units. Otherwise they are
        computed for the k tile's own exponents, and consumers need factors. Consumers also need factors in the last k
        tile of an output tile, to multiply the accumulators by their units.
        """
        c = self.config
        of_tokens, of_weight = loaded
        store_token_scales(c.tile_m, self.stages.scales(slot, smem), of_tokens, lane)
        exponents, count = begun
        flags = ptx.select(is_last, Uint32(IS_LAST), Uint32(0))
        units, shared = [], []
        for i in range_constexpr(len(of_weight)):
            units.append(Int32(exponents << 24 - 8 * i) >> 24)
            shared.append(over_shared_unit(of_weight[i], units[i], c.fmt))
            is_own = cute.arch.vote_any_sync((shared[i].fits == Boolean(False)) & (32 * i < count))
            flags |= ptx.select(is_own, Uint32(1 << i), Uint32(0))
        for i in range_constexpr(len(of_weight)):
            record = [shared[i].ones[0], shared[i].one_and_halves[0], shared[i].ones[1], shared[i].one_and_halves[1]]
            self._store_record(record, i, slot, lane + 32 * i, work, smem)
        if flags != Uint32(0):
            for i in range_constexpr(len(of_weight)):
                self._store_changes(of_weight[i], units[i], flags, i, slot, lane + 32 * i, work, smem)
        if lane == 0:
            store_words([flags], self.units.flag_word(slot, smem))

    @cute.jit
    def _store_changes(self, words, unit, flags, group, slot, row, work, smem):
        """Store the factors that change units. If the group does not fit its units, also store records for the k tile's
        own exponents."""
        after = ptx.select((flags & Uint32(IS_LAST)) != Uint32(0), Int32(0), unit)
        of_partial = unit
        if (flags & Uint32(1 << group)) != Uint32(0):
            of_partial = own_exponent(words, self.config.fmt)
            of_halves = [words[0], words[0] >> 16] if const_expr(self.config.fmt == MXFP4) else words
            record = [of_halves[0], Uint32(of_partial), of_halves[1], Uint32(of_partial)]
            self._store_record(record, group, slot, row, work, smem)
        self.units.store_powers(unit - after, of_partial - after, slot, row, smem)

    @cute.jit
    def _store_record(self, record, group, slot, row, work, smem):
        """Store a weight row's record, if this CTA decodes the row. ``group`` is the index of the row's group of 32
        rows."""
        part = 32 * group // self.config.copied_n
        if work.m_rank == part:
            store_words(record, record_words(self.config, self.stages, slot, row - part * self.config.copied_n, smem))


def record_words(config: Any, stages: Stages, slot, row, smem: Smem) -> cute.Tensor:
    """Return the record of a weight row. ``row`` is the row's index among the rows that this CTA decodes."""
    return stages.words(slot, config.tile_m + row * 4, 4, smem)
