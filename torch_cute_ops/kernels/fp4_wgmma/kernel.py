"""The device code; the package's docstring describes the roles and the data path."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels import activation_tiles
from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.activation_layout import CHUNK, TILE_BYTES, TILE_TOKENS
from torch_cute_ops.kernels.common.activations import Activations
from torch_cute_ops.kernels.common.cluster_sums import (
    leave_sums,
    send_sums,
    sum_columns,
    tokens_of,
    write_received,
    write_sums,
)
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.epilogue_ops import EpilogueOps
from torch_cute_ops.kernels.common.expert_factors import factor_counts, factors_argument
from torch_cute_ops.kernels.common.fp4_weights import sum_scale
from torch_cute_ops.kernels.common.overlap import ctas_unless_overlapping
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.shared_words import clear
from torch_cute_ops.kernels.common.unit_mma import free
from torch_cute_ops.kernels.common.warp_mma import multiply_word
from torch_cute_ops.kernels.common.warpgroup import WARPGROUP
from torch_cute_ops.kernels.common.warpgroup_mma import warpgroup_mma
from torch_cute_ops.kernels.common.weight_ring import WeightRing, next_stage
from torch_cute_ops.kernels.fp4_wgmma.config import (
    BAND_ROWS,
    BARRIER_BYTES,
    HELPERS,
    QUARTERS,
    ZEROS_BYTES,
    Arguments,
    Config,
)
from torch_cute_ops.kernels.fp4_wgmma.row import RowActivations, RowMma
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

COLLECTED = 8  # groups of eight tokens whose sums are added up at once
REGISTERS = 2**16  # of an SM
BAND = 8  # tiles of tokens that run side by side
TOGETHER = 2  # groups of eight tokens that such a warp loads before it stores


class Workspace(NamedTuple):
    """The parts of the workspace, with sizes as in ``Config.workspace_bytes``.

    Attributes:
        tiles: rearranged activations.
        factors: over experts (tokens of a tile, experts, tiles of tokens); else ``None``.
        partials: partial sums of workers.
        flags: whether they are complete, for each worker and warpgroup.
    """

    tiles: cute.Tensor
    factors: cute.Tensor | None
    partials: cute.Tensor
    flags: cute.Tensor


class Part(NamedTuple):
    """A CTA's part of the GEMM, and the operands.

    Attributes:
        n, m: sizes of the result.
        chunks, blocks: of a row of the weight.
        token_tile, token_tiles: the CTA's tile of tokens, and how many there are.
        worker, workers: the CTA among those of its tile of tokens; their number.
        begin, end: its units. Unit ``u`` is chunk ``u % chunks`` of tile of rows ``u // chunks``.
        units: how many there are.
        a, a_scale: the activations; their scales, if they are in FP4.
        alpha, bias: operands of the epilogue, if it has them.
        out: the result.
        workspace: ``None`` where the CTAs rearrange the activations.
    """

    n: Int32
    m: Int32
    chunks: Int32
    blocks: Int32
    token_tile: Int32
    token_tiles: Int32
    worker: Int32
    workers: Int32
    begin: Int32
    end: Int32
    units: Int64
    a: cute.Tensor
    a_scale: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor
    workspace: Workspace | None


class Smem(NamedTuple):
    """Shared memory: the stages of codes, scales, activations (``tokens``) and factors; sums that the CTAs of the
    cluster have sent; the barriers of both rings, of which a stage's are full, or free, and the one of the sums."""

    codes: cute.Pointer
    tokens: cute.Pointer
    scales: cute.Pointer
    factors: cute.Pointer
    received: cute.Pointer
    full: cute.Pointer
    free: cute.Pointer
    tokens_full: cute.Pointer
    tokens_free: cute.Pointer
    sums_full: cute.Pointer


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        group, thread: the warpgroup, and the thread in it.
        lane, quad: index in the warp, and among the four lanes that share a row.
        row: the first of its two rows of the weight in the tile; the other is ``row + 8``.
        scale_row: the same, counted from the first row of the tile's first tile of scales.
        turn: which of the warps of its band its warp is: the number of its first chunk of a segment.
        existing: the mask of its scales of the last chunk of a row of the weight.
        leads: whether it arrives at barriers for its warp, 1 or 0.
    """

    group: Int32
    lane: Int32
    thread: Int32
    quad: Int32
    row: Int32
    scale_row: Int32
    turn: Int32 | int
    existing: Uint32
    leads: Uint32


class FP4WgmmaKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.operands.dtype]
        self.epilogue = EpilogueOps(config.epilogue)
        self.out_dtype = self.epilogue.out_dtype
        self.ring = WeightRing(config.chunks, config.stages)
        self.row = None
        if config.tokens == 1:
            self.activations = RowActivations(config.arranged)
            self.row = RowMma(self.ring, self.activations)
        else:
            self.activations = Activations(config.arranged)
        self.arrange = ActivationTilesKernel(activation_tiles.Config(**vars(config.arranged), pdl=config.pdl))

    def arguments(self) -> Arguments:
        c = self.config
        m, n = Dim("m"), Dim("n", divisibility=8)
        a, a_scale = self.activations.arguments()
        b, b_scale = self.ring.arguments(n)
        alpha, bias = self.epilogue.arguments(n)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            alpha=alpha if c.width is None else factors_argument(m),
            bias=bias,
            out=TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=None if c.arranges else TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            workers=ScalarArg("Int32"),
            shares=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, workspace, workers: Int32, shares: Int32, stream):
        c = self.config
        token_tiles = cute.ceil_div(out.shape[0], c.tokens)
        written, read = (out, workspace), (a, a_scale, b, b_scale, alpha, bias)
        shared = None
        if const_expr(not c.arranges):
            shared = self._share(workspace, token_tiles, cute.ceil_div(b.shape[0], self.ring.line), workers, shares)
            by_expert = alpha if const_expr(c.width is not None) else None
            ctas = ctas_unless_overlapping(self.arrange.ctas(a), written, read)
            self.arrange.launch(ctas, a, a_scale, shared[0], shared[3], by_expert, shared[1], stream)
        if const_expr(c.splits > 0):
            workers = cute.ceil_div(b.shape[1], c.rows) * c.splits
        ctas = workers * token_tiles
        if const_expr(c.arranges):
            ctas = ctas_unless_overlapping(ctas, written, read)
        self.kernel(a, a_scale, shared, self.ring.maps(b, b_scale), alpha, bias, out, workers).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _share(self, workspace, token_tiles, chunks, workers, shares) -> tuple:
        """The fields of ``Workspace``."""
        c = self.config
        slots = token_tiles * workers * shares
        tile_bytes = Int64(token_tiles) * (c.tokens * self.ring.line * QUARTERS) * chunks
        sums = Int64(slots) * (c.rows * c.tokens)
        tiles = cute.make_tensor(workspace.iterator, cute.make_layout((tile_bytes,)))
        after = workspace.iterator + cute.assume(tile_bytes, divby=TILE_BYTES)
        factors = None
        if const_expr(c.width is not None):
            experts = chunks * CHUNK // c.width
            layout = cute.make_layout((c.tokens, experts, token_tiles))
            factors = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), layout)
            after = after + cute.assume(Int64(4 * c.tokens) * experts * token_tiles, divby=4 * TILE_TOKENS)
        partials = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), cute.make_layout((sums,)))
        after = after + cute.assume(4 * sums, divby=4 * TILE_TOKENS)
        flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((slots * c.groups,)))
        return tiles, factors, partials, flags

    @cute.kernel
    def kernel(self, a, a_scale, shared, weight, alpha, bias, out, workers):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        n, half, _ = weight[1].shape
        chunks = cute.ceil_div(half, self.ring.line)
        row_tiles = cute.ceil_div(n, c.rows)
        token_tiles = cute.ceil_div(out.shape[0], c.tokens)
        # Tiles of tokens are taken in bands of ``BAND``: in a band, all tiles for a worker, or cluster, then for the
        # next.
        together = max(c.splits, 1)
        team, team_workers = cta // together, workers // together
        band = team // (team_workers * BAND)
        width = cutlass.min(token_tiles - band * BAND, Int32(BAND))
        place = team - band * (team_workers * BAND)
        worker, token_tile = place // width, band * BAND + place % width
        units = Int64(row_tiles) * chunks
        if const_expr(c.splits == 0):
            begin, end = Int32(worker * units // workers), Int32((worker + 1) * units // workers)
        else:
            # A cluster has a tile of rows; its CTAs have equal parts of the chunks.
            rank, start = cta % c.splits, worker * chunks
            worker = worker * c.splits + rank
            begin, end = start + rank * chunks // c.splits, start + (rank + 1) * chunks // c.splits
        part = Part(
            n=n,
            m=out.shape[0],
            chunks=chunks,
            blocks=half * 2 // c.operands.fmt.block_size,
            token_tile=token_tile,
            token_tiles=token_tiles,
            worker=worker,
            workers=workers,
            begin=begin,
            end=end,
            units=units,
            a=a,
            a_scale=a_scale,
            alpha=alpha if c.width is None else None,
            bias=bias,
            out=out,
            workspace=None if c.arranges else Workspace(*shared),
        )
        smem = self._allocate()
        if tid == 0:
            self.ring.prefetch(weight)
            for i in range_constexpr(c.stages):
                cute.arch.mbarrier_init(smem.full + i, 1)
                cute.arch.mbarrier_init(smem.free + i, c.warps)
            for i in range_constexpr(c.token_stages):
                cute.arch.mbarrier_init(smem.tokens_full + i, 1)
                cute.arch.mbarrier_init(smem.tokens_free + i, c.warps)
            if const_expr(c.sends):
                cute.arch.mbarrier_init(smem.sums_full, 1)
                tokens, rows = self._existing(part)
                own = tokens_of(c.sum_tile, c.splits, part.worker % c.splits, tokens)
                cute.arch.mbarrier_arrive_and_expect_tx(smem.sums_full, own * rows * (c.splits * 4))
        cute.arch.mbarrier_init_fence()
        if const_expr(c.tokens == 1):
            clear(smem.tokens - ZEROS_BYTES, ZEROS_BYTES, tid, c.threads)
        if const_expr(c.sends):
            # Waited for before sums are sent
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if warp >= 4 * c.groups:
            self._take_registers(c.registers[1])
            if warp == 4 * c.groups:
                self._produce(self.ring.open(weight, smem.codes, smem.scales), part, smem)
            elif const_expr(c.arranges):
                self._arrange(warp - 4 * c.groups - 1, tid % 32, part, smem)
        else:
            self._take_registers(c.registers[0])
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
                if const_expr(c.static_weight):
                    # The kernel before this one has ended, so those before it have, and the next may start.
                    cute.arch.griddepcontrol_launch_dependents()
            if const_expr(c.first_chunks > 0):
                self._arrange_first(tid, part, smem)
            self._consume(self.epilogue.factor(alpha), tid, part, smem)

    def _existing(self, part) -> tuple[Int32, Int32]:
        """Tokens and rows of the tile of a cluster that exist."""
        c = self.config
        first_row = part.begin // part.chunks * c.rows
        tokens = cutlass.min(part.m - part.token_tile * c.tokens, Int32(c.tokens))
        return tokens, cutlass.min(part.n - first_row, Int32(c.rows))

    def _take_registers(self, count: int) -> None:
        """Set the registers of each thread of the warpgroup."""
        if count > REGISTERS // self.config.threads:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        tokens = base + c.stages * self.ring.code_bytes
        scales = tokens + c.token_ring_bytes
        if c.tokens == 1:
            tokens = tokens + ZEROS_BYTES
        factors = scales + c.stages * self.ring.scale_bytes
        received = factors + c.token_stages * c.factor_bytes
        barriers = cute.recast_ptr(base + (c.smem_bytes - BARRIER_BYTES), dtype=Int64)
        return Smem(
            codes=base,
            tokens=tokens,
            scales=scales,
            factors=factors,
            received=received,
            full=barriers,
            free=barriers + c.stages,
            tokens_full=barriers + 2 * c.stages,
            tokens_free=barriers + 2 * c.stages + c.token_stages,
            sums_full=barriers + 2 * (c.stages + c.token_stages),
        )

    def _segment(self, unit, part):
        """The segment of this worker that ends before ``unit``: its tile of rows, first chunk, and number of chunks."""
        tile = (unit - 1) // part.chunks
        first = cutlass.max(part.begin, tile * part.chunks)
        return tile, first - tile * part.chunks, unit - first

    # Copies

    @cute.jit
    def _produce(self, weight, part, smem):
        """The producer warp: copy everything that the worker multiplies, in that order.

        Where another kernel rearranges the activations, the first stages of the weight are filled before it has ended.
        That is safe because it lets this kernel start only when it has waited for all kernels before it. A static
        weight needs no wait here either (``kernels.common.pdl``), and this warp reads nothing else.
        """
        c = self.config
        loaded = Int32(0)
        if const_expr(c.pdl and c.arranges):
            if const_expr(not c.static_weight):
                cute.arch.griddepcontrol_wait()
        elif const_expr(c.pdl):
            unit = part.end
            ahead = cutlass.min(part.end - part.begin, Int32(c.stages))
            while loaded < ahead:
                tile, first, count = self._segment(unit, part)
                for i in range(cutlass.min(count, ahead - loaded)):
                    self.ring.load(tile, first + i, 0, loaded, smem.full + loaded, weight, part.n, part.blocks)
                    loaded += 1
                unit -= count
            cute.arch.griddepcontrol_wait()
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        token_stage, token_parity = Int32(0), Int32(1)
        unit = part.end
        done = Int32(0)
        while unit > part.begin:
            tile, first, count = self._segment(unit, part)
            for i in range(count):
                if done >= loaded:
                    ptx.wait(smem.free + stage, parity)
                    self.ring.load(tile, first + i, 0, stage, smem.full + stage, weight, part.n, part.blocks)
                done += 1
                stage, parity = next_stage(stage, parity, c.stages)
                if const_expr(not c.arranges):
                    for quarter in range_constexpr(0, QUARTERS, c.span):
                        ptx.wait(smem.tokens_free + token_stage, token_parity)
                        self._load_tokens(first + i, quarter, token_stage, part, smem)
                        token_stage, token_parity = next_stage(token_stage, token_parity, c.token_stages)
            unit -= count

    @cute.jit
    def _arrange_first(self, tid, part, smem):
        """The consumers rearrange the activations of the first chunks together, while the weight is on its way."""
        c = self.config
        chunks = cutlass.min(part.end - part.begin, Int32(c.first_chunks))
        pieces, threads = self.activations.pieces, c.warps * 32
        for item in cutlass.range(tid, chunks * (pieces * c.tokens), threads, unroll=1):
            place, piece, chunk = item % c.tokens, item // c.tokens % pieces, item // (c.tokens * pieces)
            start = (part.begin % part.chunks + chunk) * CHUNK
            token = cutlass.min(part.token_tile * c.tokens + place, part.m - 1)
            left = part.blocks * c.operands.fmt.block_size - start
            words = self.activations.read(part.a, part.a_scale, token, start, left, piece)
            self.activations.store(words, c.groups_of_tokens, piece, place, self._tokens_at(chunk, smem))
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        ptx.arrive_if(smem.tokens_full + cutlass.min(tid, chunks - 1), Uint32(tid < chunks))

    def _tokens_at(self, stage, smem) -> cute.Pointer:
        """Where a stage of activations begins."""
        size = self.config.token_bytes
        return smem.tokens + cute.assume(stage * size, divby=math.gcd(size, TILE_BYTES))

    @cute.jit
    def _arrange(self, helper, lane, part, smem):
        """A warp that rearranges activations: every third chunk, but for the first ones where the consumers do that,
        from memory to its stage."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        for use in range(c.first_chunks + helper, part.end - part.begin, HELPERS):
            start = (part.begin % part.chunks + use) * CHUNK
            stage = use % c.token_stages
            base = self._tokens_at(stage, smem)
            groups = c.groups_of_tokens
            together, tokens = min(groups, TOGETHER), min(c.tokens, TILE_TOKENS)
            # Not unrolled, for lack of registers
            for step in cutlass.range(groups // together, unroll=1):
                places = [(step * together + i) * TILE_TOKENS + lane % tokens for i in range(together)]
                pieces = self.activations.pieces
                piece = lane // tokens % pieces
                items = [(place, after) for place in places for after in range(0, pieces, 32 // tokens)]
                read = []
                for place, after in items:
                    # For tokens that do not exist the last one again, whose results are not stored
                    token = cutlass.min(part.token_tile * c.tokens + place, part.m - 1)
                    left = part.blocks * c.operands.fmt.block_size - start
                    read.append(self.activations.read(part.a, part.a_scale, token, start, left, piece, after))
                if step == 0:
                    ptx.wait(smem.tokens_free + stage, (use // c.token_stages + 1) % 2)
                for (place, after), words in zip(items, read, strict=True):
                    self.activations.store(words, groups, piece + after, place, base)
            if const_expr(not c.by_warp):
                # wgmma reads shared memory through the async proxy.
                fence_async()
            cute.arch.sync_warp()
            ptx.arrive_if(smem.tokens_full + stage, Uint32(lane == 0))

    @cute.jit
    def _load_tokens(self, chunk, quarter: int, stage, part, smem):
        """Start the copies of a stage of activations, from ``quarter`` of a chunk on; with the last quarter also those
        of the expert's factors."""
        c = self.config
        barrier = smem.tokens_full + stage
        has_factors = c.width is not None and quarter + c.span == QUARTERS
        with cute.arch.elect_one():
            size = c.token_bytes + (c.factor_bytes if has_factors else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            # Contiguous in memory: a chunk in the layout for mma.sync, a quarter in that for wgmma.
            pieces = 1 if c.by_warp else c.span
            size = c.token_bytes // pieces
            for i in range_constexpr(pieces):
                at = (chunk * QUARTERS + quarter) // c.span * pieces + i
                source = (Int64(at) * part.token_tiles + part.token_tile) * size
                target = stage * c.token_bytes + i * size
                ptx.copy_bulk(
                    smem.tokens + cute.assume(target, divby=TILE_BYTES),
                    part.workspace.tiles.iterator + cute.assume(source, divby=TILE_BYTES),
                    size,
                    barrier,
                )
            if const_expr(has_factors):
                source = part.workspace.factors[None, chunk // (c.width // CHUNK), part.token_tile].iterator
                target = cute.assume(stage * c.factor_bytes, divby=4 * TILE_TOKENS)
                ptx.copy_bulk(smem.factors + target, cute.recast_ptr(source, dtype=Uint8), c.factor_bytes, barrier)

    # MMAs

    @cute.jit
    def _consume(self, factor, tid, part, smem):
        """A consumer warp: its 16 rows of each of the worker's tiles, in a warpgroup where this multiplies."""
        c = self.config
        group = tid // WARPGROUP
        lane = tid % 32
        band, turn, turns = self._band_of(tid // 32)
        row = band * BAND_ROWS + lane // 4
        consumer = Consumer(
            group=group,
            lane=lane,
            thread=tid % WARPGROUP,
            quad=lane % 4,
            row=row,
            scale_row=row,
            turn=turn,
            existing=self.ring.existing(part.blocks - (part.chunks - 1) * self.ring.blocks, lane % 4),
            leads=Uint32(lane == 0),
        )
        multiply = None
        if const_expr(not c.by_warp):
            sizes = c.tokens, c.span * CHUNK // QUARTERS, c.token_stages
            multiply = warpgroup_mma(self.dtype, *sizes, (0, 1, 2), smem.tokens)
        sums = cute.make_rmem_tensor((c.sums,), Float32)
        # Over experts the sums, each multiplied by its factor
        totals = cute.make_rmem_tensor((c.sums,), Float32) if c.width is not None else sums
        state = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        unit = part.end
        while unit > part.begin:
            tile, first, count = self._segment(unit, part)
            # (Over experts the first MMAs replace them; but without this ptxas spills.)
            sums.fill(0.0)
            own = consumer._replace(scale_row=consumer.row + self.ring.first_scale_row(tile))
            if const_expr(c.width is None):
                for i in range(count):
                    if const_expr(c.turns == 1):
                        state = self._multiply_chunk(multiply, True, sums, first, i, state, own, part, smem)
                    elif i & (turns - 1) == turn:
                        state = self._multiply_chunk(multiply, True, sums, first, i, state, own, part, smem)
                    else:
                        state = self._pass_chunk(state, consumer, smem)
            else:
                totals.fill(0.0)
                width, i = c.width // CHUNK, Int32(0)
                while i < count:
                    begin = i
                    end = cutlass.min(((first + i) // width + 1) * width - first, count)
                    while i < end:
                        state = self._multiply_chunk(multiply, i > begin, sums, first, i, state, own, part, smem)
                        i += 1
                    warpgroup.wait_group(0)
                    self._add_expert(sums, totals, state[4], consumer, smem)
            if const_expr(not c.by_warp):
                warpgroup.wait_group(0)
                ptx.arrive_if(smem.tokens_free + state[4], consumer.leads)
            unit -= count
            if const_expr(c.pdl and not c.static_weight):
                if unit <= part.begin:
                    cute.arch.griddepcontrol_launch_dependents()
            if const_expr(c.tokens == 1):
                self.row.add_up(sums)
            if const_expr(c.splits > 1 or c.turns > 1 or c.tokens == 1):
                self._add_up(totals, tile, factor, tid, consumer, part, smem)
            elif const_expr(c.splits == 1):
                self._write(totals, tile, factor, consumer, part)
            elif first + count < part.chunks:
                self._leave(totals, consumer, part)
            else:
                if first > 0:
                    self._collect(totals, tile, consumer, part)
                self._write(totals, tile, factor, consumer, part)

    def _band_of(self, warp) -> tuple:
        """A consumer warp's band; which chunks of a segment it has: the first, and the step to the next, a power of
        two."""
        c = self.config
        if c.turns == 1:
            return warp, 0, 1
        whole = c.bands - c.shared_bands
        is_shared, place = warp >= whole, warp - whole
        band = ptx.select(is_shared, whole + place % c.shared_bands, warp)
        turn = ptx.select(is_shared, place // c.shared_bands, Int32(0))
        return band, turn, ptx.select(is_shared, Int32(c.turns), Int32(1))

    @cute.jit
    def _multiply_chunk(self, multiply, adds, sums, first, i, state, consumer, part, smem):
        """Add the ``i``-th chunk of a segment to the sums, or replace them, unless ``adds``.

        ``state``: the stages of the weight and of activations, each with its parity, and the last stage of activations
        that was multiplied. Returns the next.
        """
        c = self.config
        if const_expr(c.tokens == 1):
            return self._multiply_row(sums, first, i, state, consumer, part, smem)
        stage, parity, token_stage, token_parity, last = state
        ptx.wait(smem.full + stage, parity)
        existing = ptx.select(first + i == part.chunks - 1, consumer.existing, Uint32(0xFFFFFFFF))
        rows = (consumer.row, consumer.row + 8)
        codes = [self.ring.codes(smem.codes, stage, row, consumer.quad) for row in rows]
        factors = [
            self.ring.factors(smem.scales, stage, row, consumer.quad, existing, self.dtype)
            for row in (consumer.scale_row, consumer.scale_row + 8)
        ]
        for word in range_constexpr(self.ring.words):
            pairs = self.ring.pairs(codes, factors, word, self.dtype)
            if const_expr(word % (2 * c.span) == 0):
                ptx.wait(smem.tokens_full + token_stage, token_parity)
            if const_expr(c.by_warp):
                at = self._tokens_at(token_stage, smem)
                multiply_word(pairs, word, c.tokens, at, c.arranged.token_bytes, consumer.lane, sums, self.dtype)
            else:
                multiply(pairs, word % (2 * c.span), token_stage, adds if word == 0 else True, sums)
            if const_expr(word == self.ring.words // 2):
                # All lanes have read their codes, since this wgmma takes a word of the last load. (An arrival does
                # not wait for loads whose results are not used yet: on an H200 copies overtook them.) An mma.sync
                # does not ensure it: ptxas moves it, and so the first use of a load, behind the arrival.
                if const_expr(c.by_warp):
                    fence_async()
                cute.arch.sync_warp()
                ptx.arrive_if(smem.free + stage, consumer.leads)
                stage, parity = next_stage(stage, parity, c.stages)
            if const_expr(not c.by_warp):
                # The MMAs of the word before are done, and its registers free.
                warpgroup.wait_group(1)
                if const_expr(word % (2 * c.span) == 0):
                    leads = consumer.leads
                    if const_expr(word == 0):
                        leads = ptx.select(i > 0, leads, Uint32(0))
                    ptx.arrive_if(smem.tokens_free + last, leads)
            if const_expr(word % (2 * c.span) == 2 * c.span - 1):
                if const_expr(c.by_warp):
                    if const_expr(not c.arranges):
                        fence_async()
                    cute.arch.sync_warp()
                    ptx.arrive_if(smem.tokens_free + token_stage, consumer.leads)
                last = token_stage
                token_stage, token_parity = next_stage(token_stage, token_parity, c.token_stages)
        return stage, parity, token_stage, token_parity, last

    @cute.jit
    def _multiply_row(self, sums, first, i, state, consumer, part, smem):
        """The same with one row of activations."""
        c = self.config
        stage, parity, token_stage, token_parity, _ = state
        ptx.wait(smem.full + stage, parity)
        ptx.wait(smem.tokens_full + token_stage, token_parity)
        existing = ptx.select(first + i == part.chunks - 1, consumer.existing, Uint32(0xFFFFFFFF))
        rows, scale_rows = ((row, row + 8) for row in (consumer.row, consumer.scale_row))

        def free_weight() -> None:
            free(smem.free + stage, consumer.leads)

        self.row.multiply(stage, token_stage, rows, scale_rows, consumer.lane, existing, sums, smem, free=free_weight)
        cute.arch.sync_warp()
        ptx.arrive_if(smem.tokens_free + token_stage, consumer.leads)
        return (
            *next_stage(stage, parity, c.stages),
            *next_stage(token_stage, token_parity, c.token_stages),
            token_stage,
        )

    @cute.jit
    def _pass_chunk(self, state, consumer, smem):
        """Leave a chunk to another warp of the band. The warp waits for it and frees it all the same: a wait by parity
        takes whoever has seen every phase of the barrier."""
        c = self.config
        stage, parity, token_stage, token_parity, _ = state
        ptx.wait(smem.full + stage, parity)
        ptx.arrive_if(smem.free + stage, consumer.leads)
        ptx.wait(smem.tokens_full + token_stage, token_parity)
        ptx.arrive_if(smem.tokens_free + token_stage, consumer.leads)
        last = token_stage
        stage, parity = next_stage(stage, parity, c.stages)
        token_stage, token_parity = next_stage(token_stage, token_parity, c.token_stages)
        return stage, parity, token_stage, token_parity, last

    # Results

    def _add_expert(self, sums, totals, stage, consumer, smem) -> None:
        """Multiply an expert's sums by its factors, which that stage of activations has, and add them to the totals. A
        factor of zero adds nothing."""
        c = self.config
        scale = Float32(sum_scale(c.operands.fmt, c.operands.a_layout))
        for j in range(c.tokens // TILE_TOKENS):
            at = smem.factors + cute.assume(stage * c.factor_bytes + (j * TILE_TOKENS + consumer.quad * 2) * 4, divby=8)
            pair = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
            for e in range(2):
                factor = ptx.float_of(pair[e])
                counts = factor_counts(factor)
                for r in range(2):
                    at = 4 * j + 2 * r + e
                    totals[at] = ptx.fma_if(counts, factor, ptx.mul_rn(sums[at], scale), totals[at])
        # All lanes have read when the first one frees the stage.
        fence_async()
        cute.arch.sync_warp()

    def _partials_of(self, worker, consumer, part) -> cute.Tensor:
        """The thread's partial sums of a worker in memory, (4, tokens / 8)."""
        c = self.config
        slot = (Int64(part.token_tile) * part.workers + worker) * (c.rows * c.tokens)
        start = slot + (consumer.group * WARPGROUP + consumer.thread) * 4
        layout = cute.make_layout((4, c.tokens // TILE_TOKENS), stride=(1, c.groups * WARPGROUP * 4))
        return cute.make_tensor(
            cute.recast_ptr(part.workspace.partials.iterator + cute.assume(start, divby=4), dtype=Uint32), layout
        )

    def _flag(self, worker, consumer, part) -> cute.Pointer:
        """The flag of a worker's warpgroup."""
        c = self.config
        return part.workspace.flags.iterator + ((part.token_tile * part.workers + worker) * c.groups + consumer.group)

    def _meet(self, consumer) -> None:
        """A barrier of the warpgroup."""
        cute.arch.barrier(barrier_id=1 + consumer.group, number_of_threads=WARPGROUP)

    @cute.jit
    def _leave(self, sums, consumer, part):
        """Write this worker's partial sums to the workspace, for the one that has the tile's last chunk."""
        to = self._partials_of(part.worker, consumer, part)
        for j in range_constexpr(self.config.tokens // TILE_TOKENS):
            store_words([ptx.bits_of(sums[4 * j + i]) for i in range(4)], to[None, j])
        self._meet(consumer)
        if consumer.thread == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(self._flag(part.worker, consumer, part), Uint32(1))

    @cute.jit
    def _collect(self, sums, tile, consumer, part):
        """Add other workers' partial sums of this tile, in the order of k; this worker's come last."""
        c = self.config
        count = c.tokens // TILE_TOKENS
        # The worker that has the tile's first chunk: portions are rounded down.
        start = Int64(tile) * part.chunks
        first = Int32(((start + 1) * part.workers - 1) // part.units)
        for worker in range(first, part.worker):
            flag = self._flag(worker, consumer, part)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        # Some at a time: there are no registers for a second copy of all sums.
        step = min(count, COLLECTED)
        for j in range_constexpr(0, count, step):
            total = cute.make_rmem_tensor((4 * step,), Float32)
            total.fill(0.0)
            for worker in range(first, part.worker):
                left = self._partials_of(worker, consumer, part)
                for i in range_constexpr(step):
                    for e, word in enumerate(load_words(left[None, j + i])):
                        total[4 * i + e] = total[4 * i + e] + ptx.float_of(word)
            for i in range_constexpr(4 * step):
                sums[4 * j + i] = total[i] + sums[4 * j + i]

    @cute.jit
    def _add_up(self, sums, tile, factor, tid, consumer, part, smem):
        """Add up the sums of the cluster's CTAs, and those of the warps of shared bands; finish and store them."""
        c = self.config
        threads, finishers = c.warps * 32, c.bands * 32
        columns = sum_columns(c.sum_tile, finishers, tid, tile * c.rows)
        terms = self.epilogue.terms(part.alpha, part.bias, *columns, part.n)
        scale = sum_scale(c.operands.fmt, c.operands.a_layout) if self.row is None else self.row.sum_scale
        finish = self.epilogue.finisher(factor, terms, scale)
        # All warps have read the codes, which the sums replace.
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        row = consumer.row
        if const_expr(c.turns > 1):
            row += consumer.turn * c.sum_tile.shared
        leave_sums(c.sum_tile, sums, smem.codes, row, consumer.quad)
        rank = part.worker % c.splits
        at = part.token_tile * c.tokens, tile * c.rows
        if const_expr(c.sends):
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            # The peers' barriers are initialised.
            cute.arch.cluster_wait()
            existing = self._existing(part)
            own = tokens_of(c.sum_tile, c.splits, rank, existing[0])
            if tid < finishers:
                sent = smem.codes, smem.received, smem.sums_full
                send_sums(c.sum_tile, c.splits, finishers, *sent, rank, tid, *existing)
                ptx.wait(smem.sums_full, 0)
                write_received(c.sum_tile, c.splits, finishers, finish, part.out, smem.received, rank, tid, own, *at)
        else:
            self._meet_cluster(threads)
            if tid < finishers:
                write_sums(c.sum_tile, c.splits, finishers, finish, part.out, smem.codes, rank, tid, *at)
            if const_expr(c.splits > 1):
                # No CTA may end while another still reads its sums.
                self._meet_cluster(threads)

    def _meet_cluster(self, threads: int) -> None:
        """A barrier of the consumers of all CTAs that have a tile."""
        if self.config.splits > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    @cute.jit
    def _write(self, sums, tile, factor, consumer, part):
        """Finish the sums, and store them. Over experts they have been scaled."""
        c = self.config
        scale = sum_scale(c.operands.fmt, c.operands.a_layout) if c.width is None else 1.0
        rows = [tile * c.rows + consumer.row + 8 * r for r in range(2)]
        terms = [self.epilogue.terms(part.alpha, part.bias, row, 1, part.n) for row in rows]
        finish = [self.epilogue.finisher(factor, one, scale) for one in terms]
        first_token = part.token_tile * c.tokens
        for j in range_constexpr(c.tokens // TILE_TOKENS):
            values = [finish[i // 2](sums[4 * j + i], 0) for i in range(4)]
            for r in range_constexpr(2):
                # Two tokens of a row of the weight; other lanes have the other seven rows.
                pair = values[2 * r : 2 * r + 2]
                if const_expr(self.out_dtype is Float32):
                    n = tile * c.rows + consumer.row + 8 * r
                    for e in range_constexpr(2):
                        token = first_token + 8 * j + consumer.quad * 2 + e
                        if (n < part.n) & (token < part.m):
                            self._store(token, n, [ptx.bits_of(pair[e])], 1, part)
                else:
                    word = ptx.transpose_8x8(pack(pair, self.out_dtype)[0])
                    token = first_token + 8 * j + consumer.lane // 4
                    n = tile * c.rows + consumer.row - consumer.lane // 4 + 8 * r + consumer.quad * 2
                    if (n < part.n) & (token < part.m):
                        self._store(token, n, [word], 2, part)

    def _store(self, token, n, words: list, divby: int, part) -> None:
        offset = cute.assume(Int64(token) * part.n + n, divby=divby)
        to = cute.recast_ptr(part.out.iterator + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(to, cute.make_layout(len(words))))
