"""Consumer warps: their loop over work tiles, and the MMAs of a k tile.

``WarpMma`` and ``WarpgroupMma`` multiply several rows of activations. ``RowMma`` and ``CodeMma`` multiply one row.

**One row.** With one row of activations, seven of the eight columns of an ``mma.sync`` would be idle. Therefore the
columns are blocks of k. Four lanes share a row of the weight, and lane ``q`` of the four lanes holds four blocks of a k
tile. Column ``2 · q + h`` contains only the elements of the first (``h`` = 0) or second (``h`` = 1) of these blocks.
The third and fourth blocks are multiplied in the same way, into separate accumulators. An accumulator is thus the sum
of the products of one block, without scales. The lane that holds this accumulator has also loaded the block's scale,
and adds the scaled sum to its total. Scaling takes one fma per 16 products, whereas scaling decoded codes would take
one multiplication per two codes.

``RowMma`` multiplies activations as float16. A bfloat16 block is multiplied by a power of two so that it fits into
float16's range, and the block's float32 factor is the inverse of this power of two. An FP4 block fits into float16's
range unchanged, and its factor is the block's scale. The factor multiplies the scales of the weight.

**One row of codes.** Every e2m1 number is an e4m3 number, so FP8 MMAs can multiply the codes of both operands, without
scales, in ``CodeMma``. Converting eight codes of the weight to e4m3 takes six instructions. In each half of a k tile,
lane ``q`` holds two blocks per weight row, and columns ``2 · q`` and ``2 · q + 1`` contain only the elements of these
two blocks. From a word of codes, a lane takes the even codes as its first four elements of an MMA's k, and the odd
codes as its last four. A block's sum needs at most 12 bits, so the tensor cores compute it exactly
(``docs/numerics.md``), in any order. The sum is multiplied by both scales and added in the same order as in ``RowMma``.
The results are bit-identical to ``RowMma``, except in columns whose k tiles ``RowMma`` divides among several warps.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, WGMMA_M
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp4.activations import QUAD
from torch_cute_ops.kernels.common.fp4.codes import E4M3_EXPONENT, acc_scale, e4m3_words, float16_pairs
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES, K_TILE
from torch_cute_ops.kernels.common.fp4.mma import WORD_STEPS, warp_mma, warpgroup_mma
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.config import (
    CODE_ATOMS,
    K_SLICES,
    ROW_BYTES,
    ROW_STAGE_BYTES,
    WARP_N,
    ZEROS_AT,
    Config,
)
from torch_cute_ops.kernels.fp4_wgmma.epilogue import WorkTileEpilogue
from torch_cute_ops.kernels.fp4_wgmma.load import (
    CODE_EXPONENT,
    FACTORS_AT,
    HALVES,
    STEPS,
    RowActivations,
    activations_at,
    work_tile_before,
)

SLICE_WORDS: Final = K_TILE // K_SLICES // 16 // WORD_STEPS
"""Number of words of codes that a lane multiplies by one slice of activations."""
CODE_MMA_K: Final = 32
"""K of an FP8 MMA, in elements."""


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        group, thread: index of the warpgroup, and index of the thread in its warpgroup.
        lane, quad: index of the thread in its warp, and index among the four lanes that share a column of the result.
        column: first of the thread's two columns of the tile. The second is ``column + 8``.
        scale_row: row of the first column's scales, counted from the first row of the stage's first scale tile.
        warp_k: index of the warp among the warps that take turns at the k tiles of the same columns.
        existing: byte mask of the thread's scales that exist in the last k tile of a weight row.
        leads: 1 in the lane that arrives at barriers for its warp, else 0.
    """

    group: Int32
    lane: Int32
    thread: Int32
    quad: Int32
    column: Int32
    scale_row: Int32
    warp_k: Int32 | int
    existing: Uint32
    leads: Uint32


class Stages(NamedTuple):
    """Position of a consumer warp in both pipelines.

    Attributes:
        stage, parity: next stage of the weight, and its parity.
        a_stage, a_parity: next stage of the activations, and its parity.
        last: stage of activations that the warp multiplied last.
    """

    stage: Int32
    parity: Int32
    a_stage: Int32
    a_parity: Int32
    last: Int32


class Consumers:
    """Device code of the consumer warps."""

    def __init__(self, config: Config, mma: "Mma", epilogue: WorkTileEpilogue):
        self.config, self.mma, self.weight, self.epilogue = config, mma, mma.weight, epilogue

    @cute.jit
    def consume(self, factor, tid, work, smem):
        """Run a consumer warp, which multiplies its columns in all work tiles of the CTA.

        ``factor`` is the result of ``EpilogueOps.factor``.
        """
        c = self.config
        group = tid // WARPGROUP
        lane = tid % 32
        n_warp, warp_k, step = self._columns_of(tid // 32)
        column = n_warp * WARP_N + lane // 4
        consumer = Consumer(
            group=group,
            lane=lane,
            thread=tid % WARPGROUP,
            quad=lane % 4,
            column=column,
            scale_row=column,
            warp_k=warp_k,
            existing=self.weight.existing(work.blocks - (work.k_tiles - 1) * self.weight.blocks, lane % 4),
            leads=Uint32(lane == 0),
        )
        start = self.mma.start_of(smem)
        acc = cute.make_rmem_tensor((c.acc_size,), Float32)
        # With experts, ``total`` sums up all experts' accumulators, each multiplied by the expert's factors.
        total = cute.make_rmem_tensor((c.acc_size,), Float32) if c.expert_k is not None else acc
        stages = Stages(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        iteration = work.end
        while iteration > work.begin:
            n_tile, first, count = work_tile_before(iteration, work)
            # With experts, the first MMAs overwrite the accumulators. Set the accumulators to zero nevertheless,
            # because otherwise ptxas spills registers.
            acc.fill(0.0)
            own = consumer._replace(scale_row=consumer.column + self.weight.first_scale_row(n_tile))
            if const_expr(c.expert_k is None):
                for i in range(count):
                    if const_expr(c.warp_split_k == 1):
                        stages = self.mma.multiply(start, True, first, i, stages, acc, own, work, smem)
                    elif i & (step - 1) == warp_k:
                        stages = self.mma.multiply(start, True, first, i, stages, acc, own, work, smem)
                    else:
                        stages = self.mma.skip(stages, consumer, smem)
            else:
                total.fill(0.0)
                expert_k_tiles, i = c.expert_k // K_TILE, Int32(0)
                while i < count:
                    begin = i
                    end = cutlass.min(((first + i) // expert_k_tiles + 1) * expert_k_tiles - first, count)
                    while i < end:
                        stages = self.mma.multiply(start, i > begin, first, i, stages, acc, own, work, smem)
                        i += 1
                    self.mma.wait()
                    self.epilogue.add_expert(acc, total, stages.last, consumer, smem)
            self.mma.end(stages, consumer, smem)
            iteration -= count
            if const_expr(c.pdl and not c.static_weight):
                if iteration <= work.begin:
                    cute.arch.griddepcontrol_launch_dependents()
            self.mma.reduce(acc)
            self.epilogue.finish(total, n_tile, first, count, factor, tid, consumer, work, smem)

    def _columns_of(self, warp) -> tuple:
        """Return (index of a warp along N, index of the first k tile that it multiplies in a work tile, step to its
        next k tile).

        The step is a power of two.
        """
        c = self.config
        if c.warp_split_k == 1:
            return warp, 0, 1
        whole = c.n_warps - c.split_n_warps
        is_split, place = warp >= whole, warp - whole
        n_warp = ptx.select(is_split, whole + place % c.split_n_warps, warp)
        warp_k = ptx.select(is_split, place // c.split_n_warps, Int32(0))
        return n_warp, warp_k, ptx.select(is_split, Int32(c.warp_split_k), Int32(1))


class Mma:
    """Base class of all kinds of MMAs. A subclass overrides the empty methods that it needs.

    Attributes:
        acc_scale: factor, a power of two, that undoes the scaling of decoded codes in the accumulators.
    """

    def __init__(self, config: Config, weight: WeightStages, acc_scale: float):
        self.config, self.weight, self.acc_scale = config, weight, acc_scale

    def start_of(self, smem) -> Callable | None:
        """Return the function that ``multiply`` calls to start wgmmas, or None if a subclass uses mma.sync."""
        return None

    def multiply(self, start, adds, first, i, stages: Stages, acc, consumer: Consumer, work, smem) -> Stages:
        """Multiply a k tile. Return the stages of the next k tile.

        This k tile's own stages are released in this call, in the call for the next k tile, or by ``end``.

        Args:
            start: result of ``start_of``.
            adds: True to add to the accumulators, False to overwrite them. mma.sync ignores ``adds`` and always adds.
            first: index of the work tile's first k tile.
            i: index of the k tile, counted from ``first``.
            stages: stages of the k tile.
            acc: accumulators of the thread.
            consumer, work, smem: thread, work of its CTA, and shared memory of its CTA. ``consumer.scale_row`` must
                belong to the current n tile.
        """
        raise NotImplementedError

    def skip(self, stages: Stages, consumer: Consumer, smem) -> Stages:
        """Skip a k tile of this warp's columns that another warp multiplies.

        The warp nevertheless waits for the stages and releases them: a wait by parity is correct only if the warp has
        seen every phase of the barrier.
        """
        stage, parity, a_stage, a_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        smem.weight_pipeline.arrive_empty(stage, consumer.leads)
        smem.a_pipeline.wait_full(a_stage, a_parity)
        smem.a_pipeline.arrive_empty(a_stage, consumer.leads)
        return self._after(stages, smem)

    def _after(self, stages: Stages, smem) -> Stages:
        """Return the stages of the next k tile. Each stage of activations must hold a whole k tile."""
        return Stages(
            *smem.weight_pipeline.next(stages.stage, stages.parity),
            *smem.a_pipeline.next(stages.a_stage, stages.a_parity),
            stages.a_stage,
        )

    def wait(self) -> None:
        """Wait until all MMAs of this warpgroup have ended. The accumulators are then complete."""

    def end(self, stages: Stages, consumer: Consumer, smem) -> None:
        """Wait until all MMAs of a work tile have ended, and release the stages that they read."""

    def reduce(self, acc) -> None:
        """At the end of a work tile, add up those accumulators that are parts of the same sum."""

    def _existing(self, k_tile, consumer: Consumer, work) -> Uint32:
        """Return the byte mask of the lane's scales that exist in a k tile, for ``WeightStages.factors``."""
        return ptx.select(k_tile == work.k_tiles - 1, consumer.existing, Uint32(0xFFFFFFFF))


class TileMma(Mma):
    """Base class of MMAs for several rows of activations. Codes are decoded and multiplied by their scales before each
    MMA."""

    def __init__(self, config: Config, weight: WeightStages):
        super().__init__(config, weight, acc_scale(config.operands.fmt, config.operands.decodes_both))
        self.dtype = DSL_DTYPES[config.operands.dtype]

    def _load(self, stage, existing, consumer: Consumer, smem) -> tuple[list, list]:
        """Load the codes of a lane's two weight rows from a stage, and the factors of their blocks."""
        rows, scale_rows = ((row, row + 8) for row in (consumer.column, consumer.scale_row))
        codes = [self.weight.codes(smem.codes, stage, row, consumer.quad) for row in rows]
        factors = [
            self.weight.factors(smem.scales, stage, row, consumer.quad, existing, self.dtype) for row in scale_rows
        ]
        return codes, factors


class WarpMma(TileMma):
    """MMAs of a warp (mma.sync). A stage of activations holds a whole k tile."""

    def multiply(self, start, adds, first, i, stages: Stages, acc, consumer: Consumer, work, smem) -> Stages:
        c = self.config
        stage, parity, a_stage, a_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        codes, factors = self._load(stage, self._existing(first + i, consumer, work), consumer, smem)
        for word in range(self.weight.words):
            pairs = self.weight.pairs(codes, factors, word, self.dtype)
            if word == 0:
                smem.a_pipeline.wait_full(a_stage, a_parity)
            at = activations_at(c, a_stage, smem)
            warp_mma(pairs, word, c.tile_m, at, c.arranged.token_bytes, consumer.lane, acc, self.dtype)
            if word == self.weight.words // 2:
                # Fence before the stage is released, so that all lanes' loads of codes are complete. The MMA above uses
                # a word of the last load, but this does not order the load before the arrival: ptxas may move the MMA,
                # and with it the first use of the loaded word, past the arrival.
                fence_async()
                cute.arch.sync_warp()
                smem.weight_pipeline.arrive_empty(stage, consumer.leads)
                stage, parity = smem.weight_pipeline.next(stage, parity)
        if not c.rearranges:
            fence_async()
        cute.arch.sync_warp()
        smem.a_pipeline.arrive_empty(a_stage, consumer.leads)
        return Stages(stage, parity, *smem.a_pipeline.next(a_stage, a_parity), a_stage)


class WarpgroupMma(TileMma):
    """MMAs of a warpgroup (wgmma). The MMAs of one word of codes run while the next word is decoded."""

    def start_of(self, smem) -> Callable:
        c = self.config
        sizes = c.tile_m, c.slices_per_stage * K_TILE // K_SLICES, c.a_stages
        return warpgroup_mma(self.dtype, *sizes, (0, 1, 2), smem.activations)

    def multiply(self, start, adds, first, i, stages: Stages, acc, consumer: Consumer, work, smem) -> Stages:
        c = self.config
        stage, parity, a_stage, a_parity, last = stages
        words = SLICE_WORDS * c.slices_per_stage
        smem.weight_pipeline.wait_full(stage, parity)
        codes, factors = self._load(stage, self._existing(first + i, consumer, work), consumer, smem)
        for word in range(self.weight.words):
            pairs = self.weight.pairs(codes, factors, word, self.dtype)
            if word % words == 0:
                smem.a_pipeline.wait_full(a_stage, a_parity)
            start(pairs, word % words, a_stage, adds if word == 0 else True, acc)
            if word == self.weight.words // 2:
                # All lanes have now read their codes, because the wgmma above uses a word of the last load. (An arrival
                # alone does not wait for loads whose results are not yet used: on an H200, bulk copies overtook such
                # loads.)
                cute.arch.sync_warp()
                smem.weight_pipeline.arrive_empty(stage, consumer.leads)
                stage, parity = smem.weight_pipeline.next(stage, parity)
            # After this wait, the previous word's MMAs have ended, and its registers may be overwritten.
            warpgroup.wait_group(1)
            if word % words == 0:
                leads = consumer.leads if word else ptx.select(i > 0, consumer.leads, Uint32(0))
                smem.a_pipeline.arrive_empty(last, leads)
            if word % words == words - 1:
                last = a_stage
                a_stage, a_parity = smem.a_pipeline.next(a_stage, a_parity)
        return Stages(stage, parity, a_stage, a_parity, last)

    def wait(self) -> None:
        warpgroup.wait_group(0)

    def end(self, stages: Stages, consumer: Consumer, smem) -> None:
        self.wait()
        smem.a_pipeline.arrive_empty(stages.last, consumer.leads)


class RowMma(Mma):
    """MMAs (mma.sync) of a warp's columns with one row of activations.

    A lane holds four accumulators: the sums of two blocks for column ``column`` of the result, and the sums of two
    blocks for column ``column + 8``.

    Attributes:
        exponent: the accumulators contain the true sums times 2^-``exponent``.
    """

    exponent = 2 * CODE_EXPONENT

    def __init__(self, config: Config, weight: WeightStages, activations: RowActivations):
        self.has_factors = activations.has_factors
        # The factors of bfloat16 activations already remove the power of two by which decoded codes are scaled, so the
        # exponent is 0. With FP4 activations, the codes of both operands are scaled by this power.
        exponent = {BFloat16: 0, Float16: CODE_EXPONENT}.get(activations.a_dtype)
        if exponent is None or activations.config.prologue_quant is not None:
            exponent = self.exponent
        super().__init__(config, weight, 2.0**exponent)

    def multiply(self, start, adds, first, i, stages: Stages, acc, consumer: Consumer, work, smem) -> Stages:
        stage, parity, a_stage, a_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        smem.a_pipeline.wait_full(a_stage, a_parity)
        existing, quad = self._existing(first + i, consumer, work), consumer.quad
        rows, scale_rows = ((row, row + 8) for row in (consumer.column, consumer.scale_row))
        codes = [self.weight.codes(smem.codes, stage, row, quad) for row in rows]
        scales = [self._scales(smem.scales, stage, row, quad, existing) for row in scale_rows]
        at = a_stage * ROW_STAGE_BYTES
        if self.has_factors:
            factors = self._factors(smem.activations + cute.assume(at + ROW_BYTES + quad * 16, divby=16))
            scales = [[ptx.mul_rn(s, f) for s, f in zip(row, factors, strict=True)] for row in scales]
        # A lane loads the elements of a block only if the lane's column belongs to this block. Otherwise it loads
        # zeros.
        column, quarter = consumer.lane // QUAD, at + quad * (ROW_BYTES // QUAD)
        places = [ptx.select(column == 2 * quad + h, quarter, Int32(ZEROS_AT)) for h in range(2)]
        for half in range(2):
            total = [Float32(0.0)] * 4
            for word in range(half * 4, half * 4 + 4):
                place = smem.activations + cute.assume(places[word // 2 % 2] + word * 16, divby=16)
                row = load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(4)))
                pairs = [float16_pairs(words[word]) for words in codes]
                for step in range(2):
                    weights = [pairs[r][2 * step + high] for high in range(2) for r in range(2)]
                    total = ptx.mma_16x8x16(weights, row[2 * step : 2 * step + 2], total, "f16")
            for e in range(4):
                acc[e] = ptx.fma_rn(total[e], scales[e // 2][2 * half + e % 2], acc[e])
            if half == 0:
                smem.weight_pipeline.release(stage, consumer.leads)
        cute.arch.sync_warp()
        smem.a_pipeline.arrive_empty(a_stage, consumer.leads)
        return self._after(stages, smem)

    def _scales(self, scales_at: cute.Pointer, stage, row, quad, existing) -> list:
        """Return the scales of the lane's four blocks of a weight row, in fp32."""
        bytes_ = self.weight.scales(scales_at, stage, row, quad, existing)
        pairs = [ptx.f16x2_of_e4m3x2(half) for half in (bytes_ & Uint32(0xFFFF), bytes_ >> 16)]
        return [ptx.unpack_f16(pair, half) for pair in pairs for half in range(2)]

    def _factors(self, at: cute.Pointer) -> list:
        words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        return [ptx.float_of(word) for word in words]

    def reduce(self, acc) -> None:
        """Add up the sums of all blocks. Then, every lane of a quad holds the sums of both columns in ``acc[0]`` and
        ``acc[2]``."""
        for i in (0, 2):
            total = ptx.add_rn(acc[i], acc[i + 1])
            for step in (1, 2):
                total = ptx.add_rn(total, cute.arch.shuffle_sync_bfly(total, step))
            acc[i] = total


class CodeMma(RowMma):
    """FP8 MMAs (wgmma) of a warpgroup's columns with one row of FP4 codes. ``RowMma`` describes the accumulators."""

    exponent = 2 * E4M3_EXPONENT

    def start_of(self, smem) -> Callable:
        """Return a function that starts the MMAs of half a k tile.

        The function's arguments are the lane's words of e4m3, the index of the half, the stage of activations, and the
        accumulators, which it overwrites.
        """

        def tiled() -> cute.TiledMma:
            shape, mode = (WGMMA_M, ATOM_M, CODE_MMA_K), OperandMajorMode.K
            sources = warpgroup.OperandSource.RMEM, mode, mode
            return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        atoms = self.config.a_stages * CODE_ATOMS
        layout = cute.tile_to_shape(atom, (ATOM_M, ATOM_ROW_BYTES, atoms), order=(0, 1, 2))
        activations = cute.make_tensor(
            cute.recast_ptr(smem.activations, layout.inner, dtype=Float8E4M3FN), layout.outer
        )
        mma = tiled()
        operand = mma.make_fragment_B(mma.get_slice(0).partition_B(activations))

        def start(words, half: int, stage, acc) -> None:
            layout = cute.make_layout(((4, 2, 2), 1, STEPS), stride=((1, 4, 8), 0, 16))
            weights = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float8E4M3FN), layout)
            mma = tiled()
            accumulators = cute.make_tensor(acc.iterator, mma.partition_shape_C((WGMMA_M, ATOM_M)))
            atom = stage * CODE_ATOMS + half
            warpgroup.fence()
            for step in range(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(mma, accumulators, weights[None, None, step], operand[None, None, step, atom], accumulators)
            warpgroup.commit_group()

        return start

    def multiply(self, start, adds, first, i, stages: Stages, acc, consumer: Consumer, work, smem) -> Stages:
        stage, parity, a_stage, a_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        existing, quad = self._existing(first + i, consumer, work), consumer.quad
        codes = [self.weight.codes(smem.codes, stage, row, quad) for row in (consumer.column, consumer.column + 8)]
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
                smem.a_pipeline.wait_full(a_stage, a_parity)
            total = cute.make_rmem_tensor((self.config.acc_size,), Float32)
            start(words, half, a_stage, total)
            totals.append(total)
        factors_at = a_stage * (CODE_ATOMS * ATOM_BYTES) + FACTORS_AT + quad * 16
        factors = self._factors(smem.activations + cute.assume(factors_at, divby=16))
        for half, total in enumerate(totals):
            warpgroup.wait_group(HALVES - 1 - half)
            for e in range(self.config.acc_size):
                at = 2 * half + e % 2
                scale = ptx.mul_rn(scales[e // 2][at], factors[at])
                acc[e] = ptx.fma_rn(total[e], scale, acc[e])
        cute.arch.sync_warp()
        smem.a_pipeline.arrive_empty(a_stage, consumer.leads)
        return self._after(stages, smem)
