"""The device code; the package's docstring tells the roles and the data path."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.activation_tiles.config import CHUNK, TILE_BYTES, TILE_TOKENS
from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.activations import Activations
from torch_cute_ops.kernels.common.cluster_sums import leave_sums, write_sums
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.expert_factors import factor_counts, factors_argument
from torch_cute_ops.kernels.common.fp4_weights import sum_scale
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.warp_products import multiply_word
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS, WARPGROUP
from torch_cute_ops.kernels.common.warpgroup_products import warpgroup_products
from torch_cute_ops.kernels.common.weight_ring import WeightRing, next_stage
from torch_cute_ops.kernels.fp4_wgmma.config import (
    QUARTERS,
    Config,
)
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg

COLLECTED = 8  # groups of eight tokens whose sums are added up at once
REGISTERS = 2**16  # of an SM
BAND = 8  # tiles of tokens that run side by side
HELPERS = 3  # warps that put activations in order: what the copying warp leaves of its warpgroup
TOGETHER = 2  # groups of eight tokens that such a warp reads before it writes


class FP4WgmmaKernel:
    """The kernel of one ``Config``.

    Its methods pass on what a thread knows: ``t``, the sizes and this CTA's part; ``s``, where things lie in shared
    memory; ``w``, the place in a warpgroup that multiplies.
    """

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]
        self.out_dtype = DSL_DTYPES[config.out_dtype]
        self.ring = WeightRing(config.chunks, config.stages)
        self.activations = Activations(config.arranged)
        self.arrange = ActivationTilesKernel(config.arranged)

    def arguments(self) -> tuple[Argument, ...]:
        c = self.config
        a, a_scale = self.activations.arguments()
        m, n = Dim("m"), Dim("n", divisibility=8)
        return (
            a,
            a_scale,
            *self.ring.arguments(n),
            self._factors(m),
            TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            None if c.arranges else TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            ScalarArg("Int32"),
            ScalarArg("Int32"),
        )

    def _factors(self, m: Dim) -> TensorArg | None:
        """One, or for each token and expert."""
        if self.config.width is not None:
            return factors_argument(m)
        return TensorArg("Float32", (1,), (1,), align=4) if self.config.has_alpha else None

    @cute.jit
    def __call__(self, a, a_scale, b, scale, alpha, out, workspace, workers: Int32, shares: Int32, stream):
        c = self.config
        token_tiles = cute.ceil_div(out.shape[0], c.tokens)
        shared = None
        if const_expr(not c.arranges):
            shared = self._share(workspace, token_tiles, cute.ceil_div(b.shape[0], self.ring.line), workers, shares)
            by_expert = alpha if const_expr(c.width is not None) else None
            self.arrange(a, a_scale, shared[0], shared[3], by_expert, shared[1], stream)
        if const_expr(c.splits > 0):
            workers = cute.ceil_div(b.shape[1], c.rows) * c.splits
        self.kernel(a, a_scale, shared, self.ring.maps(b, scale), alpha, out, workers).launch(
            grid=[workers * token_tiles, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _share(self, workspace, token_tiles, chunks, workers, shares) -> tuple:
        """The parts of the workspace, with sizes as in ``Config.workspace_bytes``: activations in order, factors of
        experts, sums that are left for another CTA, and flags that say so."""
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
    def kernel(self, a, a_scale, shared, weight, alpha, out, workers):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        n, half, _ = weight[1].shape
        chunks = cute.ceil_div(half, self.ring.line)
        row_tiles = cute.ceil_div(n, c.rows)
        token_tiles = cute.ceil_div(out.shape[0], c.tokens)
        # Tiles of tokens in bands of ``BAND``; in a band, all of a worker, or cluster, before the next.
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
        t = SimpleNamespace(
            n=n,
            m=out.shape[0],
            chunks=chunks,
            blocks=half * 2 // c.fmt.block_size,
            token_tile=token_tile,
            token_tiles=token_tiles,
            worker=worker,
            workers=workers,
            begin=begin,
            end=end,
            units=units,
            a=a,
            a_scale=a_scale,
            out=out,
            tiles=None if c.arranges else shared[0],
            factors=None if c.arranges else shared[1],
            partials=None if c.arranges else shared[2],
            flags=None if c.arranges else shared[3],
        )
        s = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                cute.arch.mbarrier_init(s.full + i, 1)
                cute.arch.mbarrier_init(s.free + i, 4 * c.groups)
            for i in range_constexpr(c.token_stages):
                cute.arch.mbarrier_init(s.tokens_full + i, 1)
                cute.arch.mbarrier_init(s.tokens_free + i, 4 * c.groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp >= 4 * c.groups:
            self._take_registers(c.registers[1])
            if warp == 4 * c.groups:
                self._produce(self.ring.open(weight, s.codes, s.scales), t, s)
            elif const_expr(c.arranges):
                self._arrange(warp - 4 * c.groups - 1, tid % 32, t, s)
        else:
            self._take_registers(c.registers[0])
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            factor = Float32(1.0)
            if const_expr(c.has_alpha and c.width is None):
                factor = alpha[0]
            self._consume(factor, tid, t, s)

    def _take_registers(self, count: int) -> None:
        """What a thread of the warpgroup shall have from now on."""
        if count > REGISTERS // self.config.threads:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    def _allocate(self) -> SimpleNamespace:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        tokens = base + c.stages * self.ring.code_bytes
        scales = tokens + c.token_stages * c.token_bytes
        factors = scales + c.stages * self.ring.scale_bytes
        barriers = cute.recast_ptr(factors + c.token_stages * c.factor_bytes, dtype=Int64)
        return SimpleNamespace(
            codes=base,
            tokens=tokens,
            scales=scales,
            factors=factors,
            full=barriers,
            free=barriers + c.stages,
            tokens_full=barriers + 2 * c.stages,
            tokens_free=barriers + 2 * c.stages + c.token_stages,
        )

    def _segment(self, unit, t):
        """The part of a tile that ends before ``unit``, of this worker: tile, its first chunk, chunks."""
        tile = (unit - 1) // t.chunks
        first = cutlass.max(t.begin, tile * t.chunks)
        return tile, first - tile * t.chunks, unit - first

    # Copies

    @cute.jit
    def _produce(self, weight, t, s):
        """The copying warp: everything that the worker multiplies, in that order.

        The weight's first stages do not wait for the activations if another kernel puts these in order. That is safe
        because it waits for all kernels before it, and only then lets this one start.
        """
        c = self.config
        loaded = Int32(0)
        if const_expr(c.pdl and c.arranges):
            cute.arch.griddepcontrol_wait()
        elif const_expr(c.pdl):
            unit = t.end
            ahead = cutlass.min(t.end - t.begin, Int32(c.stages))
            while loaded < ahead:
                tile, first, count = self._segment(unit, t)
                for i in range(cutlass.min(count, ahead - loaded)):
                    self.ring.load(tile, first + i, 0, loaded, s.full + loaded, weight, t.n, t.blocks)
                    loaded += 1
                unit -= count
            cute.arch.griddepcontrol_wait()
        # A ring that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        token_stage, token_parity = Int32(0), Int32(1)
        unit = t.end
        done = Int32(0)
        while unit > t.begin:
            tile, first, count = self._segment(unit, t)
            for i in range(count):
                if done >= loaded:
                    ptx.wait(s.free + stage, parity)
                    self.ring.load(tile, first + i, 0, stage, s.full + stage, weight, t.n, t.blocks)
                done += 1
                stage, parity = next_stage(stage, parity, c.stages)
                if const_expr(not c.arranges):
                    for quarter in range_constexpr(0, QUARTERS, c.span):
                        ptx.wait(s.tokens_free + token_stage, token_parity)
                        self._load_tokens(first + i, quarter, token_stage, t, s)
                        token_stage, token_parity = next_stage(token_stage, token_parity, c.token_stages)
            unit -= count

    @cute.jit
    def _arrange(self, helper, lane, t, s):
        """A warp that puts activations in order: every third chunk, from memory to its stage."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        for use in range(helper, t.end - t.begin, HELPERS):
            start = (t.begin % t.chunks + use) * CHUNK
            stage = use % c.token_stages
            base = s.tokens + cute.assume(stage * c.token_bytes, divby=TILE_BYTES)
            groups = c.tokens // TILE_TOKENS
            together = min(groups, TOGETHER)
            # Not unrolled: there are registers for no more.
            for step in cutlass.range(groups // together, unroll=1):
                places = [(step * together + i) * TILE_TOKENS + lane % TILE_TOKENS for i in range(together)]
                piece, pieces = lane // TILE_TOKENS, self.activations.pieces
                items = [(place, after) for place in places for after in range(0, pieces, 32 // TILE_TOKENS)]
                read = []
                for place, after in items:
                    # Beyond m the last token again: its products are not stored.
                    token = cutlass.min(t.token_tile * c.tokens + place, t.m - 1)
                    left = t.blocks * c.fmt.block_size - start
                    read.append(self.activations.read(t.a, t.a_scale, token, start, left, piece, after))
                if step == 0:
                    ptx.wait(s.tokens_free + stage, (use // c.token_stages + 1) % 2)
                for (place, after), words in zip(items, read, strict=True):
                    self.activations.order(words, groups, piece + after, place, base)
            if const_expr(not c.by_warp):
                # To products of warpgroups, which read shared memory past the stores of this warp.
                fence_async()
            cute.arch.sync_warp()
            ptx.arrive_if(s.tokens_full + stage, Uint32(lane == 0))

    @cute.jit
    def _load_tokens(self, chunk, quarter: int, stage, t, s):
        """Start the copies of a stage of activations, from that quarter of a chunk on; and behind the last one, of the
        expert's factors."""
        c = self.config
        barrier = s.tokens_full + stage
        has_factors = c.width is not None and quarter + c.span == QUARTERS
        with cute.arch.elect_one():
            size = c.token_bytes + (c.factor_bytes if has_factors else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            # The tiles of warps are together for a chunk, those of warpgroups for a quarter of it.
            pieces = 1 if c.by_warp else c.span
            size = c.token_bytes // pieces
            for i in range_constexpr(pieces):
                at = (chunk * QUARTERS + quarter) // c.span * pieces + i
                source = (Int64(at) * t.token_tiles + t.token_tile) * size
                target = stage * c.token_bytes + i * size
                ptx.copy_bulk(
                    s.tokens + cute.assume(target, divby=TILE_BYTES),
                    t.tiles.iterator + cute.assume(source, divby=TILE_BYTES),
                    size,
                    barrier,
                )
            if const_expr(has_factors):
                source = t.factors[None, chunk // (c.width // CHUNK), t.token_tile].iterator
                target = cute.assume(stage * c.factor_bytes, divby=4 * TILE_TOKENS)
                ptx.copy_bulk(s.factors + target, cute.recast_ptr(source, dtype=Uint8), c.factor_bytes, barrier)

    # Products

    @cute.jit
    def _consume(self, factor, tid, t, s):
        """A warpgroup that multiplies: its 64 rows of each of the worker's tiles."""
        c = self.config
        group = tid // WARPGROUP
        lane = tid % 32
        w = SimpleNamespace(
            group=group,
            lane=lane,
            thread=tid % WARPGROUP,
            quad=lane % 4,
            row=group * GROUP_ROWS + tid % WARPGROUP // 32 * 16 + lane // 4,  # and the eighth row after it
            leads=Uint32(lane == 0),
        )
        multiply = None
        if const_expr(not c.by_warp):
            sizes = c.tokens, c.span * CHUNK // QUARTERS, c.token_stages
            multiply = warpgroup_products(self.dtype, *sizes, (0, 1, 2), s.tokens)
        sums = cute.make_rmem_tensor((c.tokens // 2,), Float32)
        # Of all experts, each multiplied by its factor
        totals = cute.make_rmem_tensor((c.tokens // 2,), Float32) if c.width is not None else sums
        state = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        unit = t.end
        while unit > t.begin:
            tile, first, count = self._segment(unit, t)
            # (With experts the first products take their place; but without this ptxas spills.)
            sums.fill(0.0)
            if const_expr(c.width is None):
                for i in range(count):
                    state = self._multiply_chunk(multiply, True, sums, first, i, state, w, t, s)
            else:
                totals.fill(0.0)
                width, i = c.width // CHUNK, Int32(0)
                while i < count:
                    begin = i
                    end = cutlass.min(((first + i) // width + 1) * width - first, count)
                    while i < end:
                        state = self._multiply_chunk(multiply, i > begin, sums, first, i, state, w, t, s)
                        i += 1
                    warpgroup.wait_group(0)
                    self._add_expert(sums, totals, state[4], w, s)
            if const_expr(not c.by_warp):
                warpgroup.wait_group(0)
                ptx.arrive_if(s.tokens_free + state[4], w.leads)
            unit -= count
            if const_expr(c.pdl):
                if unit <= t.begin:
                    cute.arch.griddepcontrol_launch_dependents()
            if const_expr(c.splits > 1):
                self._add_up(totals, tile, factor, tid, w, t, s)
            elif const_expr(c.splits == 1):
                self._write(totals, tile, factor, w, t)
            elif first + count < t.chunks:
                self._leave(totals, w, t)
            else:
                if first > 0:
                    self._collect(totals, tile, w, t)
                self._write(totals, tile, factor, w, t)

    @cute.jit
    def _multiply_chunk(self, multiply, adds, sums, first, i, state, w, t, s):
        """Add the products of the ``i``-th chunk of a segment to the sums; or, unless ``adds``, have them take the
        place of these. ``state``: the stages of codes and of activations, with their parities, and the last stage of
        activations that has been multiplied."""
        c = self.config
        stage, parity, token_stage, token_parity, last = state
        ptx.wait(s.full + stage, parity)
        left = t.blocks - (first + i) * self.ring.blocks
        rows = (w.row, w.row + 8)
        codes = [self.ring.codes(s.codes, stage, row, w.quad) for row in rows]
        factors = [self.ring.factors(s.scales, stage, row, w.quad, left, self.dtype) for row in rows]
        for word in range_constexpr(self.ring.words):
            pairs = self.ring.pairs(codes, factors, word, self.dtype)
            if const_expr(word % (2 * c.span) == 0):
                ptx.wait(s.tokens_full + token_stage, token_parity)
            if const_expr(c.by_warp):
                at = s.tokens + cute.assume(token_stage * c.token_bytes, divby=TILE_BYTES)
                multiply_word(pairs, word, c.tokens, at, c.arranged.token_bytes, w.lane, sums, self.dtype)
            else:
                multiply(pairs, word % (2 * c.span), token_stage, adds if word == 0 else True, sums)
            if const_expr(word == self.ring.words // 2):
                # All lanes have read, since this product has a word of the last load. (An arrival does not wait
                # for loads whose results nothing has used: on an H200 copies overtook them.) Products of warps
                # do not see to it: ptxas puts them, and so the first use of a load, behind the arrival.
                if const_expr(c.by_warp):
                    fence_async()
                cute.arch.sync_warp()
                ptx.arrive_if(s.free + stage, w.leads)
                stage, parity = next_stage(stage, parity, c.stages)
            if const_expr(not c.by_warp):
                # The products of the word before are done, and its registers free.
                warpgroup.wait_group(1)
                if const_expr(word % (2 * c.span) == 0):
                    leads = w.leads
                    if const_expr(word == 0):
                        leads = ptx.select(i > 0, leads, Uint32(0))
                    ptx.arrive_if(s.tokens_free + last, leads)
            if const_expr(word % (2 * c.span) == 2 * c.span - 1):
                if const_expr(c.by_warp):
                    if const_expr(not c.arranges):
                        fence_async()
                    cute.arch.sync_warp()
                    ptx.arrive_if(s.tokens_free + token_stage, w.leads)
                last = token_stage
                token_stage, token_parity = next_stage(token_stage, token_parity, c.token_stages)
        return stage, parity, token_stage, token_parity, last

    # Results

    def _add_expert(self, sums, totals, stage, w, s) -> None:
        """Multiply an expert's sums by its factors, which are beside that stage of activations, and add them to the
        totals. A factor of zero adds nothing."""
        c = self.config
        scale = Float32(sum_scale(c.fmt, c.a_layout))
        for j in range(c.tokens // TILE_TOKENS):
            at = s.factors + cute.assume(stage * c.factor_bytes + (j * TILE_TOKENS + w.quad * 2) * 4, divby=8)
            pair = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
            for e in range(2):
                factor = ptx.float_of(pair[e])
                counts = factor_counts(factor)
                for r in range(2):
                    at = 4 * j + 2 * r + e
                    totals[at] = ptx.fma_if(counts, factor, ptx.mul_rn(sums[at], scale), totals[at])
        # All lanes have read, when the first frees the stage.
        fence_async()
        cute.arch.sync_warp()

    def _partials_of(self, worker, w, t) -> cute.Tensor:
        """A thread's sums of a worker in memory, (4, tokens / 8)."""
        c = self.config
        slot = (Int64(t.token_tile) * t.workers + worker) * (c.rows * c.tokens)
        start = slot + (w.group * WARPGROUP + w.thread) * 4
        layout = cute.make_layout((4, c.tokens // TILE_TOKENS), stride=(1, c.groups * WARPGROUP * 4))
        return cute.make_tensor(
            cute.recast_ptr(t.partials.iterator + cute.assume(start, divby=4), dtype=Uint32), layout
        )

    def _flag(self, worker, w, t) -> cute.Pointer:
        """Whether a worker's warpgroup has left its sums."""
        c = self.config
        return t.flags.iterator + ((t.token_tile * t.workers + worker) * c.groups + w.group)

    def _meet(self, w) -> None:
        """A barrier of the warpgroup."""
        cute.arch.barrier(barrier_id=1 + w.group, number_of_threads=WARPGROUP)

    @cute.jit
    def _leave(self, sums, w, t):
        """Leave this worker's sums for the one that has the end of the tile."""
        to = self._partials_of(t.worker, w, t)
        for j in range_constexpr(self.config.tokens // TILE_TOKENS):
            store_words([ptx.bits_of(sums[4 * j + i]) for i in range(4)], to[None, j])
        self._meet(w)
        if w.thread == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(self._flag(t.worker, w, t), Uint32(1))

    @cute.jit
    def _collect(self, sums, tile, w, t):
        """Add the sums that others have left of this tile, in the order of k; this worker's come last."""
        c = self.config
        count = c.tokens // TILE_TOKENS
        # The worker that has the tile's first chunk: portions are rounded down.
        start = Int64(tile) * t.chunks
        first = Int32(((start + 1) * t.workers - 1) // t.units)
        for worker in range(first, t.worker):
            flag = self._flag(worker, w, t)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        # A part at a time: there are registers for no second copy of all sums.
        step = min(count, COLLECTED)
        for j in range_constexpr(0, count, step):
            total = cute.make_rmem_tensor((4 * step,), Float32)
            total.fill(0.0)
            for worker in range(first, t.worker):
                part = self._partials_of(worker, w, t)
                for i in range_constexpr(step):
                    for e, word in enumerate(load_words(part[None, j + i])):
                        total[4 * i + e] = total[4 * i + e] + ptx.float_of(word)
            for i in range_constexpr(4 * step):
                sums[4 * j + i] = total[i] + sums[4 * j + i]

    @cute.jit
    def _add_up(self, sums, tile, factor, tid, w, t, s):
        """Add the sums of the cluster's CTAs, and store them."""
        c = self.config
        threads = c.groups * WARPGROUP
        # All have read the codes, whose place the sums take.
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        leave_sums(c.sum_tile, sums, s.codes, w.row, w.quad)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        at = t.token_tile * c.tokens, tile * c.rows
        scale = Float32(sum_scale(c.fmt, c.a_layout)), factor
        write_sums(c.sum_tile, c.splits, threads, scale, t.out, s.codes, t.worker % c.splits, tid, *at)
        # No CTA may end while another still reads its sums.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _write(self, sums, tile, factor, w, t):
        """Scale the sums, round and store them; those of experts have been scaled."""
        c = self.config
        scale = sum_scale(c.fmt, c.a_layout) if c.width is None else 1.0
        first_token = t.token_tile * c.tokens
        for j in range_constexpr(c.tokens // TILE_TOKENS):
            values = [ptx.mul_rn(ptx.mul_rn(sums[4 * j + i], Float32(scale)), factor) for i in range(4)]
            for r in range_constexpr(2):
                # Two tokens of a row, and the other seven rows' in the lanes beside.
                pair = values[2 * r : 2 * r + 2]
                if const_expr(self.out_dtype is Float32):
                    n = tile * c.rows + w.row + 8 * r
                    for e in range_constexpr(2):
                        token = first_token + 8 * j + w.quad * 2 + e
                        if (n < t.n) & (token < t.m):
                            self._store(token, n, [ptx.bits_of(pair[e])], 1, t)
                else:
                    word = ptx.transpose_8x8(pack(pair, self.out_dtype)[0])
                    token = first_token + 8 * j + w.lane // 4
                    n = tile * c.rows + w.row - w.lane // 4 + 8 * r + w.quad * 2
                    if (n < t.n) & (token < t.m):
                        self._store(token, n, [word], 2, t)

    def _store(self, token, n, words: list, divby: int, t) -> None:
        offset = cute.assume(Int64(token) * t.n + n, divby=divby)
        to = cute.recast_ptr(t.out.iterator + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(to, cute.make_layout(len(words))))
