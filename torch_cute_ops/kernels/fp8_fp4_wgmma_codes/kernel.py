"""Device code of the GEMM that multiplies undecoded MXFP4 codes. The package's docstring describes roles, data path and
pipelines."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp4.codes import e4m3_words
from torch_cute_ops.kernels.common.fp8.consumers import (
    Consumers,
    GemmEpilogue,
    Results,
    register_operand,
    swapped_token_scales,
    tiled_mma,
    token_operand,
)
from torch_cute_ops.kernels.common.fp8.gemm import (
    FP8Gemm,
    Stages,
    WorkSchedule,
    store_token_scales,
    tell_decoded,
    wait_if,
)
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, LINE_SPAN
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, load_stage_scales, piece_at
from torch_cute_ops.kernels.fp8_fp4_wgmma_codes.codes import (
    CODE_SCALE,
    block_factors,
    hard_factors,
    is_easy,
    rounded,
)
from torch_cute_ops.kernels.fp8_fp4_wgmma_codes.config import BLOCKS, Config


class FP8FP4WgmmaCodesKernel(FP8Kernel):
    """GEMM kernel that multiplies undecoded MXFP4 codes, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        weight = FP4Weight(config.fmt, config.layout, config.rows.is_plain, config.copied_n, config.line)
        schedule, scales = WorkSchedule(config, weight), CodeScales(config, stages, weight)
        results = Results(config, stages, schedule, GemmEpilogue(config))
        loop = CodeLoop(config, stages, scales)
        consumers = Consumers(config, stages, CodeMma(config, weight), loop, results)
        self.gemm = FP8Gemm(config, schedule, scales, consumers, CodeDecoder(config, weight, scales))


class CodeScales:
    """Scale source that stores the scales of ``a``, one factor per weight row and block, and the amounts for the
    rounding of codes (see ``codes.rounded``)."""

    def __init__(self, config: Config, stages: Stages, weight: FP4Weight):
        self.config, self.stages, self.weight = config, stages, weight

    def begin(self, tile: Tile, lane, work) -> Int32:
        """Return the number of weight rows from this lane's first row to the end of the weight."""
        return work.n - tile.column - lane

    def load(self, k_stage, tile: Tile, lane, work) -> list:
        return load_stage_scales(self.config, self.weight, k_stage, tile, lane, work)

    def store(self, loaded, begun, is_last, stage, lane, work, smem) -> None:
        for i, (of_tokens, of_weight) in enumerate(loaded):
            slot = stage * LINE_SPAN + i
            scaled = [ptx.mul_rn(scale, Float32(CODE_SCALE)) for scale in of_tokens]
            store_token_scales(self.config.tile_m, self.stages.scales(slot, smem), scaled, lane)
            self._store_weight_scales([word for (word,) in of_weight], begun, slot, lane, smem)

    @cute.jit
    def _store_weight_scales(self, scales: list, count, slot, lane, smem):
        """Store the factors of a k tile. If some scales are 0 or NaN, or differ too much, also store the rounding
        amounts that decoders need (see ``codes.rounded``). ``count`` is the result of ``begin``."""
        rows = [block_factors(word) for word in scales]
        is_hard = Boolean(False)
        for i in range_constexpr(len(rows)):
            is_hard = is_hard | (is_easy(rows[i]) == Boolean(False)) & (32 * i < count)
        flags = Uint32(0)
        if cute.arch.vote_any_sync(is_hard):
            for i in range_constexpr(len(rows)):
                factors, amounts = hard_factors(rows[i])
                store_words(factors, self.row_factors(slot, lane + 32 * i, smem))
                store_words([amounts], self.amounts(slot, lane + 32 * i, smem))
                rounds = cute.arch.vote_any_sync((amounts != Uint32(0)) & (32 * i < count))
                flags |= ptx.select(rounds, Uint32(1 << i), Uint32(0))
        else:
            for i in range_constexpr(len(rows)):
                store_words(rows[i], self.row_factors(slot, lane + 32 * i, smem))
        if lane == 0:
            store_words([flags], self.flags(slot, smem))

    # Views of the scales in a stage

    def row_factors(self, slot, row, smem) -> cute.Tensor:
        """Return the factors of a weight row's blocks as a tensor in shared memory. ``slot`` is the k tile's place in
        the pipeline."""
        return self.stages.words(slot, self.config.tile_m + row * BLOCKS, BLOCKS, smem)

    def amounts(self, slot, row, smem) -> cute.Tensor:
        """Return the word with the rounding amounts of a weight row: one byte per block (see ``codes.rounded``)."""
        return self.stages.words(slot, self.config.amounts_at + row, 1, smem)

    def flags(self, slot, smem) -> cute.Tensor:
        """Return the word of flags. Bit i is set if some codes of weight rows 32 i to 32 i + 31 must be rounded."""
        return self.stages.words(slot, Int32(self.config.flags_at), 1, smem)


class CodeDecoder:
    """Decoder that rounds codes, and rearranges activations in the order in which ``CodeMma`` extracts codes.

    Each warp of a decoder group handles one k tile of a stage.
    """

    def __init__(self, config: Config, weight: FP4Weight, scales: CodeScales):
        self.config, self.weight, self.scales = config, weight, scales

    def begin(self, warp, lane, work) -> Int32:
        """Return the index of the k tile that this warp handles among a stage's k tiles."""
        return Int32(warp)

    @cute.jit
    def complete(self, begun, stage, lane, work, smem):
        c = self.config
        slot = stage * LINE_SPAN + begun
        base = smem.a + cute.assume(slot * (c.tile_m * K_TILE), divby=c.tile_m * K_TILE)
        for i in range_constexpr(c.tile_m * BLOCKS // 32):
            row, block = i * (32 // BLOCKS) + lane // BLOCKS, lane % BLOCKS
            # The swizzle permutes the 16-byte pieces of a row by the index of the row. Undo it.
            first = row * K_TILE + (2 * block ^ row % 8) * VECTOR_BYTES
            words = [word for piece in range(2) for word in load_words(piece_at(base, first ^ piece * VECTOR_BYTES))]
            for piece, selector in enumerate((0x6420, 0x7531)):
                taken = [ptx.prmt(words[2 * j], words[2 * j + 1], selector) for j in range(4)]
                store_words(taken, piece_at(base, first ^ piece * VECTOR_BYTES))
        (flags,) = load_words(self.scales.flags(slot, smem))
        if flags != Uint32(0):
            for i in range_constexpr(c.tile_n // 32):
                if (flags & Uint32(1 << i)) != Uint32(0):
                    self._round_row(slot, lane + 32 * i, smem)

    def tell(self, begun, stage, lane, work, smem) -> None:
        tell_decoded(stage, lane, smem)

    @cute.jit
    def _round_row(self, slot, row, smem):
        """Round a weight row's codes in a k tile, in shared memory."""
        (amounts,) = load_words(self.scales.amounts(slot, row, smem))
        for block in range_constexpr(BLOCKS):
            piece = piece_at(smem.b, self.weight.line_offset(slot, row, block, LINE_SPAN))
            amount = (amounts >> 8 * block) & Uint32(0xFF)
            store_words([rounded(word, amount) for word in load_words(piece)], piece)


class CodeMma:
    """MMAs of a k tile. The A operand consists of codes as e4m3 numbers, in registers. Each scale block uses separate
    accumulators."""

    parts = BLOCKS

    def __init__(self, config: Config, weight: FP4Weight):
        self.config, self.weight = config, weight

    def begin(self, group, smem) -> Callable:
        """Return a function that starts this consumer warpgroup's MMAs of a k tile."""
        c = self.config
        size = c.mma_n // 2
        tid, _, _ = cute.arch.thread_idx()
        row, quad = tid // 32 * 16 + tid % 32 // 4, tid % 4
        operand = token_operand(c, smem)

        def multiply(slot, partial) -> None:
            words = cute.make_rmem_tensor((4 * BLOCKS,), Uint32)
            for block in range(BLOCKS):
                for r in range(2):
                    offset = self.weight.line_offset(slot, row + 8 * r, block, LINE_SPAN)
                    at = smem.b + cute.assume(offset + quad * 4, divby=4)
                    (codes,) = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1)))
                    for half, numbers in enumerate(e4m3_words(codes)):
                        words[4 * block + 2 * half + r] = numbers
            codes = register_operand(words, BLOCKS)
            mma = tiled_mma(c.mma_n, warpgroup.OperandSource.RMEM)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            for block in range(BLOCKS):
                shape = mma.partition_shape_C((WGMMA_M, c.mma_n))
                of_block = cute.make_tensor(partial.iterator + block * size, shape)
                cute.gemm(mma, of_block, codes[None, None, block], operand[None, None, block, slot], of_block)
            warpgroup.commit_group()

        return multiply


class CodeLoop:
    """Mainloop in which the MMAs of a k tile run while the codes of the next k tile are decoded.

    All MMAs of an iteration end before the next iteration, because ptxas serialises MMAs that stay in flight across
    iterations.
    """

    def __init__(self, config: Config, stages: Stages, scales: CodeScales):
        self.config, self.stages, self.scales = config, stages, scales

    @cute.jit
    def run(self, multiply, acc, partials: list, pending, stage, parity, consumer, work, smem):
        """Multiply this CTA's k tiles of an output tile, stage by stage. The caller has waited for the first stage.
        Return the next stage and its parity."""
        acc.fill(0.0)
        for left in cutlass.range(work.end - work.begin - 1, -1, -1, unroll=1):
            first = stage * LINE_SPAN
            multiply(first, partials[0])
            for i in range_constexpr(1, LINE_SPAN):
                multiply(first + i, partials[i])
                factors = self._factors(first + i - 1, consumer, smem)
                warpgroup.wait_group(1)
                self._promote(acc, partials[i - 1], factors)
            factors, read = self._factors(first + LINE_SPAN - 1, consumer, smem), stage
            stage, parity = smem.stages.next(stage, parity)
            wait_if(left > 0, smem.stages.full + stage, parity)
            warpgroup.wait_group(0)
            self.stages.release(read, consumer.lane, smem)
            self._promote(acc, partials[LINE_SPAN - 1], factors)
        return stage, parity

    def _factors(self, slot, consumer, smem) -> tuple:
        """Load the factors of the blocks of this lane's two weight rows, and the scales of this lane's rows of
        ``a``."""
        rows = [load_words(self.scales.row_factors(slot, consumer.row + 8 * r, smem)) for r in range(2)]
        of_blocks = [[ptx.float_of(word) for word in words] for words in rows]
        return of_blocks, swapped_token_scales(self.config.mma_n, self.stages.scales(slot, smem), consumer)

    def _promote(self, acc, partial, factors: tuple) -> None:
        """Multiply the results of each block by the block's factors, and add up the products of all blocks. Multiply
        the sum by the scales of ``a``, and add it to the accumulators."""
        of_blocks, of_tokens = factors
        size = self.config.mma_n // 2
        for i in range(size):
            row = of_blocks[i // 2 % 2]
            total = ptx.mul_rn(partial[i], row[0])
            for block in range(1, BLOCKS):
                total = ptx.fma_rn(partial[block * size + i], row[block], total)
            acc[i] = ptx.fma_rn(total, of_tokens[i // 4 * 2 + i % 2], acc[i])
