"""Scales of rows of a weight that have units of their own."""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Tile
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import over_shared_unit, own_exponent, shared_exponent
from torch_cute_ops.kernels.fp8_fp4_wgmma.units import IS_LAST, UnitsKernel
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights import FP4WeightStages
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import UnitsConfig


class UnitScales(FP4WeightStages, UnitsKernel):
    """What scale warps leave in a stage for those who decode the weight, and for consumers."""

    config: UnitsConfig

    def _begin_scales(self, tile: Tile, lane, share) -> tuple:
        """Of a lane's rows of the weight, every 32nd of the tile, the exponents of their units, as bytes; and how many
        rows there are from the first of them on."""
        words = self._weight_scales(tile, lane, share.begin, share)
        exponents = Uint32(0)
        for i, one in enumerate(words):
            exponents |= Uint32(shared_exponent(one, self.config.fmt) & 0xFF) << 8 * i
        return exponents, share.n - tile.column - lane

    @cute.jit
    def _store_scales(self, loaded, begun, is_last, place, lane, share, smem):
        """Where every row of a group fits its unit, leave what the tables of the shared units follow from; elsewhere
        the bytes of the scales, and the exponents of the K block's own units. Then the consumers have to change units,
        and after the last K block of a tile too, whose totals are in the unit 1."""
        c = self.config
        self._store_token_scales(self._scales(place, smem), loaded[0], lane)
        exponents, count = begun
        flags = ptx.select(is_last, Uint32(IS_LAST), Uint32(0))
        units, shared = [], []
        for i in range_constexpr(len(loaded[1])):
            units.append(Int32(exponents << 24 - 8 * i) >> 24)
            shared.append(over_shared_unit(loaded[1][i], units[i], c.fmt))
            is_own = cute.arch.vote_any_sync((shared[i].fits == Boolean(False)) & (32 * i < count))
            flags |= ptx.select(is_own, Uint32(1 << i), Uint32(0))
        for i in range_constexpr(len(loaded[1])):
            record = [shared[i].ones[0], shared[i].one_and_halves[0], shared[i].ones[1], shared[i].one_and_halves[1]]
            self._store_record(record, i, place, lane + 32 * i, share, smem)
        if flags != Uint32(0):
            for i in range_constexpr(len(loaded[1])):
                self._store_changes(loaded[1][i], units[i], flags, i, place, lane + 32 * i, share, smem)
        if lane == 0:
            store_words([flags], self._flags(place, smem))

    @cute.jit
    def _store_changes(self, words, unit, flags, group, place, row, share, smem):
        """What consumers change units by; and where a group has units of its own, what decodes it."""
        after = ptx.select((flags & Uint32(IS_LAST)) != Uint32(0), Int32(0), unit)
        of_sums = unit
        if (flags & Uint32(1 << group)) != Uint32(0):
            of_sums = own_exponent(words, self.config.fmt)
            of_halves = [words[0], words[0] >> 16] if const_expr(self.config.fmt == MXFP4) else words
            record = [of_halves[0], Uint32(of_sums), of_halves[1], Uint32(of_sums)]
            self._store_record(record, group, place, row, share, smem)
        self._store_powers(unit - after, of_sums - after, place, row, smem)

    @cute.jit
    def _store_record(self, record, group, place, row, share, smem):
        """Store the record of a row in the ``group``-th 32 rows, if this CTA decodes it."""
        part = 32 * group // self.config.copied_columns
        if share.part == part:
            store_words(record, self._record_words(place, row - part * self.config.copied_columns, smem))

    def _record_words(self, place, row, smem) -> cute.Tensor:
        """The words of a row's scales of the weight: two of each half of the K block."""
        return self._words(place, self.config.tokens + row * 4, 4, smem)
