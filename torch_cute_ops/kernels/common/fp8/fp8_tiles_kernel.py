"""What kernels by wgmma share whose activations are FP8 with block scales, and whose rows may belong to experts: roles,
barriers, copies, and the exchange of partial sums in a cluster.

A CTA has two or four consumer warpgroups, and one of a producer warp and three scale warps. A stage of the ring has
``Config.span`` K blocks of activations and weight, with their scales and a record of the tile that they belong to. A
kernel says how it copies the weight, which scales a warp loads for a stage, and how consumers multiply.
"""

import abc
from dataclasses import replace
from typing import Any, Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import TileEpilogue
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.core.memory import load_words, prefetch, prefetch_argument, store_words
from torch_cute_ops.kernels.common.core.partial_sums import (
    add_accumulators,
    reduce_received,
    reduced_rows,
    send_accumulators,
    send_partial_sums,
    store_partial_sums,
    thread_columns,
)
from torch_cute_ops.kernels.common.core.pipeline import fence_async, next_stage
from torch_cute_ops.kernels.common.experts.tiles import ExpertTilesKernel
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK, GROUPS, RECORD_BYTES, RECORD_WORDS, SCALE_WARPS, Arguments

SLEEP: Final = 200  # nanoseconds between polls of a scale warp that waits for a stage


class Share(NamedTuple):
    """A CTA's share of the GEMM, and the operands.

    Attributes:
        m, n: sizes of the result, of all experts.
        blocks: stages of k, ``Config.span`` K blocks each. The last may have fewer, of which the last may be half of
            one.
        width: bytes of a row of the weight.
        begin, end: the CTA's range of these stages: all, or its part in a cluster.
        first, workers, count: the first of its tiles; the number of CTAs or clusters, and so the step to the next tile;
            the number of all tiles.
        rank: rank of the CTA in its cluster.
        part: which part of a tile's rows is the CTA's.
        a_scale, b_scale: scales of all experts.
        alpha, bias: operands of the epilogue, if it has them.
        out: the result.
        prefetch: what is brought into L2, or ``None``.
    """

    m: Int32
    n: Int32
    blocks: Int32
    width: Int32
    begin: Int32
    end: Int32
    first: Int32
    rank: Int32
    part: Int32
    count: Int32
    workers: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor
    prefetch: cute.Tensor | None


class Tile(NamedTuple):
    """A tile: its expert, its first row, the rows that the expert has from there on, and its first column. Of a CTA
    that has the second part of a tile's rows, these may be none, or a negative number."""

    expert: Int32
    row: Int32
    rows: Int32
    column: Int32


class Smem(NamedTuple):
    """Shared memory: the stages of ``a`` (``tokens``), ``b`` (``columns``), scales and records; what a kernel has
    besides (``own``); the place where lines of results are assembled, or partial sums left, and that of sums which the
    CTAs of the cluster have sent; the table of experts; and barriers: a stage's are full, or free, those of a cluster
    are ``sent`` and ``read``, and those of groups that divide k ``parted`` and ``joined``."""

    tokens: cute.Pointer
    columns: cute.Pointer
    scales: cute.Pointer
    records: cute.Pointer
    own: cute.Pointer
    stores: cute.Pointer
    received: cute.Pointer
    table: cute.Pointer
    full: cute.Pointer
    arrived: cute.Pointer
    free: cute.Pointer
    sent: cute.Pointer
    read: cute.Pointer
    parted: cute.Pointer
    joined: cute.Pointer


class FP8TilesKernel(ExpertTilesKernel, abc.ABC):
    """Base of these kernels, built from a ``FP8TilesConfig``."""

    @abc.abstractmethod
    def _weight_layout(self, stages: int):
        """The weight in shared memory, (rows, bytes of a row, stages)."""

    @abc.abstractmethod
    def _weight_stages(self, smem: Smem) -> cute.Tensor:
        """The same, of all stages."""

    @abc.abstractmethod
    def _load_scales(self, number, tile: Tile, lane, share) -> Any:
        """Load the scales of a stage of k for ``_store_scales``; ``number`` is its number in the tile."""

    @abc.abstractmethod
    def _store_scales(self, loaded: Any, begun: Any, is_last, stage, lane, share, smem) -> None:
        """Store them at a stage, which is free. ``begun`` is what ``_begin_scales`` returned, and ``is_last`` whether
        it is the CTA's last of its tile."""

    def _begin_scales(self, tile: Tile, lane, share) -> Any:
        """What a scale warp has to know of a tile, besides its scales."""

    @abc.abstractmethod
    def _consume(self, tid, share, smem):
        """A consumer warpgroup: its 64 rows of the M side of each of the CTA's tiles."""

    def _activations_layout(self, rows: int, stages: int):
        """Activations in shared memory, (rows, K block, stages)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        return cute.tile_to_shape(atom, (rows, BLOCK, stages), order=(0, 1, 2))

    def _activations(self, base: cute.Pointer, rows: int, stages: int) -> cute.Tensor:
        """A part of shared memory as K blocks of so many rows."""
        layout = self._activations_layout(rows, stages)
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=Float8E4M3FN), layout.outer)

    def arguments(self) -> Arguments:
        given = super().arguments()
        return given._replace(prefetch=prefetch_argument()) if self.config.prefetches else given

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas: Int32, stream):
        c = self.config
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas)
        view = self.tiles.views(a, b, a_scale, b_scale, out)
        load = cpasync.CopyBulkTensorTileG2SOp()
        layout = cute.select(self._activations_layout(c.box_rows, 1), [0, 1])
        a_map = cpasync.make_tiled_tma_atom(load, view.a, layout, (c.box_rows, BLOCK))
        b_map = cpasync.make_tiled_tma_atom(load, view.b, self._weight_layout(1), (c.copied_columns, c.line, 1))
        scales = view.a_scale, view.b_scale
        self.kernel(a_map, b_map, scales, (offsets, counts), (alpha, bias), view.out, prefetch, view.space).launch(
            grid=[self.tiles.ctas(given, c.cluster), 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        columns = base + c.stages * c.span * c.tokens * BLOCK
        own = columns + c.stages * c.copied_columns * c.line
        scales = own + c.own_bytes
        records = scales + c.stages * c.span * c.place_scales * 4
        stores = records + c.stages * RECORD_BYTES
        received = stores + c.store_bytes
        table = received + c.received_bytes
        barriers = cute.recast_ptr(table + c.rows.table_bytes, dtype=Int64)
        return Smem(
            tokens=base,
            columns=columns,
            scales=cute.recast_ptr(scales, dtype=Float32),
            records=cute.recast_ptr(records, dtype=Uint32),
            own=own,
            stores=stores,
            received=received,
            table=table,
            full=barriers,
            arrived=barriers + (2 * c.stages + 2 if const_expr(c.helpers) else 0),
            free=barriers + c.stages,
            sent=barriers + 2 * c.stages,
            read=barriers + 2 * c.stages + 1,
            parted=barriers + 3 * c.stages + 2,
            joined=barriers + 3 * c.stages + 3,
        )

    @cute.kernel
    def kernel(self, a_map, b_map, scales, given, alpha_and_bias, out, prefetch, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        smem = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # One arrival for the copies, one for the scales
                cute.arch.mbarrier_init(smem.arrived + i, 2)
                if const_expr(c.helpers):
                    cute.arch.mbarrier_init(smem.full + i, c.full_arrivals)
                cute.arch.mbarrier_init(smem.free + i, c.consumer_warps * c.row_ctas)
            if const_expr(c.splits > 1):
                cute.arch.mbarrier_init(smem.sent, 1)
                cute.arch.mbarrier_init(smem.read, 4 * GROUPS * c.splits)
            if const_expr(c.k_groups > 1):
                cute.arch.mbarrier_init(smem.parted, 4 * GROUPS)
                cute.arch.mbarrier_init(smem.joined, 4 * GROUPS)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.waits_first):
            cute.arch.griddepcontrol_wait()
        if const_expr(c.row_ctas > 1):
            # The barriers of all CTAs are initialised before any is used.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        elif const_expr(c.splits > 1):
            # Waited for before sums are sent
            cute.arch.cluster_arrive_relaxed()
        m, n = out.shape
        self.tiles.prepare(*given, b_map[1].shape[2], space, smem.table, tid, c.threads)
        blocks = cute.ceil_div(scales[0].shape[0], c.span)
        share = Share(
            m=m,
            n=n,
            blocks=blocks,
            width=b_map[1].shape[1],
            begin=cta % c.splits * blocks // c.splits,
            end=(cta % c.splits + 1) * blocks // c.splits,
            first=cta // c.cluster,
            rank=cta % c.cluster,
            part=cta % c.row_ctas,
            count=self.tiles.count(m, n, smem.table),
            workers=workers // c.cluster,
            a_scale=scales[0],
            b_scale=scales[1],
            alpha=alpha_and_bias[0],
            bias=alpha_and_bias[1],
            out=out,
            prefetch=prefetch,
        )
        if warp >= c.consumer_warps:
            if warp <= c.consumer_warps + SCALE_WARPS:
                cute.arch.setmaxregister_decrease(c.registers[1])
                if warp == c.consumer_warps:
                    self._produce(a_map, b_map, tid % 32, share, smem)
                else:
                    self._wait_if_static()
                    self._produce_scales(warp - (c.consumer_warps + 1), tid % 32, share, smem)
            elif const_expr(c.helpers):
                cute.arch.setmaxregister_decrease(c.registers[2])
                helper = warp - (c.consumer_warps + 1 + SCALE_WARPS)
                self._help(helper // c.helpers, helper % c.helpers, tid % 32, share, smem)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._wait_if_static()
            self._consume(tid, share, smem)
        if const_expr(c.row_ctas > 1):
            # No CTA may end while another still uses its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _wait_if_static(self) -> None:
        """Wait for the kernels before this one, where the CTA as a whole has not. Helpers need no wait: they touch
        nothing but shared memory."""
        if self.config.static_weight:
            cute.arch.griddepcontrol_wait()

    def _free(self, stage, lane, smem) -> None:
        """Free a stage that the warp has read; all its lanes have read the scales."""
        row_ctas = self.config.row_ctas
        if row_ctas > 1:
            cute.arch.sync_warp()
            ptx.arrive_at_if(smem.free + stage, lane, Uint32(lane < row_ctas), tells=False)
        else:
            self._arrive(smem.free + stage, lane)

    def _tell(self, barrier, lane) -> None:
        """The warp arrives at the barriers of all CTAs that share the tile, which know its stores and loads then."""
        cute.arch.sync_warp()
        ptx.arrive_at_if(barrier, lane, Uint32(lane < self.config.splits))

    def _arrive(self, barrier, lane) -> None:
        """The warp arrives at a barrier of its CTA, which knows all its lanes' stores and loads then."""
        cute.arch.sync_warp()
        ptx.arrive_if(barrier, Uint32(lane == 0))

    def _find(self, number, lane, share, smem) -> tuple:
        """The CTA's part of a tile: expert, first row, the rows that the expert has from there on, if any, and first
        column."""
        expert, row, rows, column = self.tiles.find(number, share.m, share.n, smem.table, lane)
        before = share.part * self.config.tokens
        return expert, row + before, rows - before, column

    # Helpers

    @cute.jit
    def _help(self, team, warp, lane, share, smem):
        """A helper, one of its team's warps: it completes the stages that have arrived, one of each of the teams."""
        c = self.config
        begun = self._begin_help(warp, lane, share)
        count = cute.ceil_div(share.count - share.first, share.workers) * (share.end - share.begin)
        stage, parity = Int32(0), Int32(0)
        for i in range_constexpr(c.teams - 1):
            if team > i:
                stage, parity = self._skip(Int32(i), count, stage, parity, lane, smem)
        for turn in cutlass.range(team, count, c.teams, unroll=1):
            ptx.wait(smem.arrived + stage, parity)
            self._complete(begun, stage, lane, share, smem)
            # The MMAs and copies read it through the async proxy, and copies replace what was read.
            fence_async()
            cute.arch.sync_warp()
            self._tell_complete(begun, stage, lane, share, smem)
            stage, parity = next_stage(stage, parity, c.stages)
            for i in range_constexpr(1, c.teams):
                stage, parity = self._skip(turn + i, count, stage, parity, lane, smem)

    def _begin_help(self, warp, lane, share) -> Any:
        """What a helper, one of its team's warps, knows of all stages."""

    def _complete(self, begun: Any, stage, lane, share, smem) -> None:
        """Complete a helper's part of a stage, which has arrived. ``begun`` is what ``_begin_help`` returned."""

    def _tell_complete(self, begun: Any, stage, lane, share, smem) -> None:
        """That part is complete."""
        ptx.arrive_if(smem.full + stage, Uint32(lane == 0))

    @cute.jit
    def _skip(self, turn, count, stage, parity, lane, smem):
        """Skip a stage of another team. Where the teams exchange stages from round to round, see it arrive: who does
        not may take a phase for that of two rounds before. The stage is full only when all teams have seen that, so
        that none is left behind."""
        c = self.config
        if const_expr(c.teams_meet):
            self._wait_if(turn < count, smem.arrived + stage, parity)
            cute.arch.sync_warp()
            ptx.arrive_if(smem.full + stage, Uint32((lane == 0) & (turn < count)))
        return next_stage(stage, parity, c.stages)

    # Copies

    def _await_weight(self, expert, column, share) -> None:
        """Wait until a tile's rows of the weight can be copied, and its scales read."""

    @cute.jit
    def _produce(self, a_map, b_map, lane, share, smem):
        """The producer warp: copy every stage of the CTA's tiles, in order.

        Of a static weight, the first tile's blocks that the ring has room for are copied before the kernel before this
        one has ended (``kernels.common.core.launch``). Their barriers expect the activations too, which are copied
        after that.

        Behind the last copy it may have its share of what a later launch reads brought into L2.
        """
        c = self.config
        tokens = self._activations(smem.tokens, c.box_rows, c.stages * c.span * c.boxes)
        tokens = cute.group_modes(tokens, 0, 2)
        columns = cute.group_modes(self._weight_stages(smem), 0, 2)
        one = cute.make_layout(1)
        policy = {"cache_policy": Int64(ptx.EVICT_FIRST)} if c.streams_weight else {}
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        ahead = Int32(0)  # blocks whose weight is on its way
        for number in range(share.first, share.count, share.workers):
            expert, row, rows, column = self._find(number, lane, share, smem)
            self._await_weight(expert, column, share)
            # Rows begin anywhere.
            tiled = cute.local_tile(cute.domain_offset((row, 0), a_map[1]), (c.box_rows, BLOCK), (None, None))
            tokens_to, tokens_from = cpasync.tma_partition(a_map[0], 0, one, tokens, cute.group_modes(tiled, 0, 2))
            place = column // c.copied_columns + share.part
            tiled = cute.local_tile(b_map[1], (c.copied_columns, c.line, 1), (place, None, expert))
            columns_to, columns_from = cpasync.tma_partition(b_map[0], 0, one, columns, cute.group_modes(tiled, 0, 3))
            boxes = cutlass.max(cutlass.min(cute.ceil_div(rows, c.box_rows), Int32(c.boxes)), Int32(0))
            size = c.copied_columns * c.line + boxes * (c.span * c.box_rows * BLOCK)
            record = row, rows, column, expert if const_expr(c.tells_expert) else 0
            if const_expr(c.static_weight):
                if number == share.first:
                    ahead = cutlass.min(share.end - share.begin, Int32(c.stages))
                    for i in cutlass.range(ahead, unroll=1):
                        self._expect(record, size, i, smem)
                        source, to = columns_from[None, share.begin + i], columns_to[None, i]
                        cute.copy(b_map[0], source, to, tma_bar_ptr=smem.arrived + i, **policy)
                    cute.arch.griddepcontrol_wait()
            for block in cutlass.range(share.begin, share.end, unroll=1):
                if const_expr(c.static_weight):
                    if ahead > 0:
                        ahead -= 1
                    else:
                        ptx.wait(smem.free + stage, parity)
                        self._expect(record, size, stage, smem)
                        source, to = columns_from[None, block], columns_to[None, stage]
                        cute.copy(b_map[0], source, to, tma_bar_ptr=smem.arrived + stage, **policy)
                else:
                    ptx.wait(smem.free + stage, parity)
                    self._expect(record, size, stage, smem)
                barrier = smem.arrived + stage
                for i in range_constexpr(c.span):
                    for box in range_constexpr(c.boxes):
                        if box < boxes:
                            to = tokens_to[None, (stage * c.span + i) * c.boxes + box]
                            cute.copy(a_map[0], tokens_from[None, box, block * c.span + i], to, tma_bar_ptr=barrier)
                if const_expr(not c.static_weight):
                    source, to = columns_from[None, block], columns_to[None, stage]
                    cute.copy(b_map[0], source, to, tma_bar_ptr=barrier, **policy)
                stage, parity = next_stage(stage, parity, c.stages)
        if const_expr(c.prefetches):
            prefetch(share.prefetch, share.first * c.cluster + share.rank, share.workers * c.cluster)

    def _expect(self, record: tuple, size, stage, smem) -> None:
        """Store a stage's record, and have its barrier expect so many bytes."""
        barrier = smem.arrived + stage
        with cute.arch.elect_one():
            store_words([Uint32(word) for word in record], self._record(stage, smem))
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    @cute.jit
    def _produce_scales(self, own, lane, share, smem):
        """A scale warp, number ``own`` of ``SCALE_WARPS``: load the scales of every ``SCALE_WARPS``-th stage of
        k, and store them in the ring.

        A load takes as long as the MMAs of several stages, so each warp may have the loads of several of its stages in
        flight. There are at least as many stages in the ring as scale warps. So a warp's last one was at most one round
        of the ring ago, and a stage that it waits for cannot seem free because it is two rounds behind.
        """
        c = self.config
        before = Int32(0)  # stages of k of the tiles before
        for number in range(share.first, share.count, share.workers):
            tile = Tile(*self._find(number, lane, share, smem))
            self._await_weight(tile.expert, tile.column, share)
            begun = self._begin_scales(tile, lane, share)
            start = share.begin + (own + SCALE_WARPS - before % SCALE_WARPS) % SCALE_WARPS
            for first in cutlass.range(start, share.end, SCALE_WARPS * c.scales_ahead, unroll=1):
                loaded = []
                for i in range_constexpr(c.scales_ahead):
                    block = cutlass.min(first + i * SCALE_WARPS, share.end - 1)
                    loaded.append(self._load_scales(block, tile, lane, share))
                for i in range_constexpr(c.scales_ahead):
                    if first + i * SCALE_WARPS < share.end:
                        turn = before + (first + i * SCALE_WARPS - share.begin)
                        stage = turn % c.stages
                        ptx.wait(smem.free + stage, turn // c.stages % 2 ^ 1, SLEEP)
                        is_last = first + i * SCALE_WARPS + 1 == share.end
                        self._store_scales(loaded[i], begun, is_last, stage, lane, share, smem)
                        self._arrive(smem.arrived + stage, lane)
            before += share.end - share.begin

    def _token_scales(self, block, tile: Tile, lane, share) -> list:
        """Load the activations' scales of a K block, 32 at a time; zeros for rows that the expert does not have."""
        at = share.a_scale.iterator + (Int64(block) * share.a_scale.stride[0] + tile.row + lane)
        words = []
        for place in range(0, self.config.tokens, 32):
            words += ptx.load_if(at, lane < tile.rows - place, 1, 4 * place)
        return [ptx.float_of(word) for word in words]

    @cute.jit
    def _store_token_scales(self, scales: cute.Tensor, of_rows: list, lane) -> None:
        for i in range_constexpr(len(of_rows)):
            if lane < self.config.tokens - 32 * i:
                scales[lane + 32 * i] = of_rows[i]

    def _scales(self, place, smem) -> cute.Tensor:
        """The fp32 scales of a K block in the ring: those of the rows, and what the kernel adds."""
        start = cute.assume(Int32(place) * self.config.place_scales, divby=4)
        return cute.make_tensor(smem.scales + start, cute.make_layout(self.config.place_scales))

    def _words(self, place, at, count: int, smem) -> cute.Tensor:
        """Words among the scales of a K block in the ring."""
        start = self._scales(place, smem).iterator + cute.assume(at, divby=count)
        return cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), cute.make_layout(count))

    def _record(self, stage, smem) -> cute.Tensor:
        """The record of a stage's tile (``RECORD_WORDS``)."""
        start = cute.assume(Int32(stage) * RECORD_WORDS, divby=4)
        return cute.make_tensor(smem.records + start, cute.make_layout(RECORD_WORDS))

    # Consumers

    @cute.jit
    def _await_tile(self, number, stage, parity, lane, share, smem):
        """Wait for the first block of a tile, in ``stage``. Returns the tile's first row, its rows from there on, first
        column, and expert.

        They are in the record of the stage, since finding a tile takes some 1,000 clocks. But of CTAs that share a tile
        some may have no block of it, and so no record.
        """
        if const_expr(self.config.splits == 1):
            ptx.wait(smem.full + stage, parity)
            row, rows, column, expert = (Int32(word) for word in load_words(self._record(stage, smem)))
        else:
            expert, row, rows, column = self._find(number, lane, share, smem)
            if share.begin < share.end:
                ptx.wait(smem.full + stage, parity)
        return row, rows, column, expert

    def _epilogue(self, expert, share) -> TileEpilogue:
        """The epilogue of a tile."""
        return self.epilogue.of_tile(share.alpha, share.bias, share.n, None if self.config.rows.is_plain else expert)

    def _finish(self, column, expert, consumer, share):
        """What finishes the sums that a thread stores of a swapped tile: one function for each of its two columns, or
        in a cluster one for ``thread_columns``."""
        c, epilogue = self.config, self._epilogue(expert, share)
        if c.splits > 1:
            return epilogue(*thread_columns(c.sum_tile, GROUPS * WARPGROUP, consumer.tid, column))
        return tuple(epilogue(column + consumer.row + 8 * r, 1) for r in range(2))

    @cute.jit
    def _wait_if(self, condition, barrier, parity):
        """Wait for a phase, on a condition. MMAs overlap with this branch, as the machine code shows; with one around
        an arrival they did not (``ptx_emulator.arrive_if``)."""
        if condition:
            ptx.wait(barrier, parity)

    def _leave_sums(self, sums, consumer, smem) -> None:
        """Store the sums of a consumer's rows of ``a`` in this CTA's shared memory."""
        c = self.config
        of_part = replace(c.sum_tile, tile_m=c.mma_columns)
        base = smem.stores + cute.assume(consumer.token * (4 * of_part.pitch), divby=16)
        store_partial_sums(of_part, sums, base, consumer.row, consumer.quad)

    def _meet_cluster(self) -> None:
        """A consumer waits until the barriers of all CTAs that share its tiles are initialised."""
        if self.config.splits > 1:
            cute.arch.cluster_wait()

    @cute.jit
    def _add_up(self, sums, finish, row, rows, column, turn, is_last, consumer, share, smem):
        """Add up the sums of the CTAs that share a tile, in the order of k, finish and store them. ``turn`` is the
        parity of the tile among the CTA's, and ``is_last`` whether it has no other one.

        The CTAs send each other the sums of tokens and columns that exist. A CTA may end as soon as it has what it
        waits for: nobody sends to it, or tells it anything, after that.
        """
        c, threads = self.config, GROUPS * WARPGROUP
        # All CTAs have read the sums of the tile before. (Waiting for parity 1 passes a barrier that was never used.)
        ptx.wait(smem.read, turn ^ 1)
        tokens, columns = cutlass.min(rows, Int32(c.tokens)), cutlass.min(share.n - column, Int32(c.columns))
        own = reduced_rows(c.sum_tile, c.splits, share.rank, tokens)
        if consumer.tid == 0:
            # What is sent may arrive before that.
            cute.arch.mbarrier_arrive_and_expect_tx(smem.sent, own * columns * (c.splits * 4))
        self._leave_sums(sums, consumer, smem)
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        tile = c.sum_tile, c.splits, threads
        send_partial_sums(*tile, smem.stores, smem.received, smem.sent, share.rank, consumer.tid, tokens, columns)
        ptx.wait(smem.sent, turn)
        first = share.out.iterator + cute.assume(Int64(row) * share.n, divby=8)
        out = cute.make_tensor(first, cute.make_layout((rows, share.n), stride=(share.n, 1)))
        reduce_received(*tile, finish, out, smem.received, share.rank, consumer.tid, own, Int32(0), column)
        self._tell_read(is_last, consumer, smem)

    @cute.jit
    def _tell_read(self, is_last, consumer, smem):
        """Tell all CTAs that share tiles that a warp has read what they have sent, unless they send nothing more."""
        if not is_last:
            # What is sent next replaces what was read.
            fence_async()
            self._tell(smem.read, consumer.lane)

    @cute.jit
    def _exchange(self, sums, exists, group, turn, is_last, consumer, share, smem):
        """Of a tile with rows of ``a`` on the M side, which two CTAs share: the CTA of a consumer warpgroup's own
        number adds up the sums of both for its 64 rows, if any ``exists``; the other sends it its own. ``turn`` and
        ``is_last`` as for ``_add_up``.

        All warps tell that they have come so far, also those that have read nothing. Else one that is late might find
        the barrier two phases on, and wait for the next.
        """
        c, tid = self.config, consumer.tid % WARPGROUP
        ptx.wait(smem.read, turn ^ 1)
        if group == share.rank:
            if tid == 0:
                # What is sent may arrive before that.
                size = ptx.select(exists, Int32(c.received_bytes), Int32(0))
                cute.arch.mbarrier_arrive_and_expect_tx(smem.sent, size)
            # Also for nothing: each phase of a barrier is waited for.
            ptx.wait(smem.sent, turn)
            if exists:
                add_accumulators(sums, smem.received, tid)
        elif exists:
            send_accumulators(sums, smem.received, smem.sent, share.rank ^ 1, tid)
        self._tell_read(is_last, consumer, smem)
