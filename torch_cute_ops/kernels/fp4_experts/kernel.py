"""Device code of the FP4 GEMM over experts. The package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import biases_argument, factors_argument, load_terms
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import clear, load_words
from torch_cute_ops.kernels.common.core.pipeline import Pipeline, next_stage
from torch_cute_ops.kernels.common.experts.layouts import PAIR_BYTES
from torch_cute_ops.kernels.common.experts.work_tiles import ExpertMTiles, TokenLister, TokenLists
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.code_mma import CodeActivations, CodeTileMma
from torch_cute_ops.kernels.common.fp4.codes import operands_acc_scale, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M
from torch_cute_ops.kernels.common.fp4.mma import KTileMma
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_experts.accumulators import Accumulators, Smem, Work
from torch_cute_ops.kernels.fp4_experts.config import N_WARPS, TILE_N, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WARP = 32


class Consumer(NamedTuple):
    """A thread of a consumer warp.

    Attributes:
        lane, quad: index of the thread in its warp, and index among the four lanes that share a row.
        row: first of the lane's two rows of the n tile. The second is ``row + 8``.
        leads: 1 if this lane arrives at barriers for its warp, otherwise 0.
        chain_index: index of the warp in its chain. All warps with the same rows form a chain.
        pipeline, k_warp: index of the warp's pipeline, and index among the warps that divide the k of the same rows.
        turn_chain: mbarriers that order the turns of the chain's warps.
    """

    lane: Int32
    quad: Int32
    row: Int32
    leads: Uint32
    chain_index: Int32
    pipeline: Int32
    k_warp: Int32
    turn_chain: cute.Pointer


class FP4ExpertsKernel:
    """Two kernels, compiled for a ``Config``: the first lists tokens, the second multiplies."""

    def __init__(self, config: Config):
        self.config = config
        self.accumulators = Accumulators(config)
        self.weight = WeightStages(config.weight_tile, config.stages)
        by_codes, arranged = config.operands.by_codes, config.arranged
        self.activations = CodeActivations(arranged) if by_codes else Activations(arranged, config.spread)
        self.lister = TokenLister(config.lists, self.activations)
        self.m_tiles = ExpertMTiles(
            *(config.max_experts, config.token_block, config.tile_m, config.classes),
            is_short_of_registers=not config.has_wgmma,
        )
        if by_codes:
            self.mma = CodeTileMma(self.weight, arranged, config.tile_m, config.expert_k)
        else:
            self.mma = KTileMma(self.weight, arranged, config.tile_m, config.stages, config.expert_k)

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        a, a_scale = self.activations.arguments()
        b, b_scale = self.weight.arguments(n)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            alpha=factors_argument(m),
            bias=biases_argument(self.config.bias_dtype, n),
            out=TensorArg(self.accumulators.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            num_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, workspace, num_ctas: Int32, stream):
        c = self.config
        num_blocks = cute.ceil_div(out.shape[0], c.token_block)
        experts = alpha.shape[1]
        # ``Config.workspace_bytes`` computes the size of this layout.
        arranged, pairs, after = self.lister.workspace_tensors(workspace.iterator, num_blocks, experts)
        partial_sums = None
        if const_expr(c.classes > 1):
            sum_bytes = Int64(num_blocks) * num_ctas * c.acc_bytes
            sums = cute.make_tensor(after, cute.make_layout((sum_bytes,)))
            after = after + cute.assume(sum_bytes, divby=TILE_N * 4)
            flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((num_blocks * num_ctas,)))
            partial_sums = sums, flags
            after = after + num_blocks * num_ctas * 4
        counts = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((num_blocks * experts,)))
        lists = TokenLists(arranged, pairs, counts)
        listed = ctas_unless_overlapping(experts, (out, workspace), (a, a_scale, b, b_scale, alpha, bias))
        a_scale = scale_matrix(a_scale, c.operands.a_layout)
        self.list_kernel(a, a_scale, alpha, lists, partial_sums, out.shape[0]).launch(
            grid=[listed, num_blocks, 1], block=[c.lists.threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        self.kernel(self.weight.maps(b, b_scale, experts), alpha, bias, lists, partial_sums, out).launch(
            grid=[num_ctas, num_blocks, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, alpha, lists, partial_sums, m):
        """List the tokens of a token block that are routed to one expert, with their factors, and rearrange the listed
        tokens' activations."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        expert, block_index, _ = cute.arch.block_idx()
        experts, _, _ = cute.arch.grid_dim()
        # Let the next kernel, the GEMM, start early: before it waits for this kernel, it reads only weights and
        # factors.
        pdl_start(c.pdl)
        if const_expr(c.classes > 1):
            flags = partial_sums[1]
            ctas = experts * cute.arch.grid_dim()[1]
            for i in range(
                (block_index * experts + expert) * c.lists.threads + tid, flags.shape[0], ctas * c.lists.threads
            ):
                flags[i] = Int32(0)
        token_ids, num_tokens = self.lister.list_tokens(
            alpha, lists, block_index, expert, experts, m, self.accumulators.token_offset
        )
        entry = self.lister.entry(block_index, expert, experts)
        first_token, first_k = block_index * c.token_block, expert * c.expert_k
        self.lister.arrange(
            a,
            a_scale,
            token_ids,
            num_tokens,
            lists.activations,
            entry,
            first_token,
            first_k,
            c.expert_k,
            0,
            c.expert_k_tiles,
        )

    # GEMM

    @cute.kernel
    def kernel(self, weight, alpha, bias, lists, partial_sums, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, block_index, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        n_tiles, begins, ends = self._classes_of_cta(cta, num_ctas, out.shape[1])
        work = Work(
            m=out.shape[0],
            n=out.shape[1],
            cta=cta,
            num_ctas=num_ctas,
            block_index=block_index,
            first_token=block_index * c.token_block,
            experts=alpha.shape[1],
            lists=lists,
            partial_sums=partial_sums,
            bias=bias,
            out=out,
            n_tiles=n_tiles,
            begins=begins,
            ends=ends,
        )
        smem = self._allocate()
        if tid == 0:
            # A stage is full after two arrivals: one for the weight, and one for the activations and pairs of words.
            smem.pipeline.init(full=2, empty=N_WARPS * c.k_warps)
            for i in range_constexpr(c.consumer_warps):
                cute.arch.mbarrier_init(smem.turns + i, 1)
        cute.arch.mbarrier_init_fence()
        # Zero the accumulators, and also the activations: an m tile with few tokens fills only some rows of a stage,
        # but the MMAs read all rows.
        clear(smem.acc, c.acc_bytes + c.stages * self.mma.activation_bytes, tid, c.threads)
        self.m_tiles.list_in_cta(
            alpha,
            lists.counts,
            block_index,
            work.m,
            tid,
            warp,
            c.consumer_warps,
            c.threads,
            (begins, ends),
            smem.m_tiles,
            waits=c.pdl and not c.scans,
        )
        work = work._replace(m_tiles=smem.m_tiles.num_m_tiles[0], first_m_tiles=smem.m_tiles.num_first[0])
        if warp >= c.consumer_warps:
            if const_expr(c.registers is not None):
                cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < c.consumer_warps + c.pipelines:
                self._produce(warp - c.consumer_warps, self.weight.open(weight, smem.codes, smem.scales), work, smem)
        else:
            if const_expr(c.registers is not None):
                cute.arch.setmaxregister_increase(c.registers[0])
            self._consume(warp, tid, work, smem)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        scales = base + c.stages * self.weight.code_bytes
        acc = scales + c.stages * self.weight.scale_bytes
        activations = acc + c.acc_bytes
        pairs = activations + c.stages * self.mma.activation_bytes
        m_tiles, end = self.m_tiles.lists(pairs + c.stages * c.tile_m * PAIR_BYTES)
        barriers = cute.recast_ptr(end, dtype=Int64)
        return Smem(
            codes=base,
            scales=scales,
            acc=acc,
            activations=activations,
            pairs=pairs,
            m_tiles=m_tiles,
            pipeline=Pipeline.at(barriers, c.stages),
            turns=barriers + 2 * c.stages,
        )

    def _classes_of_cta(self, cta, num_ctas, n) -> tuple[tuple, tuple, tuple]:
        """Return the fields ``n_tiles``, ``begins`` and ``ends`` of a CTA's ``Work``."""
        c = self.config
        if c.classes == 1:
            return (cta, cta), (Int32(0), Int32(1)), (Int32(1), Int32(1))
        work_tiles = cute.ceil_div(n, TILE_N) * c.classes
        begin, end = cta * work_tiles // num_ctas, (cta + 1) * work_tiles // num_ctas
        first, last = begin // c.classes, (end - 1) // c.classes
        at = last * c.classes
        begins = cutlass.max(begin - at, Int32(0)), ptx.select(first < last, begin - first * c.classes, Int32(0))
        ends = end - at, ptx.select(first < last, Int32(c.classes), Int32(0))
        return (last, first), begins, ends

    # Each pipeline has its own stages and producer warp. Therefore a producer may wait for its stages in their order
    # without delaying other pipelines.

    @cute.jit
    def _produce(self, pipeline, weight, work, smem):
        """Run a producer warp, which fills the stages of one pipeline.

        If the CTA scans the factors itself, this warp copies the first k tiles of the weight before the kernel that
        lists tokens ends.
        """
        c = self.config
        depth = c.stages // c.pipelines
        first = pipeline * depth
        loaded = Int32(0)
        if const_expr(c.pdl and c.scans):
            ahead, of = pipeline, Int32(0)
            while (ahead < work.m_tiles) & (loaded < depth):
                of = self.m_tiles.index_of(ahead, of, smem.m_tiles)
                for i in range(cutlass.min(c.expert_k_tiles, depth - loaded)):
                    self._load_weight(of, ahead, i, first + loaded, weight, work, smem)
                    loaded += 1
                ahead += c.pipelines
            cute.arch.griddepcontrol_wait()
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        done, index = Int32(0), Int32(0)
        for m_tile in range(pipeline, work.m_tiles, c.pipelines):
            index = self.m_tiles.index_of(m_tile, index, smem.m_tiles)
            for k_tile in range(c.expert_k_tiles):
                if done >= loaded:
                    smem.pipeline.wait_empty(first + stage, parity)
                    self._load_weight(index, m_tile, k_tile, first + stage, weight, work, smem)
                self._load_tokens(index, m_tile, k_tile, first + stage, work, smem)
                done += 1
                stage, parity = next_stage(stage, parity, depth)

    def _n_tile_of(self, m_tile, work):
        """Return the index of the n tile that ``m_tile``, one of the CTA's m tiles, belongs to."""
        return work.n_tiles[0] if self.config.classes == 1 else ptx.select(m_tile < work.first_m_tiles, *work.n_tiles)

    def _load_weight(self, index, m_tile, k_tile, stage, weight, work, smem) -> None:
        """Start the copies of the weight's codes and scales for one k tile."""
        expert = smem.m_tiles.experts[index]
        blocks = self.config.expert_k // self.config.operands.fmt.block_size
        self.weight.load(
            self._n_tile_of(m_tile, work),
            k_tile,
            expert,
            stage,
            smem.pipeline.full + stage,
            weight,
            work.n,
            Int32(blocks),
        )

    @cute.jit
    def _load_tokens(self, index, m_tile, k_tile, stage, work, smem):
        """Start the copies of an m tile's activations for one k tile, and of the tokens' pairs of words."""
        c = self.config
        m_tiles = smem.m_tiles
        position = (m_tile - m_tiles.begins[index]) * c.tile_m
        entry = self.lister.entry(work.block_index, m_tiles.experts[index], work.experts)
        tokens = cutlass.min(m_tiles.counts[index] - position, Int32(c.tile_m))
        target = smem.activations + cute.assume(stage * self.mma.activation_bytes, divby=self.mma.activation_bytes)
        pairs = c.tile_m * PAIR_BYTES
        barrier = smem.pipeline.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tokens * self.lister.token_bytes + pairs)
            self.lister.copy_m_tile(work.lists.activations, entry, k_tile, position, tokens, target, barrier)
            ptx.copy_bulk(
                smem.pairs + cute.assume(stage * pairs, divby=16),
                work.lists.pairs.iterator + cute.assume((entry + position) * PAIR_BYTES, divby=16),
                pairs,
                barrier,
            )

    @cute.jit
    def _consume(self, warp, tid, work, smem):
        """Run a consumer warp, which computes 16 rows of every m tile of its pipeline."""
        c = self.config
        # All warps of a chain run on the same scheduler of the SM, but they are at different positions in their m
        # tiles.
        chain_index, n_warp = warp // N_WARPS, warp % N_WARPS
        lane = tid % WARP
        consumer = Consumer(
            lane=lane,
            quad=lane % 4,
            row=n_warp * 16 + lane // 4,
            leads=Uint32(lane == 0),
            chain_index=chain_index,
            pipeline=chain_index // c.k_warps,
            k_warp=chain_index % c.k_warps,
            turn_chain=smem.turns + n_warp * c.chain_warps,
        )
        state = Int32(0), Int32(0), Int32(chain_index == 0)
        state = self._consume_m_tiles(
            consumer.pipeline, work.first_m_tiles, work.n_tiles[0], state, consumer, work, smem
        )
        self.accumulators.finish_n_tile(0, tid, work, smem)
        if const_expr(c.classes > 1):
            if work.ends[1] > 0:
                begin = (
                    consumer.pipeline
                    + (work.first_m_tiles - consumer.pipeline + c.pipelines - 1) // c.pipelines * c.pipelines
                )
                self._consume_m_tiles(begin, work.m_tiles, work.n_tiles[1], state, consumer, work, smem)
                self.accumulators.finish_n_tile(1, tid, work, smem)

    @cute.jit
    def _consume_m_tiles(self, begin, end, n_tile, state, consumer, work, smem):
        """For one n tile, compute the m tiles ``begin`` to ``end`` (exclusive) that belong to this warp's pipeline.

        ``state`` is (stage, parity of the stage, parity of the warp's turn).

        Returns:
            Next state.
        """
        c = self.config
        depth = c.stages // c.pipelines
        first = consumer.pipeline * depth
        # A scale tile spans 128 rows, which are two n tiles.
        scale_row = consumer.row if c.operands.layout.is_linear else consumer.row + n_tile % 2 * TILE_N
        acc = cute.make_rmem_tensor((c.tile_m // 2,), Float32)
        start = self.mma.start_of(smem.activations)
        index = Int32(0)
        stage, parity, turn = state
        for m_tile in range(begin, end, c.pipelines):
            bias = phase = None
            if const_expr(c.bias_dtype is not None or c.spread):
                index = self.m_tiles.index_of(m_tile, index, smem.m_tiles)
                expert = smem.m_tiles.experts[index]
                if const_expr(c.bias_dtype is not None):
                    bias = self._bias(expert, n_tile, consumer, work)
                if const_expr(c.spread):
                    phase = expert % 2
            if const_expr(c.by_warp):
                acc.fill(0.0)
            last = stage
            for k_tile in range(c.expert_k_tiles):
                smem.pipeline.wait_full(first + stage, parity)
                if const_expr(c.k_warps == 1):
                    self._multiply_k_tile(
                        start, 0, k_tile, first + stage, first + last, scale_row, phase, acc, consumer, smem
                    )
                elif const_expr(not c.has_wgmma):
                    at = first + stage, first + last
                    self._multiply_k_tile(start, consumer.k_warp, k_tile, *at, scale_row, phase, acc, consumer, smem)
                else:
                    for k_warp in range_constexpr(c.k_warps):
                        if consumer.k_warp == k_warp:
                            self._multiply_k_tile(
                                start,
                                k_warp,
                                k_tile,
                                first + stage,
                                first + last,
                                scale_row,
                                phase,
                                acc,
                                consumer,
                                smem,
                            )
                last = stage
                stage, parity = next_stage(stage, parity, depth)
                if const_expr(c.by_warp):
                    if k_tile + 1 < c.expert_k_tiles:
                        smem.pipeline.release(first + last, consumer.leads)
            if const_expr(not c.by_warp):
                warpgroup.wait_group(0)
            offsets, factors = self._pairs(first + last, consumer, smem)
            smem.pipeline.release(first + last, consumer.leads)
            # Wait until the previous warp of the chain has added its products: the previous part of k, or the previous
            # m tile.
            if (m_tile > 0) | (consumer.k_warp > 0):
                ptx.wait(consumer.turn_chain + consumer.chain_index, turn)
            turn ^= 1
            self._add_to_token_block(acc, offsets, factors, bias, consumer, smem)
            cute.arch.sync_warp()
            ptx.arrive_if(consumer.turn_chain + (consumer.chain_index + 1) % c.chain_warps, consumer.leads)
        return stage, parity, turn

    def _multiply_k_tile(self, start, k_warp, k_tile, stage, before, scale_row, phase, acc, consumer, smem) -> None:
        """Multiply a k tile, add the products to the accumulators, and release ``before``, the stage of the previous k
        tile.

        If several warps divide k, each multiplies only some of each lane's codes.
        """
        c = self.config
        rows = [(stage, consumer.row + 8 * r, scale_row + 8 * r) for r in range(2)]

        def release_previous() -> None:
            smem.pipeline.release(before, consumer.leads, k_tile > 0)

        on_done = release_previous if c.expert_k_tiles > 1 else None
        self.mma.multiply(
            start, k_warp, c.k_warps, k_tile, stage, k_tile > 0, rows, consumer.lane, acc, smem, on_done, phase
        )

    # Accumulators

    def _bias(self, expert, n_tile, consumer, work) -> list:
        """Return an expert's bias for the lane's two weight rows. If several warps divide k, the bias is zero except in
        the first warp."""
        n = n_tile * TILE_N + consumer.row
        return [
            load_terms(work.bias, expert, n, 8 * r, 1, (n + 8 * r < work.n) & (consumer.k_warp == 0))[0]
            for r in range(2)
        ]

    def _pairs(self, stage, consumer, smem) -> tuple[list, list]:
        """Return the offsets of the accumulators and the factors of a lane's tokens. The offset of a missing token is
        negative."""
        c = self.config
        offsets, factors = [], []
        for group in range(c.tile_m // ATOM_M):
            at = stage * (c.tile_m * PAIR_BYTES) + (group * ATOM_M + consumer.quad * 2) * PAIR_BYTES
            words = cute.recast_ptr(smem.pairs + cute.assume(at, divby=16), dtype=Uint32)
            loaded = load_words(cute.make_tensor(words, cute.make_layout(4)))
            offsets += [Int32(loaded[0]), Int32(loaded[2])]
            factors += [ptx.float_of(loaded[1]), ptx.float_of(loaded[3])]
        return offsets, factors

    @cute.jit
    def _add_to_token_block(self, acc, offsets, factors, bias, consumer, smem):
        """Finish a work tile: add the bias of the lane's two weight rows to ``acc``, multiply by the factors, and add
        the products to the token block's accumulators."""
        c = self.config
        scale = Float32(operands_acc_scale(c.operands))
        positions = [(i, r) for i in range(c.tile_m // 4) for r in range(2)]
        at = [smem.acc + self.accumulators.acc_offset(offsets[i], consumer.row + 8 * r) for i, r in positions]
        # Start all loads before the first store, so that their latencies overlap.
        sums_before = [
            ptx.float_of(ptx.load_shared_if(x, offsets[i] >= 0)) for x, (i, _) in zip(at, positions, strict=True)
        ]
        for x, total, (i, r) in zip(at, sums_before, positions, strict=True):
            own = ptx.mul_rn(acc[i // 2 * 4 + r * 2 + i % 2], scale)
            if const_expr(bias is not None):
                own = ptx.add_rn(own, bias[r])
            total = ptx.fma_rn(factors[i], own, total)
            ptx.store_shared_if(x, ptx.bits_of(total), offsets[i] >= 0)
