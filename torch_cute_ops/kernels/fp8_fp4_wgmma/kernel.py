"""The device code; the package's docstring describes the roles and the data path."""

import functools
from typing import Any

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
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import DECODERS, Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import RowScales, look_up, power_of_two, row_scales, table_of
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights import FP4ExpertTiles
from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel

PIECES = BLOCK // PIECE  # of a row of the decoded weight


class FP8FP4WgmmaKernel(FP8WgmmaKernel):
    """The kernel of one ``Config``."""

    config: Config

    def __init__(self, config: Config):
        super().__init__(config, functools.partial(FP4ExpertTiles, config.fmt, config.layout))

    def _weight_layout(self, stages: int):
        c = self.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Uint8)
        return cute.tile_to_shape(atom, (c.columns, c.line, stages), order=(0, 1, 2))

    def _weight_stages(self, smem: Smem) -> cute.Tensor:
        layout = self._weight_layout(self.config.stages)
        return cute.make_tensor(cute.recast_ptr(smem.columns, layout.inner, dtype=Uint8), layout.outer)

    def _weight_at(self, smem: Smem) -> cute.Pointer:
        return smem.own

    # Scales

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows of ``a``, 32 at a time; then the words of a lane's four rows of the weight."""
        c = self.config
        of_rows = self._token_scales(block, tile, lane, share)
        left = share.width * 2 // c.fmt.block_size - block * c.block_scales
        rows = [self._weight_scales(tile, lane + 32 * i, block, left, share) for i in range(c.columns // 32)]
        return of_rows, rows

    def _weight_scales(self, tile: Tile, row, block, left, share) -> list:
        """The scales of a row in a K block, four a word; zeros where there are none."""
        c, scale = self.config, share.b_scale
        column = tile.column + row
        first = Int64(block) * c.block_scales
        exists = column < share.n
        if c.layout.is_linear:
            offset = Int64(tile.expert) * scale.stride[2] + Int64(column) * scale.stride[0]
            at = scale.iterator + (offset + first)
            if c.fmt == MXFP4:
                # Rows of scales are multiples of two bytes.
                halves = [ptx.load_narrow_if(at, exists & (2 * i < left), 2, 2 * i) for i in range(2)]
                return [halves[0] | (halves[1] << 16)]
            return [ptx.load_if(at, exists & (4 * i < left), 1, 4 * i)[0] for i in range(c.block_scales // 4)]
        of_all = Int64(tile.expert) * share.n + column
        at = scale.iterator + (c.layout.row_offset(of_all, Int64(scale.shape[1])) + c.layout.block_offset(first))
        words = []
        for i in range(c.block_scales // 4):
            word = ptx.load_if(at, exists & (4 * i < left), 1, c.layout.block_offset(4 * i))[0]
            if c.fmt == MXFP4:
                # Padding may be anything.
                word = ptx.select(left > 2, word, word & Uint32(0xFFFF))
            words.append(word)
        return words

    @cute.jit
    def _store_scales(self, loaded, place, lane, smem):
        self._store_token_scales(self._scales(place, smem), loaded[0], lane)
        for i in range_constexpr(len(loaded[1])):
            store_words(loaded[1][i], self._scale_words(place, lane + 32 * i, smem))

    def _scale_words(self, place, row, smem) -> cute.Tensor:
        """The words of a row's scales of the weight."""
        each = self.config.block_scales // 4
        at = self._scales(place, smem).iterator + cute.assume(self.config.tokens + row * each, divby=each)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(each))

    def _powers(self, place, smem, which: int = 0) -> cute.Tensor:
        """Powers of two of the rows of the weight."""
        c = self.config
        at = self._scales(place, smem).iterator + (c.tokens + c.columns * (c.block_scales // 4 + which))
        return cute.make_tensor(at, cute.make_layout(c.columns))

    def _store_power(self, exponent, stage, row, smem, which: int = 0) -> None:
        self._powers(stage, smem, which)[row] = power_of_two(exponent)

    def _changes(self, place, smem) -> cute.Tensor:
        """Whether units change, for each decoding warp."""
        at = self._scales(place, smem).iterator + (self.config.place_scales - DECODERS)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(DECODERS))

    # Decoding

    @cute.jit
    def _help(self, warp, lane, share, smem):
        """A decoding warp: 32 rows of every K block."""
        c = self.config
        row = warp * 32 + lane
        stage, parity = Int32(0), Int32(0)
        unit = Int32(0)
        for _ in range(share.first, share.count, share.workers):
            for block in cutlass.range(share.begin, share.end, unroll=1):
                ptx.wait(smem.arrived + stage, parity)
                scales = row_scales(load_words(self._scale_words(stage, row, smem)), c.fmt)
                exponent = scales.exponent
                if const_expr(c.has_units):
                    # Twice the least at first, so that units hardly ever change
                    before = ptx.select(block == share.begin, exponent + 1, unit)
                    exponent, unit = self._use_units(scales, before, block + 1 == share.end, stage, warp, lane, smem)
                else:
                    self._store_power(exponent, stage, row, smem)
                self._decode_row(scales.numbers(exponent), stage, row, smem)
                # The MMAs read it through the async proxy, and copies replace the codes.
                fence_async()
                cute.arch.sync_warp()
                ptx.arrive_if(smem.full + stage, Uint32(lane == 0))
                stage, parity = next_stage(stage, parity, c.stages)

    @cute.jit
    def _use_units(self, scales: RowScales, before, is_last, stage, warp, lane, smem):
        """Decide whether the numbers of a K block are in the units of the totals, which are ``2^before``. If not, in a
        row of the warp, the units change, or numbers and totals differ by a power of two: both are left for the
        consumers. The last K block of a tile changes units to 1.

        Returns the exponent that the numbers are over, and that of the units from here on.
        """
        now = cutlass.max(before, scales.exponent)
        if const_expr(scales.is_near is not True):
            now = ptx.select(scales.is_near, now, Int32(0))
        stays = (now == before) & scales.fits(now) & scales.is_near
        changes = ptx.select(is_last, Int32(1), Int32(cute.arch.vote_any_sync(stays == Boolean(False))))
        now = ptx.select(is_last, Int32(0), now)
        exponent = now
        if changes != 0:
            exponent = scales.exponent
            self._store_power(before - now, stage, warp * 32 + lane, smem)
            self._store_power(exponent - now, stage, warp * 32 + lane, smem, 1)
        if lane == 0:
            store_words([Uint32(changes)], cute.local_tile(self._changes(stage, smem), (1,), (warp,)))
        return exponent, now

    def _decode_row(self, numbers: list, stage, row, smem) -> None:
        """Decode a row of a K block."""
        c = self.config
        codes_at = smem.columns + cute.assume((stage * c.columns + row) * c.line, divby=c.line)
        decoded_at = smem.own + cute.assume((stage * c.columns + row) * BLOCK, divby=BLOCK)
        # Swizzles permute pieces by the number of the 128 bytes that they are in.
        for piece in range(c.line // PIECE):
            at = codes_at + cute.assume((piece ^ row // 2 % 4) * PIECE, divby=PIECE)
            codes = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
            for half in range(2):
                block = (2 * piece + half) * c.block_scales // PIECES
                if half == 0 or c.block_scales == PIECES:
                    table = table_of(numbers[block])
                words = [word for one in codes[2 * half : 2 * half + 2] for word in look_up(table, one)]
                to = decoded_at + cute.assume(((2 * piece + half) ^ row % 8) * PIECE, divby=PIECE)
                store_words(words, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(4)))

    # Sums

    def _factors(self, stage, consumer, smem) -> Any:
        """The scales of a lane's rows; or, in swapped tiles, of its rows ``2^t``, and of its columns the scales."""
        c, scales = self.config, self._scales(stage, smem)
        if c.has_units:
            return [scales[consumer.row], scales[consumer.row + 8]]
        powers = self._powers(stage, smem)
        pairs = [self._pair(scales, group, consumer) for group in range(c.mma_columns // 8)]
        return [powers[consumer.row], powers[consumer.row + 8]], pairs

    def _pair(self, values: cute.Tensor, group: int, consumer) -> list:
        """The values of a lane's columns in a group of eight."""
        at = values.iterator + cute.assume(8 * group + consumer.quad * 2, divby=2)
        words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
        return [ptx.float_of(word) for word in words]

    @cute.jit
    def _prepare(self, sums, partial, stage, consumer, smem):
        """Change the units of totals, and bring the sums of a K block to these."""
        if const_expr(self.config.has_units):
            changes = load_words(self._changes(stage, smem))
            if (changes[0] | changes[1] | changes[2] | changes[3]) != Uint32(0):
                for warp in range_constexpr(DECODERS):
                    if changes[warp] != Uint32(0):
                        for group in range_constexpr(4 * warp, 4 * warp + 4):
                            of_sums = self._pair(self._powers(stage, smem, 0), group, consumer)
                            of_partial = self._pair(self._powers(stage, smem, 1), group, consumer)
                            for i in range_constexpr(4):
                                at = 4 * group + i
                                sums[at] = ptx.mul_rn(sums[at], of_sums[i % 2])
                                partial[at] = ptx.mul_rn(partial[at], of_partial[i % 2])

    def _promote(self, sums, partial, factors) -> None:
        """Add a block's sums to the totals: times ``2^t``, which is exact, and the scale."""
        if self.config.has_units:
            super()._promote(sums, partial, factors)
            return
        powers, scales = factors
        for i in range(self.config.mma_columns // 2):
            value = ptx.mul_rn(partial[i], powers[i // 2 % 2])
            sums[i] = ptx.fma_rn(scales[i // 4][i % 2], value, sums[i])
