"""The device code; the package's docstring describes the roles and the data path."""

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common import pdl, ptx
from torch_cute_ops.kernels.common.activation_layout import TILE_BYTES, TILE_LINE, TILE_TOKENS
from torch_cute_ops.kernels.common.activations import Activations
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.expert_factors import factor_counts, factors_argument
from torch_cute_ops.kernels.common.fp4_weights import sum_scale
from torch_cute_ops.kernels.common.overlap import ctas_unless_overlapping
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.scan import running_sum
from torch_cute_ops.kernels.common.warp_mma import multiply_word
from torch_cute_ops.kernels.common.warpgroup_mma import warpgroup_mma
from torch_cute_ops.kernels.common.weight_ring import WeightRing, next_stage
from torch_cute_ops.kernels.fp4_experts.config import (
    BANDS,
    MAX_EXPERTS,
    PAIR_BYTES,
    ROWS,
    Arguments,
    Config,
)
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WARP = 32


class Share(NamedTuple):
    """A worker's share of the GEMM, and the operands.

    Attributes:
        m, n: sizes of the result.
        worker, workers: the CTA among those of its tile of tokens; their number.
        tile, first_token: the tile of tokens, and its first.
        experts: number of experts.
        tiles, pairs: what the other kernel has listed.
        left: partial sums of workers, and their flags; ``None`` if there are none.
        out: the result.
        slices, begins, ends: the two slices of rows that the worker may have classes of, the one of higher number
            first, since another worker waits for the other's sums; and which classes: those from ``begins`` to
            ``ends``.
        units, first_units: how many units the worker has, and how many of the first slice.
    """

    m: Int32
    n: Int32
    worker: Int32
    workers: Int32
    tile: Int32
    first_token: Int32
    experts: Int32
    tiles: cute.Tensor
    pairs: cute.Tensor
    left: tuple[cute.Tensor, cute.Tensor] | None
    out: cute.Tensor
    slices: tuple
    begins: tuple
    ends: tuple
    units: Int32 | None = None
    first_units: Int32 | None = None


class Smem(NamedTuple):
    """Shared memory: the stages of codes, scales, activations (``tokens``) and pairs; the sums of the tile; the lists
    of ``Lists``; and barriers, of which a stage's are full, or free, and a warp's says that it may add its sums."""

    codes: cute.Pointer
    scales: cute.Pointer
    sums: cute.Pointer
    tokens: cute.Pointer
    pairs: cute.Pointer
    lists: cute.Pointer
    full: cute.Pointer
    free: cute.Pointer
    turns: cute.Pointer


class Lists(NamedTuple):
    """The touched experts, in order: their numbers; where their units begin, and after the last one the number of
    units; their numbers of tokens. And the number of units, in all and of the first slice."""

    experts: cute.Tensor
    begins: cute.Tensor
    counts: cute.Tensor
    total: cute.Tensor
    first: cute.Tensor


class Consumer(NamedTuple):
    """A thread of a consumer warp.

    Attributes:
        lane, quad: index in the warp, and among the four lanes that share a row.
        row: the first of its two rows of the slice; the other is ``row + 8``.
        leads: whether it arrives at barriers for its warp, 1 or 0.
        place: index of its warp among those that have the same rows.
        slot, part: which units it has, and which part of their k.
        chain: the barriers of the warps that have the same rows.
    """

    lane: Int32
    quad: Int32
    row: Int32
    leads: Uint32
    place: Int32
    slot: Int32
    part: Int32
    chain: cute.Pointer


class FP4ExpertsKernel:
    """The kernels of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.operands.dtype]
        self.out_dtype = DSL_DTYPES[config.out_dtype]
        self.ring = WeightRing(config.chunks, config.stages)
        self.activations = Activations(config.arranged)
        self.token_bytes = config.arranged.token_bytes

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        a, a_scale = self.activations.arguments()
        b, b_scale = self.ring.arguments(n)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            alpha=factors_argument(m),
            out=TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            workers=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, out, workspace, workers: Int32, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tokens)
        experts = alpha.shape[1]
        # As in ``Config.workspace_bytes``
        entries = Int64(tiles) * experts * c.capacity
        token_bytes = cute.assume(entries * (c.expert_chunks * self.token_bytes), divby=self.token_bytes)
        pair_bytes = cute.assume(entries * PAIR_BYTES, divby=PAIR_BYTES * TILE_TOKENS)
        pairs = workspace.iterator + token_bytes
        after = pairs + pair_bytes
        left = None
        if const_expr(c.classes > 1):
            sum_bytes = Int64(tiles) * workers * c.sum_bytes
            sums = cute.make_tensor(after, cute.make_layout((sum_bytes,)))
            after = after + cute.assume(sum_bytes, divby=ROWS * 4)
            flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * workers,)))
            left = sums, flags
            after = after + tiles * workers * 4
        lists = (
            cute.make_tensor(workspace.iterator, cute.make_layout((token_bytes,))),
            cute.make_tensor(pairs, cute.make_layout((pair_bytes,))),
            cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * experts,))),
        )
        listed = ctas_unless_overlapping(experts, (out, workspace), (a, a_scale, b, b_scale, alpha))
        self.list_kernel(a, a_scale, alpha, lists, left, out.shape[0]).launch(
            grid=[listed, tiles, 1], block=[c.list_threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        self.kernel(self.ring.maps(b, b_scale, experts), alpha, lists, left, out).launch(
            grid=[workers, tiles, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, alpha, lists, left, m):
        """List the tokens of a tile that are routed to an expert, in their order, with their factors, and rearrange
        their activations."""
        c = self.config
        tiles, pairs, counts = lists
        tid, _, _ = cute.arch.thread_idx()
        expert, tile, _ = cute.arch.block_idx()
        experts, _, _ = cute.arch.grid_dim()
        lane, warp = tid % WARP, tid // WARP
        warps = c.list_threads // WARP
        smem = SmemAllocator()
        found = cute.make_tensor(smem.allocate_array(Int32, warps), cute.make_layout(warps))
        members = cute.make_tensor(smem.allocate_array(Int32, c.capacity), cute.make_layout(c.capacity))
        # The next kernel may start to read weights and factors.
        pdl.start(c.pdl)
        if const_expr(c.classes > 1):
            flags = left[1]
            ctas = experts * cute.arch.grid_dim()[1]
            for i in range((tile * experts + expert) * c.list_threads + tid, flags.shape[0], ctas * c.list_threads):
                flags[i] = Int32(0)
        value = Float32(0.0)
        if (tid < c.tokens) & (tile * c.tokens + tid < m):
            value = alpha[tile * c.tokens + tid, expert]
        ballot = Uint32(cute.arch.vote_ballot_sync(factor_counts(value)))
        if lane == 0:
            found[warp] = Int32(cute.arch.popc(ballot))
        cute.arch.sync_threads()
        before = Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - 1)))
        total = Int32(0)
        for i in range_constexpr(warps):
            before = before + ptx.select(warp > i, found[i], Int32(0))
            total = total + found[i]
        entry = self._entry(tile, expert, experts)
        if factor_counts(value):
            members[before] = tid
            self._store_pair(pairs, entry + before, self._token_offset(tid), value)
        # What is left of the last unit
        if (tid >= total) & (tid < cute.ceil_div(total, c.group) * c.group):
            self._store_pair(pairs, entry + tid, Int32(-1), Float32(0.0))
        if tid == 0:
            counts[tile * experts + expert] = total
        cute.arch.sync_threads()
        pieces = self.activations.pieces
        for i in range(tid, total * (c.expert_chunks * pieces), c.list_threads):
            piece, chunk = i % pieces, i // pieces % c.expert_chunks
            place = i // (pieces * c.expert_chunks)
            token, start = tile * c.tokens + members[place], chunk * c.chunk
            words = self.activations.read(a, a_scale, token, expert * c.width + start, c.width - start, piece)
            to = self._group_at(tiles, entry, chunk, place // TILE_TOKENS * TILE_TOKENS)
            self.activations.store(words, 1, piece, place % TILE_TOKENS, to)

    def _entry(self, tile, expert, experts):
        """Where the list of a tile's tokens of an expert begins, in tokens."""
        return (Int64(tile) * experts + expert) * self.config.capacity

    def _group_at(self, tiles, entry, chunk, place) -> cute.Pointer:
        """Where the workspace has a chunk of the eight tokens from the list's ``place``-th on. That of the next eight
        tokens follows, so that a unit's are contiguous."""
        c = self.config
        at = entry * c.expert_chunks + Int64(chunk) * c.capacity + place
        return tiles.iterator + cute.assume(at * self.token_bytes, divby=TILE_TOKENS * self.token_bytes)

    def _store_pair(self, pairs, at, offset, factor) -> None:
        """Store the offset of a token's sums, negative for no token, and its factor."""
        to = cute.recast_ptr(pairs.iterator + cute.assume(at * PAIR_BYTES, divby=PAIR_BYTES), dtype=Uint32)
        store_words([Uint32(offset), ptx.bits_of(factor)], cute.make_tensor(to, cute.make_layout(2)))

    # GEMM

    @cute.kernel
    def kernel(self, weight, alpha, lists, left, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        worker, tile, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        tiles, pairs, counts = lists
        slices, begins, ends = self._classes_of(worker, workers, out.shape[1])
        share = Share(
            m=out.shape[0],
            n=out.shape[1],
            worker=worker,
            workers=workers,
            tile=tile,
            first_token=tile * c.tokens,
            experts=alpha.shape[1],
            tiles=tiles,
            pairs=pairs,
            left=left,
            out=out,
            slices=slices,
            begins=begins,
            ends=ends,
        )
        smem = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # One arrival for the weight, one for what the other kernel has listed
                cute.arch.mbarrier_init(smem.full + i, 2)
                cute.arch.mbarrier_init(smem.free + i, BANDS * c.parts)
            for i in range_constexpr(c.warps):
                cute.arch.mbarrier_init(smem.turns + i, 1)
        cute.arch.mbarrier_init_fence()
        # The sums; and the activations, of which a unit that is not full overwrites only some
        cleared = self._by_four(smem.sums, c.sum_bytes + c.stages * self._stage_tokens)
        for i in range(tid, cute.size(cleared, mode=[0]), c.threads):
            store_words([Uint32(0)] * 4, cleared[i, None])
        fence_async()
        if const_expr(c.pdl and not c.scans):
            cute.arch.griddepcontrol_wait()
        every = self._lists(smem).counts
        for expert in range(tid, share.experts, c.threads):
            if const_expr(c.scans):
                every[expert] = self._count(alpha, expert, share)
            else:
                every[expert] = counts[tile * share.experts + expert]
        cute.arch.sync_threads()
        if warp == c.warps:
            self._find_units(tid % WARP, share, smem)
        cute.arch.sync_threads()
        share = share._replace(units=self._lists(smem).total[0], first_units=self._lists(smem).first[0])
        if warp >= c.warps:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < c.warps + c.slots:
                self._feed(warp - c.warps, self.ring.open(weight, smem.codes, smem.scales), share, smem)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._multiply(warp, tid, share, smem)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        scales = base + c.stages * self.ring.code_bytes
        sums = scales + c.stages * self.ring.scale_bytes
        tokens = sums + c.sum_bytes
        pairs = tokens + c.stages * self._stage_tokens
        lists = cute.recast_ptr(pairs + c.stages * c.group * PAIR_BYTES, dtype=Int32)
        barriers = cute.recast_ptr(lists + 3 * (MAX_EXPERTS + 8), dtype=Int64)
        return Smem(
            codes=base,
            scales=scales,
            sums=sums,
            tokens=tokens,
            pairs=pairs,
            lists=lists,
            full=barriers,
            free=barriers + c.stages,
            turns=barriers + 2 * c.stages,
        )

    def _lists(self, smem) -> Lists:
        sizes = Lists(experts=MAX_EXPERTS, begins=MAX_EXPERTS + 4, counts=MAX_EXPERTS, total=1, first=1)
        starts = (0, *itertools.accumulate(sizes[:-1]))
        places = zip(starts, sizes, strict=True)
        return Lists(*(cute.make_tensor(smem.lists + start, cute.make_layout(size)) for start, size in places))

    @property
    def _stage_tokens(self) -> int:
        """Activations of a stage, bytes."""
        return self.config.group * self.token_bytes

    def _classes_of(self, worker, workers, n) -> tuple[tuple, tuple, tuple]:
        """The slices, begins and ends of a worker's ``Share``."""
        c = self.config
        if c.classes == 1:
            return (worker, worker), (Int32(0), Int32(1)), (Int32(1), Int32(1))
        tasks = cute.ceil_div(n, ROWS) * c.classes
        begin, end = worker * tasks // workers, (worker + 1) * tasks // workers
        first, last = begin // c.classes, (end - 1) // c.classes
        at = last * c.classes
        begins = cutlass.max(begin - at, Int32(0)), ptx.select(first < last, begin - first * c.classes, Int32(0))
        ends = end - at, ptx.select(first < last, Int32(c.classes), Int32(0))
        return (last, first), begins, ends

    # Units: the touched experts in order, each with ``group`` of its tokens at a time

    @cute.jit
    def _count(self, alpha, expert, share):
        """How many of the tile's tokens are routed to an expert."""
        values = cute.make_rmem_tensor((self.config.tokens,), Float32)
        for i in range_constexpr(self.config.tokens):
            values[i] = Float32(0.0)
            if share.first_token + i < share.m:
                values[i] = alpha[share.first_token + i, expert]
        count = Int32(0)
        for i in range_constexpr(self.config.tokens):
            count = count + Int32(factor_counts(values[i]))
        return count

    @cute.jit
    def _find_units(self, lane, share, smem):
        """A warp turns the number of tokens of every expert into the lists of the touched ones, of this worker's
        classes: of its first slice, then of its second."""
        c = self.config
        each = MAX_EXPERTS // WARP
        first = lane * each
        lists = self._lists(smem)
        counts = cute.make_rmem_tensor((each,), Int32)
        for i in range_constexpr(each):
            counts[i] = Int32(0)
            if first + i < share.experts:
                counts[i] = lists.counts[first + i]
        # All lanes have read what the lists overwrite.
        cute.arch.sync_warp()
        before_units, before_touched = Int32(0), Int32(0)
        for part in range_constexpr(2 if c.classes > 1 else 1):
            mine = cute.make_rmem_tensor((each,), Int32)
            units, touched = Int32(0), Int32(0)
            for i in range_constexpr(each):
                is_mine = Int32(1)
                if const_expr(c.classes > 1):
                    class_ = (first + i) % c.classes
                    is_mine = Int32((class_ >= share.begins[part]) & (class_ < share.ends[part]))
                mine[i] = is_mine * ((counts[i] + (c.group - 1)) // c.group)
                units = units + mine[i]
                touched = touched + Int32(mine[i] > 0)
            own_units, own_touched = units, touched
            units, touched = running_sum(units, lane), running_sum(touched, lane)
            begin, index = before_units + units - own_units, before_touched + touched - own_touched
            for i in range_constexpr(each):
                if mine[i] > 0:
                    lists.experts[index] = first + i
                    lists.begins[index] = begin
                    lists.counts[index] = counts[i]
                    index = index + 1
                begin = begin + mine[i]
            before_units = before_units + cute.arch.shuffle_sync(units, WARP - 1)
            before_touched = before_touched + cute.arch.shuffle_sync(touched, WARP - 1)
            if const_expr(part == 0):
                if lane == 0:
                    lists.first[0] = before_units
        if lane == 0:
            lists.begins[before_touched] = before_units
            lists.total[0] = before_units

    @cute.jit
    def _index_of(self, unit, index, smem):
        """The touched expert of a unit, from that of a unit before it."""
        begins = self._lists(smem).begins
        while begins[index + 1] <= unit:
            index += 1
        return index

    # Each slot has its own ring and its own producer warp, so that waits for stages are in order.

    @cute.jit
    def _feed(self, slot, weight, share, smem):
        """The producer warp of a slot: the weight's chunks, and with each what the other kernel has listed.

        Where this kernel has found the units itself, the first chunks of the weight are copied before the other one has
        ended. That is safe because it lets this kernel start only when it has waited for all kernels before it.
        """
        c = self.config
        depth = c.stages // c.slots
        first = slot * depth
        loaded = Int32(0)
        if const_expr(c.pdl and c.scans):
            ahead, of = slot, Int32(0)
            while (ahead < share.units) & (loaded < depth):
                of = self._index_of(ahead, of, smem)
                for i in range(cutlass.min(c.expert_chunks, depth - loaded)):
                    self._load_weight(of, ahead, i, first + loaded, weight, share, smem)
                    loaded += 1
                ahead += c.slots
            cute.arch.griddepcontrol_wait()
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        done, index = Int32(0), Int32(0)
        for unit in range(slot, share.units, c.slots):
            index = self._index_of(unit, index, smem)
            for chunk in range(c.expert_chunks):
                if done >= loaded:
                    ptx.wait(smem.free + (first + stage), parity)
                    self._load_weight(index, unit, chunk, first + stage, weight, share, smem)
                self._load_tokens(index, unit, chunk, first + stage, share, smem)
                done += 1
                stage, parity = next_stage(stage, parity, depth)

    def _slice_of(self, unit, share):
        """The slice that a unit is of."""
        return share.slices[0] if self.config.classes == 1 else ptx.select(unit < share.first_units, *share.slices)

    def _load_weight(self, index, unit, chunk, stage, weight, share, smem) -> None:
        """Start the copies of a chunk of the weight."""
        expert = self._lists(smem).experts[index]
        blocks = self.config.width // self.config.operands.fmt.block_size
        self.ring.load(
            self._slice_of(unit, share), chunk, expert, stage, smem.full + stage, weight, share.n, Int32(blocks)
        )

    @cute.jit
    def _load_tokens(self, index, unit, chunk, stage, share, smem):
        """Start the copies of a chunk of a unit's activations, and of the unit's pairs."""
        c = self.config
        lists = self._lists(smem)
        position = (unit - lists.begins[index]) * c.group
        entry = self._entry(share.tile, lists.experts[index], share.experts)
        tokens = cutlass.min(lists.counts[index] - position, Int32(c.group))
        source = self._group_at(share.tiles, entry, chunk, position)
        target = smem.tokens + cute.assume(stage * self._stage_tokens, divby=TILE_TOKENS * self.token_bytes)
        pairs = c.group * PAIR_BYTES
        barrier = smem.full + stage
        # In the layout for mma.sync a token is contiguous, in that for wgmma eight tokens are.
        whole = tokens if const_expr(c.by_warp) else tokens // TILE_TOKENS * TILE_TOKENS
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tokens * self.token_bytes + pairs)
            if whole > 0:
                ptx.copy_bulk(target, source, whole * self.token_bytes, barrier)
            if whole < tokens:
                after = cute.assume(whole * self.token_bytes, divby=TILE_TOKENS * self.token_bytes)
                for i in range_constexpr(TILE_TOKENS * self.token_bytes // TILE_BYTES):
                    at = after + i * TILE_BYTES
                    ptx.copy_bulk(target + at, source + at, (tokens - whole) * TILE_LINE, barrier)
            ptx.copy_bulk(
                smem.pairs + cute.assume(stage * pairs, divby=16),
                share.pairs.iterator + cute.assume((entry + position) * PAIR_BYTES, divby=16),
                pairs,
                barrier,
            )

    @cute.jit
    def _multiply(self, warp, tid, share, smem):
        """A consumer warp: 16 rows of every unit of a slot, and its part of their k."""
        c = self.config
        # The warps of a band share a scheduler of the SM, and are at different points of their units.
        place, band = warp // BANDS, warp % BANDS
        lane = tid % WARP
        consumer = Consumer(
            lane=lane,
            quad=lane % 4,
            row=band * 16 + lane // 4,
            leads=Uint32(lane == 0),
            place=place,
            slot=place // c.parts,
            part=place % c.parts,
            chain=smem.turns + band * c.places,
        )
        state = Int32(0), Int32(0), Int32(place == 0)
        state = self._multiply_units(consumer.slot, share.first_units, share.slices[0], state, consumer, share, smem)
        self._end_slice(0, tid, share, smem)
        if const_expr(c.classes > 1):
            if share.ends[1] > 0:
                begin = consumer.slot + (share.first_units - consumer.slot + c.slots - 1) // c.slots * c.slots
                self._multiply_units(begin, share.units, share.slices[1], state, consumer, share, smem)
                self._end_slice(1, tid, share, smem)

    @cute.jit
    def _multiply_units(self, begin, end, slice_, state, consumer, share, smem):
        """A slot's units of a slice. ``state``: the ring's stage and its parity, and the parity of the warp's turn.
        Returns the next."""
        c = self.config
        depth = c.stages // c.slots
        first = consumer.slot * depth
        # A tile of scales has 128 rows, those of two slices.
        scale_row = consumer.row if c.operands.layout.is_linear else consumer.row + slice_ % 2 * ROWS
        sums = cute.make_rmem_tensor((c.group // 2,), Float32)
        start = None
        if const_expr(not c.by_warp):
            # All elements of a group of eight tokens, then those of the next
            start = warpgroup_mma(self.dtype, c.group, c.chunk, c.stages, (1, 0, 2), smem.tokens)
        stage, parity, turn = state
        for unit in range(begin, end, c.slots):
            if const_expr(c.by_warp):
                sums.fill(0.0)
            last = stage
            for chunk in range(c.expert_chunks):
                ptx.wait(smem.full + (first + stage), parity)
                before = first + last
                if const_expr(c.parts == 1):
                    self._multiply_chunk(start, 0, chunk, first + stage, before, scale_row, sums, consumer, smem)
                else:
                    for part in range_constexpr(c.parts):
                        if consumer.part == part:
                            self._multiply_chunk(
                                start, part, chunk, first + stage, before, scale_row, sums, consumer, smem
                            )
                last = stage
                stage, parity = next_stage(stage, parity, depth)
                if const_expr(c.by_warp):
                    if chunk + 1 < c.expert_chunks:
                        self._free(first + last, consumer, smem)
            if const_expr(not c.by_warp):
                warpgroup.wait_group(0)
            offsets, factors = self._pairs(first + last, consumer, smem)
            self._free(first + last, consumer, smem)
            # After the warp with the same rows that has the part of k before, or the unit before
            if (unit > 0) | (consumer.part > 0):
                ptx.wait(consumer.chain + consumer.place, turn)
            turn ^= 1
            self._add(sums, offsets, factors, consumer, smem)
            cute.arch.sync_warp()
            ptx.arrive_if(consumer.chain + (consumer.place + 1) % c.places, consumer.leads)
        return stage, parity, turn

    def _free(self, stage, consumer, smem, exists=True) -> None:
        """Free a stage, if it exists."""
        # All lanes have read. (The MMAs do not ensure it: ptxas moves them behind the arrival.)
        fence_async()
        cute.arch.sync_warp()
        ptx.arrive_if(smem.free + stage, ptx.select(exists, consumer.leads, Uint32(0)))

    def _multiply_chunk(self, start, part: int, chunk, stage, before, scale_row, sums, consumer, smem) -> None:
        """Add a chunk to the sums, with a part of each lane's codes.

        The first chunk of a warpgroup replaces the sums. Its MMAs may still run at the end, but those of the chunk
        before are done, and its stage ``before`` is freed.
        """
        c = self.config
        left = None
        if c.width % c.chunk:
            left = c.width // c.operands.fmt.block_size - chunk * self.ring.blocks
        codes = [self.ring.codes(smem.codes, stage, consumer.row + 8 * r, consumer.quad) for r in range(2)]
        scales = [
            self.ring.factors(smem.scales, stage, scale_row + 8 * r, consumer.quad, left, self.dtype) for r in range(2)
        ]
        count = self.ring.words // c.parts
        for i in range(count):
            word = part * count + i
            pairs = self.ring.pairs(codes, scales, word, self.dtype)
            if c.by_warp:
                at = smem.tokens + cute.assume(stage * self._stage_tokens, divby=self.token_bytes)
                multiply_word(pairs, word, c.group, at, self.token_bytes, consumer.lane, sums, self.dtype)
                continue
            start(pairs, word, stage, chunk > 0 if i == 0 else True, sums)
            # The MMAs of the word before are done, and its registers free.
            warpgroup.wait_group(1)
            if i == 0 and c.expert_chunks > 1:
                self._free(before, consumer, smem, chunk > 0)

    # Sums

    def _token_offset(self, token):
        """Offset of a token's sums, in bytes. ``_sum_offset`` permutes groups of eight rows by its low bits, so that
        tokens are in different banks."""
        return token * (ROWS * 4) + token % TILE_TOKENS * 32

    def _sum_offset(self, token_offset, row):
        """Offset of a row's sum, in bytes."""
        return token_offset ^ (row * 4)

    def _pairs(self, stage, consumer, smem) -> tuple[list, list]:
        """Offsets of the sums of a lane's tokens of a unit, two of each eight, negative where there is no token; and
        their factors."""
        c = self.config
        offsets, factors = [], []
        for group in range(c.group // TILE_TOKENS):
            at = stage * (c.group * PAIR_BYTES) + (group * TILE_TOKENS + consumer.quad * 2) * PAIR_BYTES
            words = cute.recast_ptr(smem.pairs + cute.assume(at, divby=16), dtype=Uint32)
            loaded = load_words(cute.make_tensor(words, cute.make_layout(4)))
            offsets += [Int32(loaded[0]), Int32(loaded[2])]
            factors += [ptx.float_of(loaded[1]), ptx.float_of(loaded[3])]
        return offsets, factors

    @cute.jit
    def _add(self, sums, offsets, factors, consumer, smem):
        """Multiply a unit's sums by the factors, and add them to those of the tile."""
        c = self.config
        scale = Float32(sum_scale(c.operands.fmt, c.operands.a_layout))
        places = [(i, r) for i in range(c.group // 4) for r in range(2)]
        at = [smem.sums + self._sum_offset(offsets[i], consumer.row + 8 * r) for i, r in places]
        # All are loaded before the first is stored.
        totals = [ptx.float_of(ptx.load_shared_if(x, offsets[i] >= 0)) for x, (i, _) in zip(at, places, strict=True)]
        for x, total, (i, r) in zip(at, totals, places, strict=True):
            total = ptx.fma_rn(factors[i], ptx.mul_rn(sums[i // 2 * 4 + r * 2 + i % 2], scale), total)
            ptx.store_shared_if(x, ptx.bits_of(total), offsets[i] >= 0)

    # Results

    @cute.jit
    def _end_slice(self, part: int, tid, share, smem):
        """Write the partial sums of the worker's first or second slice (``part``) for the worker that has the slice's
        last class; or add up those of others, and store the result."""
        c = self.config
        threads = c.warps * WARP
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if const_expr(c.pdl and c.scans):
            # The kernel that lists tokens clears the flags; and it has to have ended before the next one starts.
            cute.arch.griddepcontrol_wait()
        if const_expr(c.pdl):
            if (part == 1) | (share.ends[1] == 0) | (c.classes == 1):
                cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.classes == 1):
            self._write(share.slices[0], tid, share, smem)
        else:
            if share.ends[part] < c.classes:
                self._leave(tid, share, smem)
            else:
                if share.begins[part] > 0:
                    self._collect(share.slices[part], tid, share, smem)
                self._write(share.slices[part], tid, share, smem)
            if const_expr(part == 0):
                # The second slice's sums replace these.
                cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    def _left(self, worker, share) -> tuple[cute.Tensor, cute.Pointer]:
        """A worker's partial sums in the workspace, by four, and its flag."""
        sums, flags = share.left
        slot = share.tile * share.workers + worker
        at = sums.iterator + cute.assume(Int64(slot) * self.config.sum_bytes, divby=ROWS * 4)
        return self._by_four(at, self.config.sum_bytes), flags.iterator + slot

    def _by_four(self, at: cute.Pointer, size: int) -> cute.Tensor:
        """``size`` bytes as words (n, 4)."""
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout((size // 16, 4), stride=(4, 1)))

    @cute.jit
    def _leave(self, tid, share, smem):
        """Write the sums to the workspace for another worker, and clear them."""
        c = self.config
        threads = c.warps * WARP
        here = self._by_four(smem.sums, c.sum_bytes)
        there, flag = self._left(share.worker, share)
        for i in range(tid, cute.size(here, mode=[0]), threads):
            store_words(load_words(here[i, None]), there[i, None])
            store_words([Uint32(0)] * 4, here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if tid == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(flag, Uint32(1))

    @cute.jit
    def _collect(self, slice_, tid, share, smem):
        """Add other workers' partial sums of this slice, in the order of their classes; this worker's come last."""
        c = self.config
        here = self._by_four(smem.sums, c.sum_bytes)
        # The worker that has the slice's first class: portions are rounded down.
        tasks = cute.ceil_div(share.n, ROWS) * c.classes
        first = ((slice_ * c.classes + 1) * share.workers - 1) // tasks
        for worker in range(first, share.worker):
            _, flag = self._left(worker, share)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        for i in range(tid, cute.size(here, mode=[0]), c.warps * WARP):
            total = cute.make_rmem_tensor((4,), Float32)
            total.fill(0.0)
            for worker in range(first, share.worker):
                there, _ = self._left(worker, share)
                for e, word in enumerate(load_words(there[i, None])):
                    total[e] = total[e] + ptx.float_of(word)
            own = load_words(here[i, None])
            store_words([ptx.bits_of(total[e] + ptx.float_of(own[e])) for e in range(4)], here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=c.warps * WARP)

    @cute.jit
    def _write(self, slice_, tid, share, smem):
        """Round the sums, and store them."""
        c = self.config
        for piece in range(tid, c.tokens * (ROWS // 4), c.warps * WARP):
            token, row = piece // (ROWS // 4), piece % (ROWS // 4) * 4
            m, n = share.first_token + token, slice_ * ROWS + row
            if (m < share.m) & (n < share.n):
                at = smem.sums + cute.assume(self._sum_offset(self._token_offset(token), row), divby=16)
                words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
                packed = pack([ptx.float_of(word) for word in words], self.out_dtype)
                to = share.out.iterator + cute.assume(Int64(m) * share.n + n, divby=4)
                store_words(packed, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(packed))))
