"""The device code; the package's docstring describes the roles and the data path."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import load_words, store_words
from torch_cute_ops.kernels.common.fp8_stages import BLOCK
from torch_cute_ops.kernels.common.fp8_tiles_kernel import Smem, Tile
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.weight_ring import PIECE, next_stage
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
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights import FP4ExpertTiles


class FP8FP4WgmmaKernel(UnitsKernel):
    """The kernel of one ``Config``."""

    config: Config

    def __init__(self, config: Config):
        super().__init__(config, functools.partial(FP4ExpertTiles, config.fmt, config.layout))

    def _weight_layout(self, stages: int):
        c = self.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Uint8)
        return cute.tile_to_shape(atom, (c.copied_columns, c.line, stages), order=(0, 1, 2))

    def _weight_stages(self, smem: Smem) -> cute.Tensor:
        layout = self._weight_layout(self.config.stages)
        return cute.make_tensor(cute.recast_ptr(smem.columns, layout.inner, dtype=Uint8), layout.outer)

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

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows of ``a``, 32 at a time; then the words of a lane's four rows of the weight."""
        return self._token_scales(block, tile, lane, share), self._weight_scales(tile, lane, block, share)

    def _weight_scales(self, tile: Tile, lane, block, share) -> list:
        """The scales of a lane's rows of the weight in a K block, every 32nd from ``lane`` on: of each its words, four
        scales a word; anything where there are none."""
        c, scale = self.config, share.b_scale
        words = c.block_scales // 4
        left = share.width * 2 // c.fmt.block_size - block * c.block_scales
        first = Int64(block) * c.block_scales
        if c.rows.is_plain and not c.layout.is_linear:
            # Tiles are those of the layout, in which these rows follow each other.
            row = c.layout.row_offset(Int64(tile.column) + lane, Int64(scale.shape[1]))
            at = scale.iterator + (row + c.layout.block_offset(first))
            found = [ptx.load_if(at, 4 * i < left, 4, c.layout.block_offset(4 * i)) for i in range(words)]
            rows = [list(of_row) for of_row in zip(*found, strict=True)]
        else:
            rows = []
            for i in range(c.columns // 32):
                column = tile.column + lane + 32 * i
                rows.append(self.tiles.row_scales(scale, share.n, tile.expert, column, column < share.n, first, left))
        return [self.tiles.without_padding(row, left) for row in rows]

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
        at = self._scales(place, smem).iterator + cute.assume(self.config.tokens + row * 4, divby=4)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4))

    # Decoding

    @cute.jit
    def _help(self, team, warp, lane, share, smem):
        """A decoding warp: 32 rows of each of its team's K blocks, or halves of 16."""
        c = self.config
        each = 32 // c.lanes_per_row
        row, halves = warp * each + lane % each, [0, 1] if c.lanes_per_row == 1 else [lane // each]
        # Of the warp's first row, and of the lane's, in the tile
        before = share.part * c.copied_columns
        first, place = before + warp * each, before + row
        count = cute.ceil_div(share.count - share.first, share.workers) * (share.end - share.begin)
        stage, parity = Int32(0), Int32(0)
        for i in range_constexpr(c.teams - 1):
            if team > i:
                stage, parity = self._skip(Int32(i), count, stage, parity, lane, smem)
        for turn in cutlass.range(team, count, c.teams, unroll=1):
            ptx.wait(smem.arrived + stage, parity)
            (flags,) = load_words(self._flags(stage, smem))
            for half in halves:
                self._decode_half(flags >> first // 32 & Uint32(1), stage, row, place, half, smem)
            # The MMAs and the copy read it through the async proxy, and copies replace the codes.
            fence_async()
            cute.arch.sync_warp()
            if const_expr(c.row_ctas == 1):
                ptx.arrive_if(smem.full + stage, Uint32(lane == 0))
            else:
                self._share_rows(stage, first, each, share, smem)
            stage, parity = next_stage(stage, parity, c.stages)
            for i in range_constexpr(1, c.teams):
                stage, parity = self._skip(turn + i, count, stage, parity, lane, smem)

    @cute.jit
    def _skip(self, turn, count, stage, parity, lane, smem):
        """Skip a K block of another team. Where the teams exchange stages from round to round, see it arrive: who does
        not may take a phase for that of two rounds before. The stage is full only when all teams have seen that, so
        that none is left behind."""
        c = self.config
        if const_expr(c.teams_meet):
            self._wait_if(turn < count, smem.arrived + stage, parity)
            cute.arch.sync_warp()
            ptx.arrive_if(smem.full + stage, Uint32((lane == 0) & (turn < count)))
        return next_stage(stage, parity, c.stages)

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

    def _piece(self, base, offset) -> cute.Tensor:
        at = base + cute.assume(offset, divby=PIECE)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4))
