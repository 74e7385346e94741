"""The device code; the package's docstring describes the roles and the data path."""

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import load_words, store_words
from torch_cute_ops.kernels.common.fp8_stages import BLOCK
from torch_cute_ops.kernels.common.fp8_tiles_kernel import Smem, Tile
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.weight_ring import PIECE, next_stage
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import look_up, scaled, table_of
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

    def _powers(self, place, smem) -> cute.Tensor:
        """The powers of two of the rows of the weight."""
        c = self.config
        at = self._scales(place, smem).iterator + (c.place_scales - c.columns)
        return cute.make_tensor(at, cute.make_layout(c.columns))

    # Decoding

    @cute.jit
    def _help(self, warp, lane, share, smem):
        """A decoding warp: 32 rows of every K block."""
        c = self.config
        row = warp * 32 + lane
        stage, parity = Int32(0), Int32(0)
        for _ in range(share.first, share.count, share.workers):
            for _ in cutlass.range(share.begin, share.end, unroll=1):
                ptx.wait(smem.arrived + stage, parity)
                self._decode_row(stage, row, smem)
                # The MMAs read it through the async proxy, and copies replace the codes.
                fence_async()
                cute.arch.sync_warp()
                ptx.arrive_if(smem.full + stage, Uint32(lane == 0))
                stage, parity = next_stage(stage, parity, c.stages)

    def _decode_row(self, stage, row, smem) -> None:
        """Decode a row of a K block."""
        c = self.config
        numbers, power = scaled(load_words(self._scale_words(stage, row, smem)), c.fmt)
        self._powers(stage, smem)[row] = power
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
        """The scales of a lane's rows, and the powers of two of its columns; or, in swapped tiles, of its rows the
        powers, and of its columns the scales."""
        c, scales, powers = self.config, self._scales(stage, smem), self._powers(stage, smem)
        of_rows, of_columns = (powers, scales) if c.is_swapped else (scales, powers)
        pairs = []
        for group in range(c.mma_columns // 8):
            at = of_columns.iterator + cute.assume(8 * group + consumer.quad * 2, divby=2)
            words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
            pairs.append([ptx.float_of(word) for word in words])
        return [of_rows[consumer.row], of_rows[consumer.row + 8]], pairs

    def _promote(self, sums, partial, factors) -> None:
        """Add a block's sums to the totals: times the power of two, which is exact, and the scale."""
        rows, columns = factors
        for i in range(self.config.mma_columns // 2):
            of_row, of_column = rows[i // 2 % 2], columns[i // 4][i % 2]
            power, scale = (of_row, of_column) if self.config.is_swapped else (of_column, of_row)
            sums[i] = ptx.fma_rn(scale, ptx.mul_rn(partial[i], power), sums[i])
