"""The device code; the package's docstring describes the roles and the data path."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES, next_stage
from torch_cute_ops.kernels.common.fp4.codes import e4m3_words
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Tile
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines import LineStages
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines_config import SPAN
from torch_cute_ops.kernels.fp8_mxfp4_wgmma.codes import (
    CODE_SCALE,
    block_factors,
    hard_factors,
    is_easy,
    rounded,
)
from torch_cute_ops.kernels.fp8_mxfp4_wgmma.config import BLOCKS, Config


class FP8MXFP4WgmmaKernel(LineStages):
    """The kernel of one ``Config``."""

    config: Config
    parts = BLOCKS

    # Scales

    def _begin_scales(self, tile: Tile, lane, share) -> Int32:
        """How many rows of the weight there are from the first of a lane's on."""
        return share.n - tile.column - lane

    def _store_scales(self, loaded, begun, is_last, stage, lane, share, smem) -> None:
        for i, (of_tokens, of_weight) in enumerate(loaded):
            place = stage * SPAN + i
            scaled = [ptx.mul_rn(scale, Float32(CODE_SCALE)) for scale in of_tokens]
            self._store_token_scales(self._scales(place, smem), scaled, lane)
            self._store_weight_scales([word for (word,) in of_weight], begun, place, lane, smem)

    @cute.jit
    def _store_weight_scales(self, scales: list, count, place, lane, smem):
        """A factor for each block of each row of the weight. Where scales are far apart, 0 or NaN, leave besides by how
        much helpers round codes. ``count``: what ``_begin_scales`` returned."""
        rows = [block_factors(word) for word in scales]
        is_hard = Boolean(False)
        for i in range_constexpr(len(rows)):
            is_hard = is_hard | (is_easy(rows[i]) == Boolean(False)) & (32 * i < count)
        flags = Uint32(0)
        if cute.arch.vote_any_sync(is_hard):
            for i in range_constexpr(len(rows)):
                factors, amounts = hard_factors(rows[i])
                store_words(factors, self._row_factors(place, lane + 32 * i, smem))
                store_words([amounts], self._amounts(place, lane + 32 * i, smem))
                rounds = cute.arch.vote_any_sync((amounts != Uint32(0)) & (32 * i < count))
                flags |= ptx.select(rounds, Uint32(1 << i), Uint32(0))
        else:
            for i in range_constexpr(len(rows)):
                store_words(rows[i], self._row_factors(place, lane + 32 * i, smem))
        if lane == 0:
            store_words([flags], self._flags(place, smem))

    def _row_factors(self, place, row, smem) -> cute.Tensor:
        """The factors of the blocks of a row of the weight."""
        return self._words(place, self.config.tokens + row * BLOCKS, BLOCKS, smem)

    def _amounts(self, place, row, smem) -> cute.Tensor:
        """By how much codes of a row of the weight are rounded: a byte for each block."""
        return self._words(place, self.config.amounts_at + row, 1, smem)

    def _flags(self, place, smem) -> cute.Tensor:
        """A word: bit i is set where codes of the i-th 32 rows of the weight are to be rounded."""
        return self._words(place, Int32(self.config.flags_at), 1, smem)

    # Helpers

    @cute.jit
    def _complete(self, begun, stage, lane, share, smem):
        """Arrange the activations of a K block, and round codes of the weight where that is due."""
        c = self.config
        place = stage * SPAN + begun
        base = smem.tokens + cute.assume(place * (c.tokens * BLOCK), divby=c.tokens * BLOCK)
        for i in range_constexpr(c.tokens * BLOCKS // 32):
            row, block = i * (32 // BLOCKS) + lane // BLOCKS, lane % BLOCKS
            # Swizzles permute the pieces of a row by its number.
            first = row * BLOCK + (2 * block ^ row % 8) * VECTOR_BYTES
            words = [word for piece in range(2) for word in load_words(self._piece(base, first ^ piece * VECTOR_BYTES))]
            for piece, selector in enumerate((0x6420, 0x7531)):
                taken = [ptx.prmt(words[2 * j], words[2 * j + 1], selector) for j in range(4)]
                store_words(taken, self._piece(base, first ^ piece * VECTOR_BYTES))
        (flags,) = load_words(self._flags(place, smem))
        if flags != Uint32(0):
            for i in range_constexpr(c.columns // 32):
                if (flags & Uint32(1 << i)) != Uint32(0):
                    self._round_row(place, lane + 32 * i, smem)

    @cute.jit
    def _round_row(self, place, row, smem):
        """Round the codes of a row of the weight in a K block."""
        (amounts,) = load_words(self._amounts(place, row, smem))
        for block in range_constexpr(BLOCKS):
            piece = self._piece(smem.columns, self._code_place(place, row, block))
            amount = (amounts >> 8 * block) & Uint32(0xFF)
            store_words([rounded(word, amount) for word in load_words(piece)], piece)

    # MMAs

    def _mma(self, group, smem) -> Callable:
        """The function that starts a consumer's MMAs of a K block, each with accumulators of its own."""
        c = self.config
        size = c.mma_columns // 2
        tid, _, _ = cute.arch.thread_idx()
        row, quad = tid // 32 * 16 + tid % 32 // 4, tid % 4
        operand = self._token_operand(smem)

        def multiply(place, partial) -> None:
            words = cute.make_rmem_tensor((4 * BLOCKS,), Uint32)
            for block in range(BLOCKS):
                for r in range(2):
                    at = smem.columns + cute.assume(self._code_place(place, row + 8 * r, block) + quad * 4, divby=4)
                    (codes,) = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1)))
                    for half, numbers in enumerate(e4m3_words(codes)):
                        words[4 * block + 2 * half + r] = numbers
            codes = self._register_operand(words, BLOCKS)
            mma = self._tiled_mma()
            mma.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            for block in range(BLOCKS):
                shape = mma.partition_shape_C((WGMMA_M, c.mma_columns))
                sums = cute.make_tensor(partial.iterator + block * size, shape)
                cute.gemm(mma, sums, codes[None, None, block], operand[None, None, block, place], sums)
            warpgroup.commit_group()

        return multiply

    @cute.jit
    def _multiply_tile(
        self, multiply, sums, partials: list, kept, stage, parity, consumer, share, smem, prepares: bool = True
    ):
        """Sum the CTA's K blocks of a tile, whose first stage has arrived. Returns the next stage, and its parity.

        While the codes of a K block are decoded, the MMAs of the one before run. But in a loop none may run from one
        pass to the next: ptxas would serialise them all.
        """
        sums.fill(0.0)
        for left in cutlass.range(share.end - share.begin - 1, -1, -1, unroll=1):
            first = stage * SPAN
            multiply(first, partials[0])
            for i in range_constexpr(1, SPAN):
                multiply(first + i, partials[i])
                factors = self._factors(first + i - 1, consumer, smem)
                warpgroup.wait_group(1)
                self._promote(sums, partials[i - 1], factors)
            factors, read = self._factors(first + SPAN - 1, consumer, smem), stage
            stage, parity = next_stage(stage, parity, self.config.stages)
            self._wait_if(left > 0, smem.full + stage, parity)
            warpgroup.wait_group(0)
            self._free(read, consumer.lane, smem)
            self._promote(sums, partials[SPAN - 1], factors)
        return stage, parity

    def _factors(self, place, consumer, smem) -> tuple:
        """Those of the blocks of a lane's two rows of the weight, and of its rows of ``a``."""
        rows = [load_words(self._row_factors(place, consumer.row + 8 * r, smem)) for r in range(2)]
        of_blocks = [[ptx.float_of(word) for word in words] for words in rows]
        return of_blocks, self._token_scales_of(self._scales(place, smem), consumer)

    def _promote(self, sums, partial, factors: tuple) -> None:
        """Add up the sums of blocks, times their factors, and add that, times those of ``a``, to the totals."""
        of_blocks, of_tokens = factors
        size = self.config.mma_columns // 2
        for i in range(size):
            row = of_blocks[i // 2 % 2]
            total = ptx.mul_rn(partial[i], row[0])
            for block in range(1, BLOCKS):
                total = ptx.fma_rn(partial[block * size + i], row[block], total)
            sums[i] = ptx.fma_rn(total, of_tokens[i // 4 * 2 + i % 2], sums[i])
