"""The device code; the package's docstring describes the roles and the data path."""

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common import ptx, row_tile
from torch_cute_ops.kernels.common.cluster_sums import leave_sums, sum_columns, write_sums
from torch_cute_ops.kernels.common.convert import load_words, store_words
from torch_cute_ops.kernels.common.epilogue_ops import TileEpilogue
from torch_cute_ops.kernels.common.expert_tiles import ExpertTilesKernel
from torch_cute_ops.kernels.common.row_stores import store_columns, store_rows
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS, WARPGROUP
from torch_cute_ops.kernels.common.weight_ring import next_stage
from torch_cute_ops.kernels.fp8_wgmma.config import (
    BLOCK,
    GROUPS,
    RECORD_BYTES,
    RECORD_WORDS,
    SCALE_WARPS,
    THREADS,
    TOGETHER,
    Arguments,
    Config,
)

STEP = 32  # elements of k of an MMA
SCALES_AHEAD = 4  # K blocks whose scales a warp loads together
SLEEP = 200  # nanoseconds between polls of a scale warp that waits for a stage


class Share(NamedTuple):
    """A CTA's share of the GEMM, and the operands.

    Attributes:
        m, n: sizes of the result, of all experts.
        blocks: K blocks; the last may be half of one.
        begin, end: the CTA's range of K blocks: all, or its part in a cluster.
        first, workers, count: the first of its tiles; the number of CTAs or clusters, and so the step to the next tile;
            the number of all tiles.
        rank: rank of the CTA in its cluster.
        a_scale, b_scale: scales of all experts.
        alpha, bias: operands of the epilogue, if it has them.
        out: the result.
    """

    m: Int32
    n: Int32
    blocks: Int32
    begin: Int32
    end: Int32
    first: Int32
    rank: Int32
    count: Int32
    workers: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor


class Smem(NamedTuple):
    """Shared memory: the stages of ``a`` (``tokens``), ``b`` (``columns``), scales and records; the place where lines
    of results are assembled, or partial sums exchanged; the table of experts; and barriers: a stage's are full, or
    free, and those of a cluster are ``left`` and ``read``."""

    tokens: cute.Pointer
    columns: cute.Pointer
    scales: cute.Pointer
    records: cute.Pointer
    stores: cute.Pointer
    table: cute.Pointer
    full: cute.Pointer
    free: cute.Pointer
    left: cute.Pointer
    read: cute.Pointer


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        tid: index of the thread in its CTA.
        lane, quad: index in the warp, and among the four lanes that share a row.
        first: the first of the warp's 16 rows of the M side.
        row: the first of the thread's two rows; the other is ``row + 8``.
        stores: the warp's part of shared memory for assembling lines.
    """

    tid: Int32
    lane: Int32
    quad: Int32
    first: Int32
    row: Int32
    stores: cute.Pointer


class Kept(NamedTuple):
    """The tile whose sums are yet to be stored: its first row, its rows from there on, first column, and expert."""

    row: Int32
    rows: Int32
    column: Int32
    expert: Int32


class FP8WgmmaKernel(ExpertTilesKernel):
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, config.columns)

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, max_ctas: Int32, stream):
        c = self.config
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, max_ctas)
        view = self.tiles.views(a, b, a_scale, b_scale, out)
        load = cpasync.CopyBulkTensorTileG2SOp()
        layouts = [self._operand_layout(rows, 1) for rows in (c.box_rows, c.columns)]
        a_map = cpasync.make_tiled_tma_atom(load, view.a, cute.select(layouts[0], [0, 1]), (c.box_rows, BLOCK))
        b_map = cpasync.make_tiled_tma_atom(load, view.b, layouts[1], (c.columns, BLOCK, 1))
        scales = view.a_scale, view.b_scale
        self.kernel(a_map, b_map, scales, (offsets, counts), (alpha, bias), view.out, view.space).launch(
            grid=[self.tiles.ctas(given, c.splits), 1, 1],
            block=[THREADS, 1, 1],
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _operand_layout(self, rows: int, stages: int):
        """An operand in shared memory, (rows, K block, stages)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        return cute.tile_to_shape(atom, (rows, BLOCK, stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(self, a_map, b_map, scales, given, alpha_and_bias, out, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        smem = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # One arrival for the copies, one for the scales
                cute.arch.mbarrier_init(smem.full + i, 2)
                cute.arch.mbarrier_init(smem.free + i, 4 * GROUPS)
            if const_expr(c.splits > 1):
                cute.arch.mbarrier_init(smem.left, 4 * GROUPS * c.splits)
                cute.arch.mbarrier_init(smem.read, 4 * GROUPS * c.splits)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        if const_expr(c.splits > 1):
            # The barriers of all CTAs are initialised before any is used.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        m, n = out.shape
        self.tiles.prepare(*given, b_map[1].shape[2], space, smem.table, tid, THREADS)
        share = Share(
            m=m,
            n=n,
            blocks=scales[0].shape[0],
            begin=cta % c.splits * scales[0].shape[0] // c.splits,
            end=(cta % c.splits + 1) * scales[0].shape[0] // c.splits,
            first=cta // c.splits,
            rank=cta % c.splits,
            count=self.tiles.count(m, n, smem.table),
            workers=workers // c.splits,
            a_scale=scales[0],
            b_scale=scales[1],
            alpha=alpha_and_bias[0],
            bias=alpha_and_bias[1],
            out=out,
        )
        if warp >= 4 * GROUPS:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == 4 * GROUPS:
                self._produce(a_map, b_map, tid % 32, share, smem)
            else:
                self._produce_scales(warp - (4 * GROUPS + 1), tid % 32, share, smem)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._consume(tid, share, smem)
        if const_expr(c.splits > 1):
            # No CTA may end while another still reads its sums, or arrives at its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _free(self, stage, lane, smem) -> None:
        """Free a stage that the warp has read; all its lanes have read the scales."""
        cute.arch.sync_warp()
        ptx.arrive_if(smem.free + stage, Uint32(lane == 0))

    def _tell(self, barrier, lane) -> None:
        """The warp arrives at the barriers of all CTAs that share the tile, which know its stores and loads then."""
        cute.arch.sync_warp()
        ptx.arrive_at_if(barrier, lane, Uint32(lane < self.config.splits))

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        columns = base + c.stages * c.tokens * BLOCK
        scales = columns + c.stages * c.columns * BLOCK
        records = scales + c.stages * c.stage_scales * 4
        stores = records + c.stages * RECORD_BYTES
        table = stores + c.store_bytes
        barriers = cute.recast_ptr(table + c.rows.table_bytes, dtype=Int64)
        return Smem(
            tokens=base,
            columns=columns,
            scales=cute.recast_ptr(scales, dtype=Float32),
            records=cute.recast_ptr(records, dtype=Uint32),
            stores=stores,
            table=table,
            full=barriers,
            free=barriers + c.stages,
            left=barriers + 2 * c.stages,
            read=barriers + 2 * c.stages + 1,
        )

    def _operand(self, base: cute.Pointer, rows: int, stages: int) -> cute.Tensor:
        layout = self._operand_layout(rows, stages)
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=Float8E4M3FN), layout.outer)

    # Copies

    @cute.jit
    def _produce(self, a_map, b_map, lane, share, smem):
        """The producer warp: copy every K block of the CTA's tiles, in order."""
        c = self.config
        tokens = cute.group_modes(self._operand(smem.tokens, c.box_rows, c.stages * c.boxes), 0, 2)
        columns = cute.group_modes(self._operand(smem.columns, c.columns, c.stages), 0, 2)
        one = cute.make_layout(1)
        # With few rows, the weight is read once.
        policy = {"cache_policy": Int64(ptx.EVICT_FIRST)} if c.is_swapped else {}
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        for number in range(share.first, share.count, share.workers):
            expert, row, rows, column = self.tiles.find(number, share.m, share.n, smem.table, lane)
            # Rows begin anywhere.
            tiled = cute.local_tile(cute.domain_offset((row, 0), a_map[1]), (c.box_rows, BLOCK), (None, None))
            tokens_to, tokens_from = cpasync.tma_partition(a_map[0], 0, one, tokens, cute.group_modes(tiled, 0, 2))
            tiled = cute.local_tile(b_map[1], (c.columns, BLOCK, 1), (column // c.columns, None, expert))
            columns_to, columns_from = cpasync.tma_partition(b_map[0], 0, one, columns, cute.group_modes(tiled, 0, 3))
            boxes = cutlass.min(cute.ceil_div(rows, c.box_rows), Int32(c.boxes))
            size = c.columns * BLOCK + boxes * (c.box_rows * BLOCK)
            for block in cutlass.range(share.begin, share.end, unroll=1):
                ptx.wait(smem.free + stage, parity)
                barrier = smem.full + stage
                with cute.arch.elect_one():
                    record = row, rows, column, expert if const_expr(c.tells_expert) else 0
                    store_words([Uint32(word) for word in record], self._record(stage, smem))
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                for box in range_constexpr(c.boxes):
                    if box < boxes:
                        to = tokens_to[None, stage * c.boxes + box]
                        cute.copy(a_map[0], tokens_from[None, box, block], to, tma_bar_ptr=barrier)
                cute.copy(b_map[0], columns_from[None, block], columns_to[None, stage], tma_bar_ptr=barrier, **policy)
                stage, parity = next_stage(stage, parity, c.stages)

    @cute.jit
    def _produce_scales(self, own, lane, share, smem):
        """A scale warp, number ``own`` of ``SCALE_WARPS``: load the scales of every ``SCALE_WARPS``-th K block, and
        store them in the blocks' stages.

        A load takes as long as the MMAs of several blocks, so each warp has the loads of several of its blocks in
        flight. There are at least as many stages as scale warps. So a warp's last block was at most one round of the
        ring ago, and a stage that it waits for cannot seem free because it is two rounds behind.
        """
        c = self.config
        before = Int32(0)  # blocks of the tiles before
        for number in range(share.first, share.count, share.workers):
            expert, row, rows, column = self.tiles.find(number, share.m, share.n, smem.table, lane)
            places = range(0, c.tokens, 32)
            begin = share.begin + (own + SCALE_WARPS - before % SCALE_WARPS) % SCALE_WARPS
            for first in cutlass.range(begin, share.end, SCALE_WARPS * SCALES_AHEAD, unroll=1):
                loaded = []
                for i in range_constexpr(SCALES_AHEAD):
                    block = cutlass.min(first + i * SCALE_WARPS, share.end - 1)
                    at = share.a_scale.iterator + (Int64(block) * share.a_scale.stride[0] + row + lane)
                    # Zeros for rows that the expert does not have
                    words = [ptx.load_if(at, lane < rows - place, 1, 4 * place)[0] for place in places]
                    loaded.append(
                        ([ptx.float_of(word) for word in words], share.b_scale[column // BLOCK, block, expert])
                    )
                for i in range_constexpr(SCALES_AHEAD):
                    if first + i * SCALE_WARPS < share.end:
                        turn = before + (first + i * SCALE_WARPS - share.begin)
                        stage = turn % c.stages
                        ptx.wait(smem.free + stage, turn // c.stages % 2 ^ 1, SLEEP)
                        self._store_scales(*loaded[i], stage, lane, smem)
            before += share.end - share.begin

    @cute.jit
    def _store_scales(self, of_rows: list, of_columns, stage, lane, smem):
        """Store a block's scales in its stage, which is free: those of the rows, 32 at a time, and that of the
        columns."""
        c = self.config
        scales = self._scales(stage, smem)
        for i in range_constexpr(len(of_rows)):
            if lane < c.tokens - 32 * i:
                scales[lane + 32 * i] = of_rows[i]
        if lane == 0:
            scales[c.tokens] = of_columns
        cute.arch.sync_warp()
        ptx.arrive_if(smem.full + stage, Uint32(lane == 0))

    def _scales(self, stage, smem) -> cute.Tensor:
        """The scales of a stage."""
        start = cute.assume(Int32(stage) * self.config.stage_scales, divby=4)
        return cute.make_tensor(smem.scales + start, cute.make_layout(self.config.stage_scales))

    def _record(self, stage, smem) -> cute.Tensor:
        """The record of a stage's tile (``RECORD_WORDS``)."""
        start = cute.assume(Int32(stage) * RECORD_WORDS, divby=4)
        return cute.make_tensor(smem.records + start, cute.make_layout(RECORD_WORDS))

    # MMAs

    @cute.jit
    def _consume(self, tid, share, smem):
        """A consumer warpgroup: its 64 rows of the M side of each of the CTA's tiles."""
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        first = tid // 32 * 16
        base = smem.stores + cute.assume(tid // 32 * row_tile.SIZE_BYTES, divby=16)
        consumer = Consumer(tid=tid, lane=lane, quad=lane % 4, first=first, row=first + lane // 4, stores=base)
        multiply = self._mma(group, smem)
        size = c.mma_columns // 2
        sums = cute.make_rmem_tensor((size,), Float32)
        partials = [cute.make_rmem_tensor((size,), Float32) for _ in range(TOGETHER)]
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        # There is none at first.
        kept = Kept(Int32(0), Int32(0), Int32(0), Int32(0))
        for number in range(share.first, share.count, share.workers):
            row, rows, column, expert = self._await_tile(number, stage, parity, lane, share, smem)
            exists = True if const_expr(c.is_swapped) else rows > group * GROUP_ROWS
            if exists:
                # In swapped tiles, alpha and bias are loaded before the MMAs, which hide the latency.
                finish = self._finish(column, expert, consumer, share) if const_expr(c.is_swapped) else None
                stage, parity = self._multiply_tile(
                    multiply, sums, partials, kept, stage, parity, consumer, share, smem
                )
                if const_expr(not c.is_swapped):
                    kept = Kept(row, rows, column, expert)
                elif const_expr(c.splits > 1):
                    self._add_up(sums, finish, row, rows, column, turn, consumer, share, smem)
                    turn = turn ^ 1
                else:
                    store_columns(sums, share.out, row, rows, column + consumer.first, lane, finish)
            else:
                # None of its rows exists.
                for _ in cutlass.range(share.blocks, unroll=1):
                    ptx.wait(smem.full + stage, parity)
                    self._free(stage, lane, smem)
                    stage, parity = next_stage(stage, parity, c.stages)
        if const_expr(not c.is_swapped):
            self._store_kept(sums, kept, consumer, share)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

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
            expert, row, rows, column = self.tiles.find(number, share.m, share.n, smem.table, lane)
            if share.begin < share.end:
                ptx.wait(smem.full + stage, parity)
        return row, rows, column, expert

    @cute.jit
    def _multiply_tile(self, multiply, sums, partials: list, kept, stage, parity, consumer, share, smem):
        """Sum the CTA's K blocks of a tile, of which the first has arrived.

        With rows of ``a`` on the M side, ``sums`` still hold those of the tile ``kept``, which are stored meanwhile.

        Returns the next stage, and its parity.
        """
        c = self.config
        count = share.end - share.begin
        if const_expr(c.is_swapped):
            sums.fill(0.0)
        else:
            if count >= TOGETHER:
                count = count - TOGETHER
                store = functools.partial(self._store_kept, sums, kept, consumer, share)
                stage, parity = self._add_blocks(multiply, sums, partials, count, stage, parity, consumer, smem, store)
            else:
                self._store_kept(sums, kept, consumer, share)
        if const_expr(c.unrolls):
            # The rest of a round of the ring that the tile before has begun, whole rounds, and what is left
            begun = cutlass.min((c.stages - stage) % c.stages, count)
            stage, parity = self._add_some(
                multiply, sums, partials, begun, count - begun, stage, parity, consumer, smem
            )
            for rest in cutlass.range(count - begun - c.stages, -1, -c.stages, unroll=1):
                for place in range_constexpr(0, c.stages, TOGETHER):
                    follow = rest + (c.stages - TOGETHER - place)
                    _, parity = self._add_blocks(multiply, sums, partials, follow, place, parity, consumer, smem)
            count = (count - begun) % c.stages
        return self._add_some(multiply, sums, partials, count, 0, stage, parity, consumer, smem)

    @cute.jit
    def _add_some(self, multiply, sums, partials: list, count, follow, stage, parity, consumer, smem):
        """Add ``count`` blocks of a tile, after which ``follow`` blocks of it are left. Returns the next stage, and its
        parity."""
        for rest in cutlass.range(count - TOGETHER, -1, -TOGETHER, unroll=1):
            stage, parity = self._add_blocks(multiply, sums, partials, rest + follow, stage, parity, consumer, smem)
        for _ in cutlass.range(count % TOGETHER, unroll=1):
            stage, parity = self._add_blocks(multiply, sums, partials[:1], follow, stage, parity, consumer, smem)
        return stage, parity

    def _epilogue(self, expert, share) -> TileEpilogue:
        """The epilogue of a tile."""
        return self.epilogue.of_tile(share.alpha, share.bias, share.n, None if self.config.rows.is_plain else expert)

    def _finish(self, column, expert, consumer, share):
        """What finishes the sums that a thread stores of a swapped tile: one function for each of its two columns, or
        in a cluster one for ``sum_columns``."""
        c, epilogue = self.config, self._epilogue(expert, share)
        if c.splits > 1:
            return epilogue(*sum_columns(c.sum_tile, GROUPS * WARPGROUP, consumer.tid, column))
        return tuple(epilogue(column + consumer.row + 8 * r, 1) for r in range(2))

    def _store_kept(self, sums, kept, consumer, share) -> None:
        """Store the sums of a tile, and clear them."""
        store_rows(
            sums,
            share.out,
            consumer.stores,
            kept.row + consumer.first,
            kept.rows - consumer.first,
            kept.column,
            consumer.lane,
            self._epilogue(kept.expert, share),
        )
        sums.fill(0.0)

    def _add_blocks(
        self, multiply, sums, partials: list, follow, stage, parity, consumer, smem, meanwhile=None
    ) -> tuple:
        """Multiply as many blocks as there are ``partials``, of which the first has arrived, and add their sums to the
        totals: the first block's while the MMAs of the others run. ``meanwhile``, if given, is called when all of them
        have been started. Returns the next stage, and its parity.

        While a consumer adds its last block, the tensor cores have only the other consumer's MMAs. So everything else
        is done before its own end: scales are read, and the first of the blocks that ``follow`` is waited for.
        """
        c = self.config
        reads = []
        for i, partial in enumerate(partials):
            if i > 0:
                ptx.wait(smem.full + stage, parity)
            multiply(stage, partial)
            reads.append(stage)
            stage, parity = next_stage(stage, parity, c.stages)
        if meanwhile is not None:
            meanwhile()
        for i, partial in enumerate(partials):
            later = len(partials) - 1 - i
            factors = self._factors(reads[i], consumer, smem)
            if later == 0:
                self._wait_if(follow > 0, smem.full + stage, parity)
            warpgroup.wait_group(later)
            self._free(reads[i], consumer.lane, smem)
            self._promote(sums, partial, factors)
        return stage, parity

    @cute.jit
    def _wait_if(self, condition, barrier, parity):
        """Wait for a phase, on a condition. MMAs overlap with this branch, as the machine code shows; with one around
        an arrival they did not (``ptx.arrive_if``)."""
        if condition:
            ptx.wait(barrier, parity)

    def _tiled_mma(self) -> cute.TiledMma:
        """A k32 step of a consumer's MMAs."""
        shape = GROUP_ROWS, self.config.mma_columns, STEP
        sources = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
        return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))

    def _mma(self, group, smem):
        """The function that starts a consumer's MMAs of a stage."""
        c = self.config
        rows, columns = (smem.columns, smem.tokens) if c.is_swapped else (smem.tokens, smem.columns)
        # The rows of the second consumer follow those of the first.
        m_side = self._operand(rows, GROUP_ROWS, c.stages * GROUPS)
        n_side = self._operand(columns, c.mma_columns, c.stages)
        mma = self._tiled_mma()
        thread = mma.get_slice(0)
        m_operand = mma.make_fragment_A(thread.partition_A(m_side))
        n_operand = mma.make_fragment_B(thread.partition_B(n_side))

        def multiply(stage, partial) -> None:
            # A new object each time: the DSL knows whether it accumulates only in the scope where that was set.
            mma = self._tiled_mma()
            shape = mma.partition_shape_C((GROUP_ROWS, c.mma_columns))
            accumulators = cute.make_tensor(partial.iterator, shape)
            warpgroup.fence()
            for step in range(BLOCK // STEP):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(
                    mma,
                    accumulators,
                    m_operand[None, None, step, stage * GROUPS + group],
                    n_operand[None, None, step, stage],
                    accumulators,
                )
            warpgroup.commit_group()

        return multiply

    @cute.jit
    def _add_up(self, sums, finish, row, rows, column, turn, consumer, share, smem):
        """Add up the sums of the CTAs that share a tile, in the order of k, finish and store them. ``turn`` is the
        parity of the tile among the CTA's."""
        c = self.config
        # All CTAs have read the sums of the tile before. (Waiting for parity 1 passes a barrier that was never used.)
        ptx.wait(smem.read, turn ^ 1)
        leave_sums(c.sum_tile, sums, smem.stores, consumer.row, consumer.quad)
        self._tell(smem.left, consumer.lane)
        ptx.wait(smem.left, turn)
        first = share.out.iterator + cute.assume(Int64(row) * share.n, divby=8)
        out = cute.make_tensor(first, cute.make_layout((rows, share.n), stride=(share.n, 1)))
        write_sums(
            c.sum_tile,
            c.splits,
            GROUPS * WARPGROUP,
            finish,
            out,
            smem.stores,
            share.rank,
            consumer.tid,
            Int32(0),
            column,
        )
        self._tell(smem.read, consumer.lane)

    def _factors(self, stage, consumer, smem) -> list:
        """The products of both scales for a lane's sums: of its rows, or in swapped tiles of its columns."""
        c, scales = self.config, self._scales(stage, smem)
        if c.is_swapped:
            places = [8 * i + consumer.quad * 2 + e for i in range(c.tokens // 8) for e in range(2)]
        else:
            places = [consumer.row, consumer.row + 8]
        of_columns = scales[c.tokens]
        return [ptx.mul_rn(scales[place], of_columns) for place in places]

    def _promote(self, sums, partial, factors: list) -> None:
        """Add a block's sums, times the factors, to the totals."""
        for i in range(self.config.mma_columns // 2):
            which = i // 4 * 2 + i % 2 if self.config.is_swapped else i // 2 % 2
            sums[i] = ptx.fma_rn(factors[which], partial[i], sums[i])
