"""Device code of the FP4 GEMM over experts with a gate. The package's docstring describes the roles and the data
path."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import factor_counts, factors_argument
from torch_cute_ops.kernels.common.core.launch import ctas_if_adjacent, ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import clear, load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import Pipeline, fence_async, next_stage
from torch_cute_ops.kernels.common.experts.gated import Outputs
from torch_cute_ops.kernels.common.experts.work_tiles import ExpertMTiles, MTileLists, TokenLister, TokenLists
from torch_cute_ops.kernels.common.fp4.activations import QUAD, Activations
from torch_cute_ops.kernels.common.fp4.code_mma import CodeActivations, CodeTileMma
from torch_cute_ops.kernels.common.fp4.codes import scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M, SCALE_TILE_ROWS
from torch_cute_ops.kernels.common.fp4.mma import KTileMma
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_gated_experts.config import (
    MAX_LIST_CTAS,
    PIECES_PER_THREAD,
    TOKEN_GAP_BYTES,
    Arguments,
    Config,
)
from torch_cute_ops.kernels.fp4_gated_experts.epilogue import WorkTileEpilogue
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WARP = 32


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    Attributes:
        m, n: number of rows of the activations, and number of rows of the weight.
        cta, num_ctas: index of the CTA among the CTAs of its token block, and number of these CTAs.
        siblings: number of neighbouring CTAs that compute n tiles with common scale tiles at the same time.
        block_index: index of the token block.
        experts, width: number of experts, and number of an expert's columns in the result.
        routing: (M, E) float32, nonzero for routed pairs.
        lists: lists of routed tokens, which the first kernel wrote.
        outputs: tensors of the epilogue.
        n_tiles: number of n tiles of an expert.
        partial_sums: (partial sums of CTAs, flags), or None if ``split_k`` is 1.
        begin, end: range of parts of k that the CTA and its siblings compute, counted over all work tiles.
    """

    m: Int32
    n: Int32
    cta: Int32
    num_ctas: Int32
    block_index: Int32
    experts: Int32
    width: Int32
    routing: cute.Tensor
    lists: TokenLists
    outputs: Outputs
    n_tiles: Int32
    siblings: Int32
    partial_sums: tuple | None
    begin: Int32 | None = None
    end: Int32 | None = None


@dataclass(frozen=True)
class Smem:
    """Shared memory of a CTA.

    Attributes:
        codes, scales: codes and scales of the weight in the stages. Gate and up alternate.
        activations: activations in the stages.
        acc: accumulators of a work tile.
        values: results of a work tile.
        m_tiles: lists of m tiles.
        pipeline: barriers of all stages.
        turns: mbarriers, one per consumer warp. A warp's mbarrier completes when the warp may add its accumulators.
    """

    codes: cute.Pointer
    activations: cute.Pointer
    scales: cute.Pointer
    acc: cute.Pointer
    values: cute.Pointer
    m_tiles: MTileLists
    pipeline: Pipeline
    turns: cute.Pointer


class WorkTile(NamedTuple):
    """Unit of scheduling: an m tile, an n tile, and the parts of k that this CTA computes, ``k_begin`` to ``k_end``
    (exclusive)."""

    m_tile: Int32
    n_tile: Int32
    k_begin: Int32
    k_end: Int32


class Consumer(NamedTuple):
    """A thread of a consumer warp.

    Attributes:
        lane: index of the thread in its warp.
        leads: 1 if this lane arrives at barriers for its warp, otherwise 0.
        pipeline, n_warp: pipeline of the warp, and index among the warps that divide the rows of an n tile.
        column: column of the lane in the n tile.
        is_last: True if the warp is the last of its chain and therefore runs the epilogue.
    """

    lane: Int32
    leads: Uint32
    pipeline: Int32
    n_warp: Int32
    column: Int32
    is_last: Boolean


class FP4GatedExpertsKernel:
    """Two kernels, compiled for a ``Config``: the first lists tokens, the second multiplies."""

    def __init__(self, config: Config):
        self.config = config
        self.weight = WeightStages(config.weight_tile, 2 * config.stages)
        by_codes, arranged = config.operands.by_codes, config.arranged
        self.activations = CodeActivations(arranged) if by_codes else Activations(arranged)
        self.lister = TokenLister(config.lists, self.activations)
        self.m_tiles = ExpertMTiles(
            config.max_experts, config.token_block, config.tile_m, is_short_of_registers=not config.has_wgmma
        )
        # Number of k tiles to unroll; -1 lets the compiler choose. Multiplying codes takes few instructions, so the
        # compiler would unroll several k tiles, and registers would spill.
        self.unroll = 1 if by_codes else -1
        if by_codes:
            self.mma = CodeTileMma(self.weight, arranged, config.tile_m, config.k)
        else:
            self.mma = KTileMma(self.weight, arranged, config.tile_m, config.stages, config.k, config.token_pitch)
        self.epilogue = WorkTileEpilogue(config)

    def arguments(self) -> Arguments:
        m, experts, rows = Dim("m"), Dim("experts"), Dim("rows", divisibility=128)
        a, a_scale = self.activations.arguments()
        half, blocks = Dim("k_bytes", divisibility=16), Dim("blocks", divisibility=16)
        b = TensorArg("Uint8", (experts, half, rows), (Dim("b_stride", 16, bits=64), 1, half), align=16)
        _, b_scale = self.weight.arguments(rows)
        if self.config.operands.layout.is_linear:
            strides = Dim("b_scale_stride", 16, bits=64), blocks, 1
            b_scale = TensorArg(b_scale.dtype, (experts, rows, blocks), strides, align=16)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            routing=factors_argument(m),
            workspace=TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            num_ctas=ScalarArg("Int32"),
            **self.epilogue.arguments(m, experts, rows),
        )

    @cute.jit
    def __call__(
        self,
        a,
        a_scale,
        b,
        b_scale,
        routing,
        alpha,
        bias,
        global_scale,
        row_scale,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        y,
        scale,
        workspace,
        num_ctas: Int32,
        stream,
    ):
        c = self.config
        num_blocks = cute.ceil_div(a.shape[0], c.token_block)
        experts = routing.shape[1]
        m = a.shape[0]
        # ``Config.workspace_bytes`` computes the size of this layout.
        row_bytes = c.k_tiles * self.lister.token_bytes
        arranged = cute.make_tensor(workspace.iterator, cute.make_layout((m, row_bytes), stride=(row_bytes, 1)))
        after = workspace.iterator + cute.assume(Int64(m) * row_bytes, divby=row_bytes)
        pairs = counts = partial_sums = None
        if const_expr(not c.scans):
            _, pairs, after = self.lister.workspace_tensors(after, num_blocks, experts)
        if const_expr(c.split_k > 1):
            size = Int64(num_blocks * num_ctas) * c.acc_bytes
            partial_sums = cute.make_tensor(after, cute.make_layout((size,)))
            after = after + cute.assume(size, divby=16)
        words = cute.recast_ptr(after, dtype=Int32)
        if const_expr(not c.scans):
            counts = cute.make_tensor(words, cute.make_layout((num_blocks * experts,)))
            words = words + num_blocks * experts
        if const_expr(c.split_k > 1):
            partial_sums = partial_sums, cute.make_tensor(words, cute.make_layout((num_blocks * num_ctas * c.n_warps,)))
        lists = TokenLists(arranged, pairs, counts)
        pieces = Int64(m) * (c.k_tiles * self.activations.k_groups)
        if const_expr(c.scans):
            grid = cute.ceil_div(Int32(pieces), c.lists.threads), Int32(1), Int32(1)
        else:
            threads = Int64(experts) * num_blocks * (c.lists.threads * PIECES_PER_THREAD)
            list_ctas = Int32(cutlass.min((pieces + threads - 1) // threads, Int64(MAX_LIST_CTAS)))
            grid = experts, num_blocks, list_ctas
        gate = (swiglu_alpha, swiglu_beta, swiglu_limit) if const_expr(c.epilogue.has_gate_parameters) else None
        terms = alpha, bias, global_scale, row_scale
        outputs = Outputs(*terms, y, scale_matrix(scale, c.epilogue.out_layout), gate)
        read = a, a_scale, b, b_scale, routing, *terms
        listed = ctas_unless_overlapping(grid[0], (y, scale, workspace), read)
        stacks = (b, b_scale) if const_expr(c.operands.layout.is_linear) else (b,)
        listed = ctas_if_adjacent(listed, *stacks)
        a_scale = scale_matrix(a_scale, c.operands.a_layout)
        self.list_kernel(a, a_scale, routing, lists, partial_sums).launch(
            grid=[listed, *grid[1:]], block=[c.lists.threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        self.kernel(self._weight_maps(b, b_scale), routing, lists, partial_sums, outputs).launch(
            grid=[num_ctas, num_blocks, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    def _weight_maps(self, b, b_scale) -> tuple:
        """Return TMA descriptors of the weight and its scales, which treat the rows of all experts as one matrix."""
        experts, half, rows = b.shape
        b = cute.make_tensor(b.iterator, cute.make_layout((half, experts * rows), stride=(1, half)))
        if self.config.operands.layout.is_linear:
            blocks = b_scale.shape[2]
            matrix = cute.make_layout((experts * rows, blocks), stride=(blocks, 1))
            b_scale = cute.make_tensor(b_scale.iterator, matrix)
        return self.weight.maps(b, b_scale)

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, routing, lists, partial_sums):
        """List the tokens of a token block that are routed to one expert, rearrange activations, and clear the flags of
        the partial sums."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        expert, block_index, list_cta = cute.arch.block_idx()
        experts, num_blocks, list_ctas = cute.arch.grid_dim()
        m = a.shape[0]
        # Let the next kernel, the GEMM, start early: before it waits for this kernel, it reads only weights and the
        # routing.
        pdl_start(c.pdl)
        thread = ((list_cta * num_blocks + block_index) * experts + expert) * c.lists.threads + tid
        threads = experts * num_blocks * list_ctas * c.lists.threads
        if const_expr(partial_sums is not None):
            flags = partial_sums[1]
            for i in range(thread, flags.shape[0], threads):
                flags[i] = Int32(0)
        pieces = self.activations.k_groups
        for i in range(thread, m * (c.k_tiles * pieces), threads):
            piece, k_tile, token = i % pieces, i // pieces % c.k_tiles, i // (pieces * c.k_tiles)
            start = k_tile * c.k_tile
            words = self.activations.read(a, a_scale, token, start, c.k - start, piece)
            self.activations.store_row(words, piece, self._row_at(lists.activations, token, k_tile))
        if const_expr(not c.scans):
            first_token = block_index * c.token_block
            # If an expert has several CTAs, they all write the same list. This is harmless.
            self.lister.list_tokens(routing, lists, block_index, expert, experts, m, lambda token: first_token + token)

    def _row_at(self, arranged, token, k_tile) -> cute.Pointer:
        """Return the workspace address of a token's rearranged activations in one k tile."""
        at = Int64(token) * self.config.k_tiles + k_tile
        return arranged.iterator + cute.assume(at * self.lister.token_bytes, divby=self.lister.token_bytes)

    # GEMM

    @cute.kernel
    def kernel(self, weight, routing, lists, partial_sums, outputs):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, block_index, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        experts = routing.shape[1]
        width = self._width(outputs.y, experts)
        n_tiles = width // c.out_columns
        siblings = Int32(max(1, SCALE_TILE_ROWS // c.out_columns))
        siblings = ptx.select((n_tiles % siblings == 0) & (num_ctas % siblings == 0), siblings, Int32(1))
        work = Work(
            m=routing.shape[0],
            n=experts * width * 2,
            cta=cta,
            num_ctas=num_ctas,
            block_index=block_index,
            experts=experts,
            width=width,
            routing=routing,
            lists=lists,
            outputs=outputs,
            n_tiles=n_tiles,
            siblings=siblings,
            partial_sums=partial_sums,
        )
        smem = self._allocate()
        if tid == 0:
            # A stage is full after three arrivals: one for the weight of gate, one for the weight of up, and one for
            # the activations.
            smem.pipeline.init(full=3, empty=c.n_warps)
            for i in range_constexpr(c.consumer_warps):
                cute.arch.mbarrier_init(smem.turns + i, 1)
                if const_expr(c.pipelines > 1 and i % c.pipelines == 0):
                    # The first warp of a chain must not wait for its first turn.
                    cute.arch.mbarrier_arrive(smem.turns + i)
        cute.arch.mbarrier_init_fence()
        # Zero the activations: an m tile with few tokens fills only some rows of a stage, but the MMAs read all rows.
        clear(smem.activations, c.stages * self.mma.activation_bytes, tid, c.threads)
        self.m_tiles.list_in_cta(
            routing,
            lists.counts,
            block_index,
            work.m,
            tid,
            warp,
            c.consumer_warps,
            c.threads,
            (None, None),
            smem.m_tiles,
            waits=c.pdl and not c.scans,
        )
        if const_expr(not c.has_wgmma):
            # While the m tiles are listed, registers are short. So compute ``width`` again instead of keeping it in a
            # register.
            work = work._replace(width=self._width(outputs.y, ptx.opaque(experts)))
        # Of the CTAs that share a work tile, a CTA with a lower index computes earlier parts of k, and computes these
        # parts before its other work. Therefore a CTA waits only for CTAs with lower indices.
        num_k_splits = smem.m_tiles.num_m_tiles[0] * (n_tiles // siblings) * c.split_k
        sibling_groups = num_ctas // siblings
        order = sibling_groups - 1 - cta // siblings
        each, more = num_k_splits // sibling_groups, num_k_splits % sibling_groups
        begin = order * each + cutlass.min(order, more)
        work = work._replace(begin=begin, end=begin + each + Int32(order < more))
        if warp >= c.consumer_warps:
            if const_expr(c.registers is not None):
                cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < c.consumer_warps + c.pipelines:
                self._produce(warp - c.consumer_warps, self.weight.open(weight, smem.codes, smem.scales), work, smem)
        else:
            if const_expr(c.registers is not None):
                cute.arch.setmaxregister_increase(c.registers[0])
            if const_expr(self.epilogue.is_fp4 and not c.epilogue.out_layout.is_linear):
                # Clear the padding while the first k tiles are in flight, without a wait. Early writes are safe: only
                # this kernel accesses the padding, and all kernels before this op's first kernel have ended.
                _, num_blocks, _ = cute.arch.grid_dim()
                threads, grid_cta = Int32(c.consumer_warps * WARP), block_index * num_ctas + cta
                self.epilogue.clear_padding(outputs, work.m, grid_cta * threads + tid, num_blocks * num_ctas * threads)
            self._consume(warp, tid, work, smem)

    def _width(self, y, experts):
        """Return the number of an expert's columns in the result ``y``."""
        return y.shape[1] * (2 if self.epilogue.is_fp4 else 1) // experts

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        activations = base + 2 * c.stages * self.weight.code_bytes
        scales = activations + c.stages * self.mma.activation_bytes
        acc = scales + 2 * c.stages * self.weight.scale_bytes
        values = acc + c.smem_acc_bytes
        m_tiles, end = self.m_tiles.lists(values + c.value_bytes)
        barriers = cute.recast_ptr(end, dtype=Int64)
        return Smem(
            codes=base,
            activations=activations,
            scales=scales,
            acc=acc,
            values=values,
            m_tiles=m_tiles,
            pipeline=Pipeline.at(barriers, c.stages),
            turns=barriers + 2 * c.stages,
        )

    # Pipeline p multiplies k tiles p, p + pipelines, ... of every work tile.

    def _work_tiles(self, work) -> tuple:
        """Return the index of the CTA's first work tile, and the index after its last work tile, for ``_work_tile``."""
        split_k = self.config.split_k
        return work.begin // split_k, ptx.select(work.begin < work.end, (work.end + split_k - 1) // split_k, Int32(0))

    def _work_tile(self, index, work) -> WorkTile:
        """Return the work tile with index ``index`` among the work tiles of the CTA and its siblings."""
        split_k = self.config.split_k
        groups = work.n_tiles // work.siblings
        m_tile, n_tile = index // groups, index % groups * work.siblings + work.cta % work.siblings
        if split_k == 1:
            return WorkTile(m_tile, n_tile, Int32(0), Int32(1))
        first = split_k - cutlass.min(work.end - index * split_k, Int32(split_k))
        last = split_k - cutlass.max(work.begin - index * split_k, Int32(0))
        return WorkTile(m_tile, n_tile, first, last)

    def _k_tiles(self, first, last, pipeline) -> tuple:
        """Return the range of k tiles in the parts ``first`` to ``last`` (exclusive) of k. The range begins with the
        first k tile that belongs to ``pipeline``."""
        c = self.config
        begin, end = (k_split * c.k_tiles // c.split_k for k_split in (first, last))
        return begin + (pipeline + c.k_tiles * c.pipelines - begin) % c.pipelines, end

    @cute.jit
    def _produce(self, pipeline, weight, work, smem):
        """Run a producer warp, which fills the stages of one pipeline.

        If the CTA scans the routing itself, this warp copies the first k tiles of the weight before the first kernel
        ends.
        """
        c = self.config
        depth = c.stages // c.pipelines
        first = pipeline * depth
        loaded = Int32(0)
        if const_expr(c.pdl and c.scans):
            ahead, end_tile = self._work_tiles(work)
            of = Int32(0)
            while (ahead < end_tile) & (loaded < depth):
                work_tile = self._work_tile(ahead, work)
                of = self.m_tiles.index_of(work_tile.m_tile, of, smem.m_tiles)
                begin, end = self._k_tiles(work_tile.k_begin, work_tile.k_end, pipeline)
                for k_tile in range(begin, end, c.pipelines):
                    if loaded < depth:
                        self._load_weight(of, work_tile, k_tile, first + loaded, weight, work, smem)
                        loaded += 1
                ahead += 1
            cute.arch.griddepcontrol_wait()
        lane = cute.arch.lane_idx()
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        issued, signalled, index = Int32(0), Int32(0), Int32(0)
        first_tile, end_tile = self._work_tiles(work)
        for tile_index in range(first_tile, end_tile):
            work_tile, m_tiles = self._work_tile(tile_index, work), smem.m_tiles
            index = self.m_tiles.index_of(work_tile.m_tile, index, m_tiles)
            position = (work_tile.m_tile - m_tiles.begins[index]) * c.tile_m
            tokens = cutlass.min(m_tiles.counts[index] - position, Int32(c.tile_m))
            token_word = self._load_token_word(work, m_tiles.experts[index], position, lane, lane < tokens)
            token = self._token_from_word(token_word, work, position, lane)
            own = None
            if const_expr(not c.by_warp):
                # Four lanes copy one token, so a warp copies eight tokens at a time. Replace the index of a missing
                # token by the index of an existing token.
                own = [
                    cute.arch.shuffle_sync(token, cutlass.min(i * ATOM_M + lane // QUAD, tokens - 1))
                    for i in range(c.tile_m // ATOM_M)
                ]
            begin, end = self._k_tiles(work_tile.k_begin, work_tile.k_end, pipeline)
            for k_tile in range(begin, end, c.pipelines):
                if issued >= loaded:
                    empty = smem.pipeline.empty + (first + stage)
                    if const_expr(not c.by_warp):
                        # If no stage is empty, use the time: wait for all copies that have started, and signal their
                        # arrival.
                        if (issued > signalled) & ~ptx.has_passed(empty, parity):
                            self._signal_activations(first, issued - signalled, 0, stage, lane, smem)
                            signalled = issued
                    ptx.wait(empty, parity)
                    self._load_weight(index, work_tile, k_tile, first + stage, weight, work, smem)
                at = (first + stage) * self.mma.activation_bytes
                target = smem.activations + cute.assume(at, divby=self.mma.activation_bytes)
                if const_expr(c.by_warp):
                    full = smem.pipeline.full + (first + stage)
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, tokens * self.lister.token_bytes)
                    if lane < tokens:
                        divby = 16 if const_expr(c.operands.by_codes) else TOKEN_GAP_BYTES
                        to = target + cute.assume(lane * self.mma.pitch, divby=divby)
                        row = self._row_at(work.lists.activations, token, k_tile)
                        ptx.copy_bulk(to, row, self.lister.token_bytes, full)
                    cute.arch.sync_warp()
                else:
                    for i in range_constexpr(c.tile_m // ATOM_M):
                        if i * ATOM_M < tokens:
                            row = self._row_at(work.lists.activations, own[i], k_tile)
                            exists = i * ATOM_M + lane // QUAD < tokens
                            to = target + i * (ATOM_M * self.lister.token_bytes)
                            self.activations.copy_rows(to, row, exists, lane)
                    cute.arch.cp_async_commit_group()
                issued += 1
                stage, parity = next_stage(stage, parity, depth)
                if const_expr(not c.by_warp):
                    if issued - signalled > c.lag:
                        self._signal_activations(first, issued - signalled, c.lag, stage, lane, smem)
                        signalled = issued - c.lag
        if const_expr(not c.by_warp):
            self._signal_activations(first, issued - signalled, 0, stage, lane, smem)

    @cute.jit
    def _signal_activations(self, first, started, keep: cutlass.Constexpr[int], stage, lane, smem):
        """Wait for the activations of ``started`` k tiles, except the last ``keep``, and arrive at their full barriers.

        The pipeline's stages begin at stage ``first``. ``stage`` is the index, in the pipeline, of the stage after the
        last started k tile.
        """
        c = self.config
        depth = c.stages // c.pipelines
        cute.arch.cp_async_wait_group(keep)
        # Each lane has waited only for its own copies. Fence and synchronise the warp, because wgmma reads the copies
        # of all lanes.
        fence_async()
        cute.arch.sync_warp()
        for i in range(started - keep, unroll=1):
            smem.pipeline.arrive_full(first + (stage + depth - started + i) % depth, Uint32(lane == 0))

    def _load_token_word(self, work, expert, position, lane, exists) -> Uint32:
        """Load the word from which ``_token_from_word`` computes the row of an m tile's ``lane``-th token.

        ``position`` is the index of the m tile's first token among the expert's tokens.
        """
        if self.config.scans:
            row = work.block_index * self.config.token_block + lane
            there = (lane < self.config.token_block) & (row < work.m)
            at = work.routing.iterator + work.routing.layout((row, expert))
            return ptx.load_if(at, there, 1)[0]
        place = self.lister.entry(work.block_index, expert, work.experts) + position
        words = cute.recast_ptr(work.lists.pairs.iterator, dtype=Uint32) + place * 2 + lane * 2
        return ptx.load_if(words, exists, 1)[0]

    def _token_from_word(self, token_word, work, position, lane) -> Int32:
        """Return the row of an m tile's ``lane``-th token, computed from the words that the lanes of the warp loaded.

        The row is undefined if the token does not exist.
        """
        if not self.config.scans:
            return Int32(token_word)
        # Bit i is set if token i of the token block is routed to the expert. Find the set bit with ``remaining`` set
        # bits below it.
        routed = Uint32(cute.arch.vote_ballot_sync(factor_counts(ptx.float_of(token_word))))
        remaining, token = position + lane, Int32(0)
        for step in (16, 8, 4, 2, 1):
            passed = Int32(cute.arch.popc((routed >> Uint32(token)) & Uint32((1 << step) - 1)))
            is_later = remaining >= passed
            remaining = ptx.select(is_later, remaining - passed, remaining)
            token = ptx.select(is_later, token + step, token)
        return work.block_index * self.config.token_block + token

    def _load_weight(self, index, work_tile, k_tile, stage, weight, work, smem) -> None:
        """Start the copies of the weight's codes and scales for one k tile, of gate and of up."""
        c = self.config
        expert = smem.m_tiles.experts[index]
        blocks = Int32(c.k // c.operands.fmt.block_size)
        for half in range(2):
            n_tile = (expert * 2 + half) * work.n_tiles + work_tile.n_tile
            self.weight.load(n_tile, k_tile, 0, 2 * stage + half, smem.pipeline.full + stage, weight, work.n, blocks)

    @cute.jit
    def _consume(self, warp, tid, work, smem):
        """Run a consumer warp, which computes 8 rows of gate and 8 rows of up of every work tile, over its pipeline's k
        tiles."""
        c = self.config
        if const_expr(c.pdl and c.scans):
            cute.arch.griddepcontrol_wait()
        pipeline, n_warp, lane = warp // c.n_warps, warp % c.n_warps, tid % WARP
        consumer = Consumer(
            lane=lane,
            leads=Uint32(lane == 0),
            pipeline=pipeline,
            n_warp=n_warp,
            column=n_warp * 8 + lane // 4,
            is_last=pipeline == c.pipelines - 1,
        )
        turn_chain = smem.turns + n_warp * c.pipelines
        depth = c.stages // c.pipelines
        first = pipeline * depth
        acc, previous_acc = (cute.make_rmem_tensor((c.tile_m // 2,), Float32) for _ in range(2))
        start = self.mma.start_of(smem.activations)
        stage, parity, turn, index = Int32(0), Int32(0), Int32(0), Int32(0)
        first_tile, end_tile = self._work_tiles(work)
        for tile_index in range(first_tile, end_tile):
            work_tile, m_tiles = self._work_tile(tile_index, work), smem.m_tiles
            index = self.m_tiles.index_of(work_tile.m_tile, index, m_tiles)
            expert = m_tiles.experts[index]
            first_column = work_tile.n_tile * c.out_columns
            position = (work_tile.m_tile - m_tiles.begins[index]) * c.tile_m
            own = self._recomputed(consumer)
            exists = own.is_last & (own.lane < m_tiles.counts[index] - position)
            token_word = self._load_token_word(work, expert, position, own.lane, exists)
            terms = None
            if const_expr(not c.loads_terms_late):
                terms = self.epilogue.terms(expert, first_column, work, own)
            for k_split in range(work_tile.k_begin, work_tile.k_end):
                if const_expr(c.by_warp or c.k_tiles // c.split_k < c.pipelines):
                    acc.fill(0.0)
                begin, end = self._k_tiles(k_split, k_split + 1, pipeline)
                last = stage
                for k_tile in range(begin, end, c.pipelines, unroll=self.unroll):
                    smem.pipeline.wait_full(first + stage, parity)
                    at = first + stage, first + last
                    adds = k_tile > begin
                    self._multiply_k_tile(start, k_tile, *at, adds, expert, first_column, acc, consumer, work, smem)
                    last = stage
                    stage, parity = next_stage(stage, parity, depth)
                    if const_expr(c.by_warp):
                        smem.pipeline.release(first + last, consumer.leads)
                if const_expr(not c.by_warp):
                    warpgroup.wait_group(0)
                    smem.pipeline.release(first + last, consumer.leads, begin < end)
                if const_expr(c.pipelines > 1):
                    # Wait until the previous warp of the chain has stored its sum: over the previous k tiles, the
                    # previous part of k, or the previous work tile.
                    ptx.wait(turn_chain + pipeline, turn)
                    turn ^= 1
                self._reduce(acc, previous_acc, k_split, work_tile, consumer, work, smem)
                if const_expr(c.pipelines > 1):
                    cute.arch.sync_warp()
                    ptx.arrive_if(turn_chain + (pipeline + 1) % c.pipelines, consumer.leads)
            if consumer.is_last & (work_tile.k_end == c.split_k):
                start_column = expert * work.width + first_column
                own = self._recomputed(consumer)
                token = ptx.select(exists, self._token_from_word(token_word, work, position, own.lane), Int32(-1))
                late = terms
                if const_expr(c.loads_terms_late):
                    late = self.epilogue.terms(expert, first_column, work, own)
                self.epilogue.store_work_tile(acc, token, late, start_column, own, smem.values, work.outputs)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    def _recomputed(self, consumer: Consumer) -> Consumer:
        """Return ``consumer``. On GPUs without wgmma, hide its lane's index from the compiler, so that values that
        depend on the lane are computed again for each work tile.

        If they stayed in registers, other values would spill: without setmaxnreg, a consumer has only 96 registers.
        """
        if self.config.has_wgmma:
            return consumer
        lane = ptx.opaque(consumer.lane)
        return consumer._replace(lane=lane, column=consumer.n_warp * 8 + lane // 4)

    def _multiply_k_tile(
        self, start, k_tile, stage, previous_stage, adds, expert, first_column, acc, consumer, work, smem
    ) -> None:
        """Multiply a k tile and release ``previous_stage``. The products are added to ``acc`` if ``adds``, else they
        overwrite it."""
        c = self.config
        is_linear, column = c.operands.layout.is_linear, consumer.column
        rows = []
        for half in range(2):
            # A scale tile spans the rows of several n tiles, so this n tile may begin inside it.
            inside = ((expert * 2 + half) * work.width + first_column) % SCALE_TILE_ROWS
            rows.append((2 * stage + half, column, column if is_linear else inside + column))

        def release_previous() -> None:
            smem.pipeline.release(previous_stage, consumer.leads, adds)

        on_done = release_previous if c.k_tiles > c.pipelines else None
        self.mma.multiply(start, 0, 1, k_tile, stage, adds, rows, consumer.lane, acc, smem, on_done)

    @cute.jit
    def _reduce(self, acc, previous_acc, k_split, work_tile, consumer, work, smem):
        """Add the accumulators of earlier pipelines and of earlier parts of k, and pass the sum to the next warp or
        CTA.

        If no warp or CTA follows, the sum stays in registers. With one pipeline, ``previous_acc`` holds the sum over
        earlier parts of k.
        """
        c = self.config
        begins = consumer.pipeline == 0
        if const_expr(c.split_k > 1):
            if begins & (k_split == work_tile.k_begin) & (k_split > 0):
                there, flag = self._partial_sums_of(work.cta - work.siblings, consumer, work)
                ready = ptx.load_acquire(flag)
                while ready == Uint32(0):
                    ready = ptx.load_acquire(flag)
                self._add_acc(acc, there, consumer)
        if const_expr(c.pipelines == 1 and c.split_k > 1):
            if k_split > work_tile.k_begin:
                for i in range_constexpr(c.tile_m // 2):
                    acc[i] = ptx.add_rn(previous_acc[i], acc[i])
            for i in range_constexpr(c.tile_m // 2):
                previous_acc[i] = acc[i]
        if const_expr(c.pipelines > 1):
            if ~begins | (k_split > work_tile.k_begin):
                self._add_acc(acc, smem.acc, consumer)
            if ~consumer.is_last | (k_split + 1 < work_tile.k_end):
                self._store_acc(acc, smem.acc, consumer)
        if const_expr(c.split_k > 1):
            if consumer.is_last & (k_split + 1 == work_tile.k_end) & (work_tile.k_end < c.split_k):
                there, flag = self._partial_sums_of(work.cta, consumer, work)
                self._store_acc(acc, there, consumer)
                cute.arch.sync_warp()
                if consumer.lane == 0:
                    ptx.store_release(flag, Uint32(1))

    def _partial_sums_of(self, cta, consumer, work) -> tuple[cute.Pointer, cute.Pointer]:
        """Return the address of a CTA's partial sums in the workspace, and the address of the flag for the consumer's
        rows."""
        sums, flags = work.partial_sums
        index = work.block_index * work.num_ctas + cta
        at = sums.iterator + cute.assume(Int64(index) * self.config.acc_bytes, divby=16)
        return at, flags.iterator + (index * self.config.n_warps + consumer.n_warp)

    def _acc_words(self, acc_at, group: int, consumer) -> cute.Tensor:
        """Return the four words of a buffer of accumulators that belong to this lane in a group of eight tokens."""
        at = ((consumer.n_warp * (self.config.tile_m // 8) + group) * WARP + consumer.lane) * 16
        words = cute.recast_ptr(acc_at + cute.assume(at, divby=16), dtype=Uint32)
        return cute.make_tensor(words, cute.make_layout(4))

    def _add_acc(self, acc, acc_at, consumer) -> None:
        """Add this lane's accumulators from the buffer at ``acc_at`` to ``acc``."""
        for group in range(self.config.tile_m // 8):
            for i, word in enumerate(load_words(self._acc_words(acc_at, group, consumer))):
                acc[4 * group + i] = ptx.add_rn(ptx.float_of(word), acc[4 * group + i])

    def _store_acc(self, acc, acc_at, consumer) -> None:
        """Store this lane's accumulators in the buffer at ``acc_at``."""
        for group in range(self.config.tile_m // 8):
            words = [ptx.bits_of(acc[4 * group + i]) for i in range(4)]
            store_words(words, self._acc_words(acc_at, group, consumer))
