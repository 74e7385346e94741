"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import clear, load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async, next_stage, release
from torch_cute_ops.kernels.common.experts.factors import factor_counts, factors_argument
from torch_cute_ops.kernels.common.experts.lists import TokenLister, TokenLists
from torch_cute_ops.kernels.common.experts.units import ExpertUnits, UnitLists
from torch_cute_ops.kernels.common.fp4.activations import QUAD, Activations
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M, K_TILE, SCALE_TILE_ROWS
from torch_cute_ops.kernels.common.fp4.mma import KTileMma
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_gated_experts.config import (
    ARRANGED,
    GAP,
    MAX_PARTS,
    WARPS,
    Arguments,
    Config,
)
from torch_cute_ops.kernels.fp4_gated_experts.epilogue import GatedEpilogue, Outputs
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WARP = 32


class Share(NamedTuple):
    """A worker's share of the GEMM, and the operands.

    Attributes:
        m, n: rows of the activations, and of the weight.
        worker, workers: the CTA among those of its tile of tokens; their number.
        siblings: neighbours that have the slices of the same tiles of scales.
        tile: the tile of tokens.
        experts, width: number of experts, and columns of the result of one.
        routing: which pairs are computed.
        lists: what the other kernel has listed.
        outputs: what sums are finished with, and go to.
        slices: slices of an expert.
        left: what workers leave for others: sums, and flags; ``None`` with one part of k.
        begin, end: its share of the parts of all its siblings' tasks.
    """

    m: Int32
    n: Int32
    worker: Int32
    workers: Int32
    tile: Int32
    experts: Int32
    width: Int32
    routing: cute.Tensor
    lists: TokenLists
    outputs: Outputs
    slices: Int32
    siblings: Int32
    left: tuple | None
    begin: Int32 | None = None
    end: Int32 | None = None


class Smem(NamedTuple):
    """Shared memory: the stages of codes and scales, of the gate and of up in turn, and of activations (``tokens``);
    sums of a unit, and its results (``values``); the lists of ``units``; and barriers, of which a stage's are full, or
    free, and a warp's says that it may add its sums."""

    codes: cute.Pointer
    tokens: cute.Pointer
    scales: cute.Pointer
    sums: cute.Pointer
    values: cute.Pointer
    units: UnitLists
    full: cute.Pointer
    free: cute.Pointer
    turns: cute.Pointer


class Task(NamedTuple):
    """A task of a worker: its unit and its slice; the first of its parts of k that the worker has, and the one behind
    the last."""

    unit: Int32
    slice_: Int32
    first: Int32
    last: Int32


class Consumer(NamedTuple):
    """A thread of a consumer warp.

    Attributes:
        lane: index in the warp.
        leads: whether it arrives at barriers for its warp, 1 or 0.
        slot, band: which chunks, and which rows its warp has.
        column: its column of the slice.
        is_last: whether its warp is the last of those that have the same rows, which finishes tasks.
    """

    lane: Int32
    leads: Uint32
    slot: Int32
    band: Int32
    column: Int32
    is_last: Boolean


class FP4GatedExpertsKernel:
    """The kernels of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.ring = WeightStages(config.chunks, 2 * config.stages)
        self.activations = Activations(config.arranged)
        self.lister = TokenLister(config.lists, self.activations)
        self.units = ExpertUnits(config.tokens, config.group)
        self.mma = KTileMma(self.ring, config.arranged, config.group, config.stages, config.width, config.token_pitch)
        self.epilogue = GatedEpilogue(config)

    def arguments(self) -> Arguments:
        m, experts, rows = Dim("m"), Dim("experts"), Dim("rows", divisibility=128)
        a, a_scale = self.activations.arguments()
        half, blocks = Dim("k_bytes", divisibility=16), Dim("blocks", divisibility=16)
        b = TensorArg("Uint8", (experts, rows, half), (Dim("b_stride", 16, bits=64), half, 1), align=16)
        _, b_scale = self.ring.arguments(rows)
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
            workers=ScalarArg("Int32"),
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
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        y,
        scale,
        workspace,
        workers: Int32,
        stream,
    ):
        c = self.config
        tiles = cute.ceil_div(a.shape[0], c.tokens)
        experts = routing.shape[1]
        m = a.shape[0]
        # As in ``Config.workspace_bytes``
        row_bytes = c.k_chunks * self.lister.token_bytes
        arranged = cute.make_tensor(workspace.iterator, cute.make_layout((m, row_bytes), stride=(row_bytes, 1)))
        after = workspace.iterator + cute.assume(Int64(m) * row_bytes, divby=row_bytes)
        pairs = counts = left = None
        if const_expr(not c.scans):
            _, pairs, after = self.lister.parts(after, tiles, experts)
        if const_expr(c.parts > 1):
            size = Int64(tiles * workers) * c.unit_bytes
            left = cute.make_tensor(after, cute.make_layout((size,)))
            after = after + cute.assume(size, divby=16)
        words = cute.recast_ptr(after, dtype=Int32)
        if const_expr(not c.scans):
            counts = cute.make_tensor(words, cute.make_layout((tiles * experts,)))
            words = words + tiles * experts
        if const_expr(c.parts > 1):
            left = left, cute.make_tensor(words, cute.make_layout((tiles * workers * c.bands,)))
        lists = TokenLists(arranged, pairs, counts)
        pieces = Int64(m) * (c.k_chunks * self.activations.pieces)
        if const_expr(c.scans):
            grid = cute.ceil_div(Int32(pieces), c.lists.threads), Int32(1), Int32(1)
        else:
            threads = Int64(experts) * tiles * (c.lists.threads * ARRANGED)
            parts = Int32(cutlass.min((pieces + threads - 1) // threads, Int64(MAX_PARTS)))
            grid = experts, tiles, parts
        gate = (swiglu_alpha, swiglu_beta, swiglu_limit) if const_expr(c.finish.swiglu) else None
        outputs = Outputs(alpha, bias, global_scale, y, scale, gate)
        read = a, a_scale, b, b_scale, routing, alpha, bias, global_scale
        listed = ctas_unless_overlapping(grid[0], (y, scale, workspace), read)
        self.list_kernel(a, a_scale, routing, lists, left).launch(
            grid=[listed, *grid[1:]], block=[c.lists.threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        self.kernel(self._weight_maps(b, b_scale), routing, lists, left, outputs).launch(
            grid=[workers, tiles, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    def _weight_maps(self, b, b_scale) -> tuple:
        """The tensor maps of the weight, whose experts' rows follow each other."""
        experts, rows, half = b.shape
        b = cute.make_tensor(b.iterator, cute.make_layout((half, experts * rows), stride=(1, half)))
        if self.config.operands.layout.is_linear:
            blocks = b_scale.shape[2]
            matrix = cute.make_layout((experts * rows, blocks), stride=(blocks, 1))
            b_scale = cute.make_tensor(b_scale.iterator, matrix)
        return self.ring.maps(b, b_scale)

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, routing, lists, left):
        """List the tokens of a tile that are routed to an expert, in their order; rearrange the activations, and zero
        the flags of what workers leave."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        expert, tile, part = cute.arch.block_idx()
        experts, tiles, parts = cute.arch.grid_dim()
        m = a.shape[0]
        # The next kernel may start to read weights and the routing.
        pdl_start(c.pdl)
        thread = ((part * tiles + tile) * experts + expert) * c.lists.threads + tid
        threads = experts * tiles * parts * c.lists.threads
        if const_expr(left is not None):
            flags = left[1]
            for i in range(thread, flags.shape[0], threads):
                flags[i] = Int32(0)
        pieces = self.activations.pieces
        for i in range(thread, m * (c.k_chunks * pieces), threads):
            piece, chunk, token = i % pieces, i // pieces % c.k_chunks, i // (pieces * c.k_chunks)
            start = chunk * K_TILE
            words = self.activations.read(a, a_scale, token, start, c.width - start, piece)
            self.activations.store_row(words, piece, self._row_at(lists.tiles, token, chunk))
        if const_expr(not c.scans):
            first_token = tile * c.tokens
            # Every part of an expert stores the same.
            self.lister.find(routing, lists, tile, expert, experts, m, lambda token: first_token + token)

    def _row_at(self, arranged, token, chunk) -> cute.Pointer:
        """Where the workspace has a chunk of a token."""
        at = Int64(token) * self.config.k_chunks + chunk
        return arranged.iterator + cute.assume(at * self.lister.token_bytes, divby=self.lister.token_bytes)

    # GEMM

    @cute.kernel
    def kernel(self, weight, routing, lists, left, outputs):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        worker, tile, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        experts = routing.shape[1]
        width = outputs.y.shape[1] * (2 if const_expr(self.epilogue.is_fp4) else 1) // experts
        slices = width // c.columns
        siblings = Int32(max(1, SCALE_TILE_ROWS // c.columns))
        siblings = ptx.select((slices % siblings == 0) & (workers % siblings == 0), siblings, Int32(1))
        share = Share(
            m=routing.shape[0],
            n=experts * width * 2,
            worker=worker,
            workers=workers,
            tile=tile,
            experts=experts,
            width=width,
            routing=routing,
            lists=lists,
            outputs=outputs,
            slices=slices,
            siblings=siblings,
            left=left,
        )
        smem = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # One arrival for the gate's rows, one for up's, one for the activations
                cute.arch.mbarrier_init(smem.full + i, 3)
                cute.arch.mbarrier_init(smem.free + i, c.bands)
            for i in range_constexpr(WARPS):
                cute.arch.mbarrier_init(smem.turns + i, 1)
                if const_expr(c.slots > 1 and i % c.slots == 0):
                    # Before the first sums there are none.
                    cute.arch.mbarrier_arrive(smem.turns + i)
        cute.arch.mbarrier_init_fence()
        # Of the activations a unit that is not full overwrites only some.
        clear(smem.tokens, c.stages * self.mma.activation_bytes, tid, c.threads)
        if const_expr(c.pdl and not c.scans):
            cute.arch.griddepcontrol_wait()
        self.units.gather(routing, lists.counts, tile, share.m, tid, warp, WARPS, c.threads, (None, None), smem.units)
        # Lower workers have later shares: what a worker waits for, one before it has.
        parts = smem.units.total[0] * (slices // siblings) * c.parts
        shares = workers // siblings
        number, each, more = shares - 1 - worker // siblings, parts // shares, parts % shares
        begin = number * each + cutlass.min(number, more)
        share = share._replace(begin=begin, end=begin + each + Int32(number < more))
        if warp >= WARPS:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < WARPS + c.slots:
                self._feed(warp - WARPS, self.ring.open(weight, smem.codes, smem.scales), share, smem)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            if const_expr(self.epilogue.is_fp4 and not c.finish.out_layout.is_linear):
                # While the first chunks are on their way. The kernels before the other one have ended.
                _, tiles, _ = cute.arch.grid_dim()
                threads, cta = Int32(WARPS * WARP), tile * workers + worker
                self.epilogue.clear_padding(outputs, share.m, cta * threads + tid, tiles * workers * threads)
            self._multiply(warp, tid, share, smem)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        tokens = base + 2 * c.stages * self.ring.code_bytes
        scales = tokens + c.stages * self.mma.activation_bytes
        sums = scales + 2 * c.stages * self.ring.scale_bytes
        values = sums + c.sum_bytes
        units, end = self.units.lists(values + c.value_bytes)
        barriers = cute.recast_ptr(end, dtype=Int64)
        return Smem(
            codes=base,
            tokens=tokens,
            scales=scales,
            sums=sums,
            values=values,
            units=units,
            full=barriers,
            free=barriers + c.stages,
            turns=barriers + 2 * c.stages,
        )

    # A task is a unit and a slice of its expert's rows. Slot s has chunks s, s + slots, ... of every task.

    def _tasks(self, share) -> tuple:
        """The first task of a worker and the one behind its last, for ``_task``."""
        parts = self.config.parts
        return share.begin // parts, ptx.select(share.begin < share.end, (share.end + parts - 1) // parts, Int32(0))

    def _task(self, number, share) -> Task:
        """A task of all siblings' ones that a worker has. The earlier parts of the shares are the later parts of k."""
        parts = self.config.parts
        groups = share.slices // share.siblings
        unit, slice_ = number // groups, number % groups * share.siblings + share.worker % share.siblings
        if parts == 1:
            return Task(unit, slice_, Int32(0), Int32(1))
        first = parts - cutlass.min(share.end - number * parts, Int32(parts))
        last = parts - cutlass.max(share.begin - number * parts, Int32(0))
        return Task(unit, slice_, first, last)

    def _chunks(self, first, last, slot) -> tuple:
        """A slot's first chunk of the parts from ``first`` to ``last``, and where they end."""
        c = self.config
        begin, end = (part * c.k_chunks // c.parts for part in (first, last))
        return begin + (slot + c.k_chunks * c.slots - begin) % c.slots, end

    @cute.jit
    def _feed(self, slot, weight, share, smem):
        """The producer warp of a slot: its chunks of the weight, and of the rows of activations that the other kernel
        has rearranged; the first chunks of the weight before that, where it may (``unit_lists.SCANNED``)."""
        c = self.config
        depth = c.stages // c.slots
        first = slot * depth
        loaded = Int32(0)
        if const_expr(c.pdl and c.scans):
            ahead, end = self._tasks(share)
            of = Int32(0)
            while (ahead < end) & (loaded < depth):
                task = self._task(ahead, share)
                of = self.units.index_of(task.unit, of, smem.units)
                begin, behind = self._chunks(task.first, task.last, slot)
                for chunk in range(begin, behind, c.slots):
                    if loaded < depth:
                        self._load_weight(of, task, chunk, first + loaded, weight, share, smem)
                        loaded += 1
                ahead += 1
            cute.arch.griddepcontrol_wait()
        lane = cute.arch.lane_idx()
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        done, handed, index = Int32(0), Int32(0), Int32(0)
        first_task, tasks_end = self._tasks(share)
        for number in range(first_task, tasks_end):
            task, units = self._task(number, share), smem.units
            index = self.units.index_of(task.unit, index, units)
            position = (task.unit - units.begins[index]) * c.group
            tokens = cutlass.min(units.counts[index] - position, Int32(c.group))
            said = self._said_of(share, units.experts[index], position, lane, lane < tokens)
            token = self._token_of(said, share, position, lane)
            own = None
            if const_expr(not c.by_warp):
                # Of each eight tokens that of four lanes; one that exists
                own = [
                    cute.arch.shuffle_sync(token, cutlass.min(i * ATOM_M + lane // QUAD, tokens - 1))
                    for i in range(c.group // ATOM_M)
                ]
            begin, behind = self._chunks(task.first, task.last, slot)
            for chunk in range(begin, behind, c.slots):
                if done >= loaded:
                    free = smem.free + (first + stage)
                    if const_expr(not c.by_warp):
                        # No stage to fill: time to hand over what has been copied.
                        if (done > handed) & ~ptx.has_passed(free, parity):
                            self._hand_over(first, done - handed, 0, stage, lane, smem)
                            handed = done
                    ptx.wait(free, parity)
                    self._load_weight(index, task, chunk, first + stage, weight, share, smem)
                at = (first + stage) * self.mma.activation_bytes
                target = smem.tokens + cute.assume(at, divby=self.mma.activation_bytes)
                if const_expr(c.by_warp):
                    full = smem.full + (first + stage)
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, tokens * self.lister.token_bytes)
                    if lane < tokens:
                        to = target + cute.assume(lane * self.mma.pitch, divby=GAP)
                        row = self._row_at(share.lists.tiles, token, chunk)
                        ptx.copy_bulk(to, row, self.lister.token_bytes, full)
                    cute.arch.sync_warp()
                else:
                    for i in range_constexpr(c.group // ATOM_M):
                        if i * ATOM_M < tokens:
                            row = self._row_at(share.lists.tiles, own[i], chunk)
                            exists = i * ATOM_M + lane // QUAD < tokens
                            to = target + i * (ATOM_M * self.lister.token_bytes)
                            self.activations.copy_rows(to, row, exists, lane)
                    cute.arch.cp_async_commit_group()
                done += 1
                stage, parity = next_stage(stage, parity, depth)
                if const_expr(not c.by_warp):
                    if done - handed > c.lag:
                        self._hand_over(first, done - handed, c.lag, stage, lane, smem)
                        handed = done - c.lag
        if const_expr(not c.by_warp):
            self._hand_over(first, done - handed, 0, stage, lane, smem)

    @cute.jit
    def _hand_over(self, first, started, keep: cutlass.Constexpr[int], stage, lane, smem):
        """Wait for the activations of the chunks that were ``started``, but for the last ``keep`` of them, and say that
        they are there. ``stage`` is the one behind the last, in the ring from ``first`` on."""
        c = self.config
        depth = c.stages // c.slots
        cute.arch.cp_async_wait_group(keep)
        # Each lane has waited for its own copies; wgmma reads what all have copied.
        fence_async()
        cute.arch.sync_warp()
        for i in range(started - keep, unroll=1):
            ptx.arrive_if(smem.full + (first + (stage + depth - started + i) % depth), Uint32(lane == 0))

    def _said_of(self, share, expert, position, lane, exists) -> Uint32:
        """Load what says which row a unit's ``lane``-th token is, if there is such a token, for ``_token_of``. The unit
        begins at ``position`` of the expert's tokens."""
        if self.config.scans:
            row = share.tile * self.config.tokens + lane
            there = (lane < self.config.tokens) & (row < share.m)
            at = share.routing.iterator + share.routing.layout((row, expert))
            return ptx.load_if(at, there, 1)[0]
        place = self.lister.entry(share.tile, expert, share.experts) + position
        words = cute.recast_ptr(share.lists.pairs.iterator, dtype=Uint32) + place * 2 + lane * 2
        return ptx.load_if(words, exists, 1)[0]

    def _token_of(self, said, share, position, lane) -> Int32:
        """The row of a unit's ``lane``-th token, by what its warp's lanes have loaded; anything, if there is none."""
        if not self.config.scans:
            return Int32(said)
        # Lane i knows whether the tile's i-th token is one of the expert's: the one with ``left`` of these before it
        routed = Uint32(cute.arch.vote_ballot_sync(factor_counts(ptx.float_of(said))))
        left, token = position + lane, Int32(0)
        for step in (16, 8, 4, 2, 1):
            before = Int32(cute.arch.popc((routed >> Uint32(token)) & Uint32((1 << step) - 1)))
            is_behind = left >= before
            left = ptx.select(is_behind, left - before, left)
            token = ptx.select(is_behind, token + step, token)
        return share.tile * self.config.tokens + token

    def _load_weight(self, index, task, chunk, stage, weight, share, smem) -> None:
        """Start the copies of a chunk of the weight."""
        c = self.config
        expert = smem.units.experts[index]
        blocks = Int32(c.width // c.operands.fmt.block_size)
        for half in range(2):
            tile = (expert * 2 + half) * share.slices + task.slice_
            self.ring.load(tile, chunk, 0, 2 * stage + half, smem.full + stage, weight, share.n, blocks)

    @cute.jit
    def _multiply(self, warp, tid, share, smem):
        """A consumer warp: 8 rows of the gate and 8 of up of every task, and the chunks of a slot."""
        c = self.config
        if const_expr(c.pdl and c.scans):
            cute.arch.griddepcontrol_wait()
        slot, band, lane = warp // c.bands, warp % c.bands, tid % WARP
        consumer = Consumer(
            lane=lane,
            leads=Uint32(lane == 0),
            slot=slot,
            band=band,
            column=band * 8 + lane // 4,
            is_last=slot == c.slots - 1,
        )
        chain = smem.turns + band * c.slots
        depth = c.stages // c.slots
        first = slot * depth
        sums, before = (cute.make_rmem_tensor((c.group // 2,), Float32) for _ in range(2))
        start = self.mma.start_of(smem.tokens)
        stage, parity, turn, index = Int32(0), Int32(0), Int32(0), Int32(0)
        first_task, tasks_end = self._tasks(share)
        for number in range(first_task, tasks_end):
            task, units = self._task(number, share), smem.units
            index = self.units.index_of(task.unit, index, units)
            expert = units.experts[index]
            first_column = task.slice_ * c.columns
            position = (task.unit - units.begins[index]) * c.group
            exists = consumer.is_last & (lane < units.counts[index] - position)
            said = self._said_of(share, expert, position, lane, exists)
            terms = self.epilogue.terms(expert, first_column, share, consumer)
            for part in range(task.first, task.last):
                if const_expr(c.by_warp or c.k_chunks // c.parts < c.slots):
                    sums.fill(0.0)
                begin, behind = self._chunks(part, part + 1, slot)
                last = stage
                for chunk in range(begin, behind, c.slots):
                    ptx.wait(smem.full + (first + stage), parity)
                    at = first + stage, first + last
                    adds = chunk > begin
                    self._multiply_chunk(start, chunk, *at, adds, expert, first_column, sums, consumer, share, smem)
                    last = stage
                    stage, parity = next_stage(stage, parity, depth)
                    if const_expr(c.by_warp):
                        release(smem.free + (first + last), consumer.leads)
                if const_expr(not c.by_warp):
                    warpgroup.wait_group(0)
                    release(smem.free + (first + last), consumer.leads, begin < behind)
                if const_expr(c.slots > 1):
                    # After the warp with the same rows that has the chunks, the part or the task before
                    ptx.wait(chain + slot, turn)
                    turn ^= 1
                self._add_up(sums, before, part, task, consumer, share, smem)
                if const_expr(c.slots > 1):
                    cute.arch.sync_warp()
                    ptx.arrive_if(chain + (slot + 1) % c.slots, consumer.leads)
            if consumer.is_last & (task.last == c.parts):
                start_column = expert * share.width + first_column
                token = ptx.select(exists, self._token_of(said, share, position, lane), Int32(-1))
                self.epilogue.finish_unit(sums, token, terms, start_column, consumer, smem.values, share.outputs)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    def _multiply_chunk(
        self, start, chunk, stage, before, adds, expert, first_column, sums, consumer, share, smem
    ) -> None:
        """Add a chunk to the sums, or with the first of a part replace them; free the stage ``before``, of the chunk
        before."""
        c = self.config
        is_linear, column = c.operands.layout.is_linear, consumer.column
        rows = []
        for half in range(2):
            # A tile of scales has the rows of several slices.
            inside = ((expert * 2 + half) * share.width + first_column) % SCALE_TILE_ROWS
            rows.append((2 * stage + half, column, column if is_linear else inside + column))

        def free_before() -> None:
            release(smem.free + before, consumer.leads, adds)

        done = free_before if c.k_chunks > c.slots else None
        self.mma.multiply(start, 0, 1, chunk, stage, adds, rows, consumer.lane, sums, smem, done)

    @cute.jit
    def _add_up(self, sums, before, part, task, consumer, share, smem):
        """Add the sums of the slots and of the parts of k before to these ones, and leave them for the next, unless
        these are the last: in shared memory, or if there is one slot, in ``before``."""
        c = self.config
        begins = consumer.slot == 0
        if const_expr(c.parts > 1):
            if begins & (part == task.first) & (part > 0):
                there, flag = self._left(share.worker - share.siblings, consumer, share)
                ready = ptx.load_acquire(flag)
                while ready == Uint32(0):
                    ready = ptx.load_acquire(flag)
                self._add(sums, there, consumer)
        if const_expr(c.slots == 1 and c.parts > 1):
            if part > task.first:
                for i in range_constexpr(c.group // 2):
                    sums[i] = ptx.add_rn(before[i], sums[i])
            for i in range_constexpr(c.group // 2):
                before[i] = sums[i]
        if const_expr(c.slots > 1):
            if ~begins | (part > task.first):
                self._add(sums, smem.sums, consumer)
            if ~consumer.is_last | (part + 1 < task.last):
                self._leave(sums, smem.sums, consumer)
        if const_expr(c.parts > 1):
            if consumer.is_last & (part + 1 == task.last) & (task.last < c.parts):
                there, flag = self._left(share.worker, consumer, share)
                self._leave(sums, there, consumer)
                cute.arch.sync_warp()
                if consumer.lane == 0:
                    ptx.store_release(flag, Uint32(1))

    def _left(self, worker, consumer, share) -> tuple[cute.Pointer, cute.Pointer]:
        """Where a worker leaves sums for another one, and the flag that says so of those of a consumer's rows."""
        sums, flags = share.left
        slot = share.tile * share.workers + worker
        at = sums.iterator + cute.assume(Int64(slot) * self.config.unit_bytes, divby=16)
        return at, flags.iterator + (slot * self.config.bands + consumer.band)

    def _four(self, sums_at, group: int, consumer) -> cute.Tensor:
        """Where a lane's sums of eight tokens lie, of all that are at ``sums_at``."""
        at = ((consumer.band * (self.config.group // 8) + group) * WARP + consumer.lane) * 16
        words = cute.recast_ptr(sums_at + cute.assume(at, divby=16), dtype=Uint32)
        return cute.make_tensor(words, cute.make_layout(4))

    def _add(self, sums, sums_at, consumer) -> None:
        """Add a lane's sums to those at ``sums_at``."""
        for group in range(self.config.group // 8):
            for i, word in enumerate(load_words(self._four(sums_at, group, consumer))):
                sums[4 * group + i] = ptx.add_rn(ptx.float_of(word), sums[4 * group + i])

    def _leave(self, sums, sums_at, consumer) -> None:
        """Store a lane's sums to ``sums_at``."""
        for group in range(self.config.group // 8):
            words = [ptx.bits_of(sums[4 * group + i]) for i in range(4)]
            store_words(words, self._four(sums_at, group, consumer))
