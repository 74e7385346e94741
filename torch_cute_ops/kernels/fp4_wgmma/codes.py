"""One row of FP4 activations in a tile, multiplied as codes: e2m1 numbers are e4m3 numbers, so FP8 MMAs take both sides
without their scales, and eight codes of the weight take six instructions.

As in ``row``, a column of the MMAs is a block: of half a chunk lane ``q`` of a quad has two blocks of each of its rows
of the weight, and columns ``2 · q`` and ``2 · q + 1`` have the elements of these alone. Of a word of codes an MMA's
lane takes the even codes as its first four elements of k, and the odd ones as its last four. The sum of a block has at
most 12 bits, so the tensor cores have it exactly (``docs/numerics.md``), in any order. It is multiplied by both scales
and added up as in ``row``, in the same order, so that the results have the same bits, but for rows of the weight that
several warps share there.
"""

from collections.abc import Callable
from typing import Final

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.fp4.decode import E4M3_EXPONENT, e4m3_words
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES
from torch_cute_ops.kernels.fp4_wgmma.config import CODE_TILES
from torch_cute_ops.kernels.fp4_wgmma.mma import Consumer, Stages
from torch_cute_ops.kernels.fp4_wgmma.row import RowActivations, RowMma

HALVES: Final = 2
STEPS: Final = 4
"""Words of a lane's codes in half a chunk, each for an MMA of 32 elements of k."""
MMA_K: Final = 32
"""Elements of k of an MMA."""
FACTORS_AT: Final = HALVES * ATOM_BYTES
"""Where the factors of the blocks are in a stage, behind the B operands of both halves."""


class CodeActivations(RowActivations):
    """Pieces of one row as in ``row``, stored where the B operands have them: 8 columns by 128 elements, which the
    128-byte swizzle permutes. All else in a stage is zero, and stays so."""

    def store(self, words: list, groups, piece, token, base: cute.Pointer) -> None:
        codes, factor = self._codes(words)
        quad, word = piece // (HALVES * STEPS), piece % (HALVES * STEPS)
        half, step = word // STEPS, word % STEPS
        column = quad * 2 + step // 2
        line = base + cute.assume(half * ATOM_BYTES + column * ATOM_ROW_BYTES + quad * 4, divby=4)
        for i, four in enumerate(e4m3_words(codes)):
            at = line + cute.assume(((step * 2 + i) ^ column) * 16, divby=16)
            cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1))[0] = four
        self._store_factor(factor, piece, base + FACTORS_AT)


class CodeMma(RowMma):
    """The MMAs of a warpgroup with its rows of the weight and one row of codes. A lane has the sums that it has in
    ``row``."""

    exponent = 2 * E4M3_EXPONENT

    def start_of(self, smem) -> Callable:
        """A function that starts the MMAs of half a chunk: of the lane's words of e4m3, the half's number and the stage
        of activations, to sums of their own, which they replace."""

        def tiled() -> cute.TiledMma:
            shape, mode = (WGMMA_M, ATOM_M, MMA_K), OperandMajorMode.K
            sources = warpgroup.OperandSource.RMEM, mode, mode
            return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        tiles = self.config.token_stages * CODE_TILES
        layout = cute.tile_to_shape(atom, (ATOM_M, ATOM_ROW_BYTES, tiles), order=(0, 1, 2))
        tokens = cute.make_tensor(cute.recast_ptr(smem.tokens, layout.inner, dtype=Float8E4M3FN), layout.outer)
        mma = tiled()
        operand = mma.make_fragment_B(mma.get_slice(0).partition_B(tokens))

        def start(words, half: int, stage, sums) -> None:
            layout = cute.make_layout(((4, 2, 2), 1, STEPS), stride=((1, 4, 8), 0, 16))
            weights = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float8E4M3FN), layout)
            mma = tiled()
            accumulators = cute.make_tensor(sums.iterator, mma.partition_shape_C((WGMMA_M, ATOM_M)))
            tile = stage * CODE_TILES + half
            warpgroup.fence()
            for step in range(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(mma, accumulators, weights[None, None, step], operand[None, None, step, tile], accumulators)
            warpgroup.commit_group()

        return start

    def multiply(self, start, adds, first, i, stages: Stages, sums, consumer: Consumer, part, smem) -> Stages:
        stage, parity, token_stage, token_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        existing, quad = self._existing(first + i, consumer, part), consumer.quad
        codes = [self.ring.codes(smem.codes, stage, row, quad) for row in (consumer.row, consumer.row + 8)]
        rows = (consumer.scale_row, consumer.scale_row + 8)
        scales = [self._scales(smem.scales, stage, row, quad, existing) for row in rows]
        smem.weight_pipeline.release(stage, consumer.leads)
        totals = []
        for half in range(HALVES):
            words = cute.make_rmem_tensor((4 * STEPS,), Uint32)
            for step in range(STEPS):
                for r, row in enumerate(codes):
                    for j, four in enumerate(e4m3_words(row[half * STEPS + step])):
                        words[4 * step + 2 * j + r] = four
            if half == 0:
                smem.a_pipeline.wait_full(token_stage, token_parity)
            total = cute.make_rmem_tensor((self.config.sums,), Float32)
            start(words, half, token_stage, total)
            totals.append(total)
        factors_at = token_stage * (CODE_TILES * ATOM_BYTES) + FACTORS_AT + quad * 16
        factors = self._factors(smem.tokens + cute.assume(factors_at, divby=16))
        for half, total in enumerate(totals):
            warpgroup.wait_group(HALVES - 1 - half)
            for e in range(self.config.sums):
                at = 2 * half + e % 2
                scale = ptx.mul_rn(scales[e // 2][at], factors[at])
                sums[e] = ptx.fma_rn(total[e], scale, sums[e])
        cute.arch.sync_warp()
        smem.a_pipeline.arrive_empty(token_stage, consumer.leads)
        return self._after(stages)
