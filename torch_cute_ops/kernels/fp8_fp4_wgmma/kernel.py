"""The device code; the package's docstring describes the roles and the data path."""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import load_words, store_words
from torch_cute_ops.kernels.common.fp8_stages import BLOCK
from torch_cute_ops.kernels.common.fp8_tiles_kernel import Smem, Tile
from torch_cute_ops.kernels.common.weight_ring import PIECE
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import (
    look_up,
    over_shared_unit,
    own_exponent,
    shared_exponent,
    tables_of_own_unit,
    tables_of_shared_unit,
)
from torch_cute_ops.kernels.fp8_fp4_wgmma.units import IS_LAST, UnitsKernel
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights import FP4WeightStages


class FP8FP4WgmmaKernel(FP4WeightStages, UnitsKernel):
    """The kernel of one ``Config``."""

    config: Config

    def _weight_at(self, smem: Smem) -> cute.Pointer:
        return smem.own

    # Scales

    def _begin_scales(self, tile: Tile, lane, share) -> tuple:
        """Of a lane's rows of the weight, four of the tile, the exponents of their units, as bytes; and how many rows
        there are from the first of them on."""
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

    # Decoding

    def _begin_help(self, warp, lane, share) -> tuple:
        """A decoding warp has 32 of the CTA's rows, or halves of 16: the lane's row among these and in the tile, its
        halves, and the warp's first row in the tile."""
        c = self.config
        each = 32 // c.lanes_per_row
        row, halves = warp * each + lane % each, [0, 1] if c.lanes_per_row == 1 else [lane // each]
        before = share.part * c.copied_columns
        return row, before + row, halves, before + warp * each

    def _complete(self, begun, stage, lane, share, smem) -> None:
        row, place, halves, first = begun
        (flags,) = load_words(self._flags(stage, smem))
        for half in halves:
            self._decode_half(flags >> first // 32 & Uint32(1), stage, row, place, half, smem)

    def _tell_complete(self, begun, stage, lane, share, smem) -> None:
        if self.config.row_ctas == 1:
            super()._tell_complete(begun, stage, lane, share, smem)
        else:
            self._share_rows(stage, begun[3], 32 // self.config.lanes_per_row, share, smem)

    @cute.jit
    def _share_rows(self, stage, first, rows: int, share, smem):
        """Send the rows that a warp has decoded, from ``first`` on, to the other CTA, and expect as many from there."""
        decoded = smem.own + cute.assume((stage * self.config.columns + first) * BLOCK, divby=PIECE)
        with cute.arch.elect_one():
            ptx.expect_and_send(decoded, smem.full + stage, rows * BLOCK, share.part ^ 1)

    @cute.jit
    def _decode_half(self, is_own, stage, row, place, half, smem):
        """Decode half of the CTA's ``row`` of a K block, the tile's row ``place``."""
        c = self.config
        record = self._record_words(stage, row, smem)
        at = record.iterator + cute.assume(Int32(half) * 2, divby=2)
        first, second = load_words(cute.make_tensor(at, cute.make_layout(2)))
        # Swizzles permute pieces by the number of the 128 bytes that they are in.
        codes_at = (stage * c.copied_columns + row) * c.line + (half * 2 ^ row // 2 % 4) * PIECE
        codes = []
        for piece in range_constexpr(2):
            codes += load_words(self._piece(smem.columns, codes_at ^ piece * PIECE))
        if is_own != Uint32(0):
            self._store_half(tables_of_own_unit(first, Int32(second), c.fmt), codes, stage, place, half, smem)
        else:
            self._store_half(tables_of_shared_unit(first, second, c.fmt), codes, stage, place, half, smem)

    def _store_half(self, tables: list, codes: list, stage, place, half, smem) -> None:
        c = self.config
        to = (stage * c.columns + place) * BLOCK + (half * 4 ^ place % 8) * PIECE
        for piece in range(4):
            table = tables[piece * len(tables) // 4]
            words = [word for one in codes[2 * piece : 2 * piece + 2] for word in look_up(table, one)]
            store_words(words, self._piece(smem.own, to ^ piece * PIECE))
