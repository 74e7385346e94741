"""Work of a CTA, its shared memory, and the loads that fill its pipelines.

The producer warp copies the weight. If another kernel rearranges the activations, the producer warp also copies the
activations. Otherwise, decoder warps rearrange the activations, and the consumers may rearrange the first k tiles.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import pack, prefetch, store_words, unpack
from torch_cute_ops.kernels.common.core.pipeline import Pipeline, fence_async
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.codes import e4m3_words, float16_pairs, pair_activations
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES, K_TILE, ActivationLayout
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.config import K_SLICES, K_TILE_BLOCKS, ROW_BYTES, Config

HALVES: Final = 2
"""Number of halves into which a k tile of one row of codes is divided. Each half is a separate operand of MMAs."""
STEPS: Final = 4
"""Number of words of codes that a lane holds for half a k tile. Each word is used by one MMA of 32 elements of k."""
FACTORS_AT: Final = HALVES * ATOM_BYTES
"""Offset in bytes of the blocks' factors in a stage of one row of codes."""
LARGEST_EXPONENT: Final = 15
"""Exponent to which the largest element of a bfloat16 block is scaled: the largest exponent of float16."""
CODE_EXPONENT: Final = 14
"""Negated exponent of decoded codes: ``float16_pairs`` decodes to e2m1 · 2^-14."""


class Workspace(NamedTuple):
    """Tensors in the workspace. ``Config.workspace_bytes`` computes their sizes.

    Attributes:
        activations: rearranged activations.
        factors: (tile_m, experts, m tiles) float32, or None without experts.
        partial_sums: float32, partial sums of all CTAs.
        flags: int32, one per CTA and warpgroup. A flag is nonzero if the warpgroup's partial sums are complete.
    """

    activations: cute.Tensor
    factors: cute.Tensor | None
    partial_sums: cute.Tensor
    flags: cute.Tensor


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    An *iteration* multiplies one k tile. Iteration ``i`` of an m tile multiplies k tile ``i % k_tiles`` of n tile ``i
    // k_tiles``.

    Attributes:
        n, m: numbers of columns and rows of the result.
        k_tiles, blocks: number of k tiles, and number of scale blocks of a row of the weight.
        m_tile, m_tiles: index of the CTA's m tile, and number of m tiles.
        cta, num_ctas: index of the CTA among the CTAs of its m tile, and number of these CTAs.
        begin, end: range of the CTA's iterations.
        iterations: number of iterations of an m tile.
        a, a_scale: activations, and their scales or None.
        alpha, bias, row_scale: operands of the epilogue, or None.
        out: result.
        workspace: workspace, or None if the CTAs rearrange the activations.
        prefetch: matrix to prefetch into L2, or None.
    """

    n: Int32
    m: Int32
    k_tiles: Int32
    blocks: Int32
    m_tile: Int32
    m_tiles: Int32
    cta: Int32
    num_ctas: Int32
    begin: Int32
    end: Int32
    iterations: Int64
    a: cute.Tensor
    a_scale: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    row_scale: cute.Tensor | None
    out: cute.Tensor
    workspace: Workspace | None
    prefetch: cute.Tensor | None


@dataclass(frozen=True)
class Smem:
    """Shared memory of a CTA.

    Attributes:
        codes, scales: stages of the weight. After the last k tile, partial sums overwrite the codes.
        activations, factors: stages of the activations, and of the experts' factors.
        received: partial sums from the other CTAs of the cluster.
        weight_pipeline, a_pipeline: barriers of the weight's stages, and of the activations' stages.
        received_full: mbarrier that counts the bytes of received partial sums.
    """

    codes: cute.Pointer
    activations: cute.Pointer
    scales: cute.Pointer
    factors: cute.Pointer
    received: cute.Pointer
    weight_pipeline: Pipeline
    a_pipeline: Pipeline
    received_full: cute.Pointer


def work_tile_before(iteration, work: Work) -> tuple:
    """Return the work tile that ends just before ``iteration``: its n tile, first k tile, and number of k tiles."""
    n_tile = (iteration - 1) // work.k_tiles
    first = cutlass.max(work.begin, n_tile * work.k_tiles)
    return n_tile, first - n_tile * work.k_tiles, iteration - first


def existing_sizes(config: Config, work: Work) -> tuple[Int32, Int32]:
    """Return the numbers of rows and columns of a cluster's tile that exist in the result."""
    first_column = work.begin // work.k_tiles * config.tile_n
    rows = cutlass.min(work.m - work.m_tile * config.tile_m, Int32(config.tile_m))
    return rows, cutlass.min(work.n - first_column, Int32(config.tile_n))


def activations_at(config: Config, stage, smem: Smem) -> cute.Pointer:
    """Return the address of a stage of activations."""
    size = config.a_stage_bytes
    return smem.activations + cute.assume(stage * size, divby=math.gcd(size, ATOM_BYTES))


class Loads:
    """Device code that fills the pipelines of the weight and of the activations."""

    def __init__(self, config: Config, weight: WeightStages, activations: Activations):
        self.config, self.weight, self.activations = config, weight, activations
        # `each`: number of k groups that a lane handles per group of eight tokens. `together`: number of k groups that
        # a lane handles in a step. `steps`: number of steps per k tile.
        self.each = activations.k_groups * min(config.tile_m, ATOM_M) // 32
        k_groups = self.each * config.m_atoms // config.a_full_arrivals
        self.together = min(config.max_k_groups, k_groups)
        self.steps = k_groups // self.together

    @cute.jit
    def produce(self, copies, work, smem):
        """Run the producer warp: copy all k tiles that the CTA multiplies, in order.

        ``copies`` is the result of ``WeightStages.open``. ``Config.ahead`` k tiles of the weight are copied before the
        previous kernel ends. If the previous kernel is the op's own ``activation_tiles``, the early copies are safe,
        because ``activation_tiles`` waits for all earlier kernels before it lets this kernel start. If the weight is
        static and this warp reads only the weight, no wait is needed (``kernels.common.core.launch``).
        """
        c = self.config
        full, loaded = smem.weight_pipeline.full, Int32(0)
        if const_expr(c.pdl and c.ahead is not None):
            if const_expr(c.ahead > 0):
                iteration = work.end
                ahead = cutlass.min(work.end - work.begin, Int32(c.ahead))
                while loaded < ahead:
                    n_tile, first, count = work_tile_before(iteration, work)
                    for i in range(cutlass.min(count, ahead - loaded)):
                        self.weight.load(n_tile, first + i, 0, loaded, full + loaded, copies, work.n, work.blocks)
                        loaded += 1
                    iteration -= count
            cute.arch.griddepcontrol_wait()
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        a_stage, a_parity = Int32(0), Int32(1)
        iteration = work.end
        done = Int32(0)
        while iteration > work.begin:
            n_tile, first, count = work_tile_before(iteration, work)
            for i in range(count):
                if done >= loaded:
                    smem.weight_pipeline.wait_empty(stage, parity)
                    self.weight.load(n_tile, first + i, 0, stage, full + stage, copies, work.n, work.blocks)
                done += 1
                stage, parity = smem.weight_pipeline.next(stage, parity)
                if const_expr(not c.rearranges):
                    for k_slice in range_constexpr(0, K_SLICES, c.slices_per_stage):
                        smem.a_pipeline.wait_empty(a_stage, a_parity)
                        self._load_activations(first + i, k_slice, a_stage, work, smem)
                        a_stage, a_parity = smem.a_pipeline.next(a_stage, a_parity)
            iteration -= count
        if const_expr(c.prefetches):
            prefetch(work.prefetch, work.m_tile * work.num_ctas + work.cta, work.m_tiles * work.num_ctas)

    @cute.jit
    def rearrange_first(self, tid, work, smem):
        """Let all consumers rearrange the activations of the first k tiles, while the weight is being copied."""
        c = self.config
        k_tiles = cutlass.min(work.end - work.begin, Int32(c.first_k_tiles))
        k_groups, threads = self.activations.k_groups, c.consumer_warps * 32
        for item in cutlass.range(tid, k_tiles * (k_groups * c.tile_m), threads, unroll=1):
            row, k_group, k_tile = item % c.tile_m, item // c.tile_m % k_groups, item // (c.tile_m * k_groups)
            start = (work.begin % work.k_tiles + k_tile) * K_TILE
            token = cutlass.min(work.m_tile * c.tile_m + row, work.m - 1)
            left = work.blocks * c.operands.fmt.block_size - start
            words = self.activations.read(work.a, work.a_scale, token, start, left, k_group)
            self.activations.store(words, c.m_atoms, k_group, row, activations_at(c, k_tile, smem))
        if const_expr(not c.by_warp):
            # Fence the stores, because wgmma reads shared memory through the async proxy.
            fence_async()
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        ptx.arrive_if(smem.a_pipeline.full + cutlass.min(tid, k_tiles - 1), Uint32(tid < k_tiles))

    @cute.jit
    def rearrange(self, decoder, lane, work, smem):
        """Run decoder warp number ``decoder``: read activations from global memory, and write them rearranged to the
        stages.

        The decoder groups take turns at the k tiles that the consumers do not rearrange. The warps of a group take
        turns at groups of eight tokens.
        """
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        group, warp = decoder // c.a_full_arrivals, decoder % c.a_full_arrivals
        rows = min(c.tile_m, ATOM_M)
        for use in range(c.first_k_tiles + group, work.end - work.begin, c.decoder_groups):
            start = (work.begin % work.k_tiles + use) * K_TILE
            stage = use % c.a_stages
            base = activations_at(c, stage, smem)
            # Do not unroll this loop, because there are not enough registers.
            for step in cutlass.range(self.steps, unroll=1):
                items = [
                    ((atom * c.a_full_arrivals + warp) * ATOM_M + lane % rows, lane // rows + first, after)
                    for atom, first, after in self._k_groups_of(step)
                ]
                read = []
                for row, k_group, after in items:
                    # For a token that does not exist, read the last existing token. The results of the missing token
                    # are not stored.
                    token = cutlass.min(work.m_tile * c.tile_m + row, work.m - 1)
                    left = work.blocks * c.operands.fmt.block_size - start
                    read.append(self.activations.read(work.a, work.a_scale, token, start, left, k_group, after))
                if step == 0:
                    ptx.wait(smem.a_pipeline.empty + stage, (use // c.a_stages + 1) % 2)
                for (row, k_group, after), words in zip(items, read, strict=True):
                    self.activations.store(words, c.m_atoms, k_group + after, row, base)
            if const_expr(not c.by_warp):
                # Fence the stores, because wgmma reads shared memory through the async proxy.
                fence_async()
            cute.arch.sync_warp()
            ptx.arrive_if(smem.a_pipeline.full + stage, Uint32(lane == 0))

    def _k_groups_of(self, step) -> list[tuple]:
        """Return the k groups that a lane loads in a step, as a list of tuples.

        The first entry of a tuple is the index of a token group among the warp's token groups. The sum of the second
        and third entries is the index of the first lane's k group. The third entry is a compile-time constant.
        """
        width = self.activations.k_groups // self.each
        if self.together < self.each:  # only with gated activations and several warps per decoder group
            at = [step * self.together + i for i in range(self.together)]
            return [(i // self.each, i % self.each * width, 0) for i in at]
        groups = self.together // self.each
        return [(step * groups + i, 0, j * width) for i in range(groups) for j in range(self.each)]

    @cute.jit
    def _load_activations(self, k_tile, k_slice: int, stage, work, smem):
        """Start the copies that fill a stage of activations, starting with slice ``k_slice`` of a k tile.

        With experts, the stage of a k tile's last slice also receives the expert's factors.
        """
        c = self.config
        barrier = smem.a_pipeline.full + stage
        has_factors = c.expert_k is not None and k_slice + c.slices_per_stage == K_SLICES
        with cute.arch.elect_one():
            size = c.a_stage_bytes + (c.factor_bytes if has_factors else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            # In the layout for mma.sync, a k tile is contiguous in global memory. In the layout for wgmma, a slice is
            # contiguous.
            copies = 1 if c.by_warp else c.slices_per_stage
            size = c.a_stage_bytes // copies
            for i in range_constexpr(copies):
                at = (k_tile * K_SLICES + k_slice) // c.slices_per_stage * copies + i
                source = (Int64(at) * work.m_tiles + work.m_tile) * size
                target = stage * c.a_stage_bytes + i * size
                ptx.copy_bulk(
                    smem.activations + cute.assume(target, divby=ATOM_BYTES),
                    work.workspace.activations.iterator + cute.assume(source, divby=ATOM_BYTES),
                    size,
                    barrier,
                )
            if const_expr(has_factors):
                source = work.workspace.factors[None, k_tile // (c.expert_k // K_TILE), work.m_tile].iterator
                target = cute.assume(stage * c.factor_bytes, divby=4 * ATOM_M)
                ptx.copy_bulk(smem.factors + target, cute.recast_ptr(source, dtype=Uint8), c.factor_bytes, barrier)


class RowActivations(Activations):
    """Device code that rearranges one row of activations for ``mma.RowMma``. A k group is eight elements, half a block.

    A lane rearranges half a block, and the neighbouring lane rearranges the other half. A stage stores the two halves
    next to each other as float16. The elements are in the order in which the weight's codes are paired. If
    ``has_factors``, the float32 factors of the blocks are stored after the k tile.
    """

    def __init__(self, config: ActivationLayout):
        super().__init__(config, apart=1)
        self.k_groups = 2 * K_TILE_BLOCKS
        self.has_factors = self.a_dtype is not Float16 or config.prologue_quant is not None

    def read(self, a, scale, token, start, left, k_group, after: int = 0) -> list:
        """Load a k group for ``store``. ``Activations.read`` describes the arguments."""
        c, k = self.config, self.width(a)
        size = c.fmt.block_size
        exists = k_group * 8 < left
        offset = self.offset(a, token, k) + start + k_group * 8
        if c.layout is None:
            words = self.words(self.places(a, offset, k), exists)
            return words if scale is None else [*words, scale[0]]
        codes = ptx.load_if(a.iterator + cute.assume(offset // 2, divby=4), exists, 1)
        place = c.layout.row_offset(Int64(token), k // size) + c.layout.block_offset(start // size + k_group // 2)
        byte = ptx.load_narrow_if(cute.recast_ptr(scale.iterator, dtype=Uint8) + place, exists, 1)
        return [*codes, byte]

    def store(self, words: list, groups, k_group, token, base: cute.Pointer) -> None:
        """Convert a k group that ``read`` loaded, and store it in the stage at ``base``.

        All lanes of a warp call this method, with consecutive k groups.
        """
        factor, c = None, self.config
        if c.layout is not None or c.prologue_quant is not None:
            codes, factor = self._codes(words)
            words = float16_pairs(codes)
        else:
            words = self.gated(words)
            if self.has_factors:
                words, factor = self._in_range(words)
            words = pair_activations(words, Float16)
        to = cute.recast_ptr(base + cute.assume(k_group * 16, divby=16), dtype=Uint32)
        store_words(words, cute.make_tensor(to, cute.make_layout(4)))
        if factor is not None:
            self._store_factor(factor, k_group, base + ROW_BYTES)

    def _store_factor(self, factor: Float32, k_group, factors: cute.Pointer) -> None:
        at = factors + cute.assume(k_group // 2 * 4, divby=4)
        ptx.store_shared_if(at, ptx.bits_of(factor), k_group % 2 == 0)

    def _codes(self, words: list) -> tuple:
        """Return the lane's eight codes in a word, and the factor of their block. If needed, quantise the elements
        first."""
        codes, byte = words if self.config.prologue_quant is None else self.quantised(words)
        return codes, ptx.unpack_f16(ptx.f16x2_of_e4m3x2(byte), 0)

    def _in_range(self, words: list) -> tuple[list, Float32]:
        """Scale half a block of bfloat16 by a power of two so that it fits into float16's range, and convert it to
        float16.

        Return the converted words and the block's factor, a power of two that undoes the scaling. The factor also
        removes the power of two by which decoded codes are scaled (``CODE_EXPONENT``). The conversion is exact for
        elements of at least 2^-32 times the block's largest element. Smaller elements become multiples of 2^-40 times
        the largest element.
        """
        largest = Uint32(0)
        for word in words:
            for half in (word & Uint32(0x7FFF0000), (word << 16) & Uint32(0x7FFF0000)):
                largest = ptx.select(half > largest, half, largest)
        other = cute.arch.shuffle_sync_bfly(largest, 1)
        # Take the exponent field of fp32, and clamp it so that the multiplier and the factor are normal numbers.
        field = ptx.select(other > largest, other, largest) >> 23
        least, most = Uint32(1 + LARGEST_EXPONENT), Uint32(254)
        field = ptx.select(field < least, least, field)
        field = ptx.select(field > most, most, field)
        multiplier = ptx.float_of((Uint32(2 * 127 + LARGEST_EXPONENT) - field) << 23)
        factor = ptx.float_of((field - Uint32(LARGEST_EXPONENT - CODE_EXPONENT)) << 23)
        values = [ptx.mul_rn(value, multiplier) for value in unpack(words, BFloat16)]
        return pack(values, Float16), factor


class CodeActivations(RowActivations):
    """Device code that rearranges one row of FP4 activations for ``mma.CodeMma``. ``RowActivations`` describes the k
    groups.

    The activations are stored as the B operand: 8 columns by 128 elements of e4m3, with the 128-byte swizzle. The
    elements of a stage that are not written stay zero.
    """

    def store(self, words: list, groups, k_group, token, base: cute.Pointer) -> None:
        codes, factor = self._codes(words)
        quad, word = k_group // (HALVES * STEPS), k_group % (HALVES * STEPS)
        half, step = word // STEPS, word % STEPS
        column = quad * 2 + step // 2
        line = base + cute.assume(half * ATOM_BYTES + column * ATOM_ROW_BYTES + quad * 4, divby=4)
        for i, four in enumerate(e4m3_words(codes)):
            at = line + cute.assume(((step * 2 + i) ^ column) * 16, divby=16)
            cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1))[0] = four
        self._store_factor(factor, k_group, base + FACTORS_AT)
