"""The device code; the package's docstring tells the roles and the data path."""

import functools
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common import ptx, row_tile
from torch_cute_ops.kernels.common.cluster_sums import leave_sums, write_sums
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, store_words
from torch_cute_ops.kernels.common.expert_tiles import ExpertTiles
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
    Config,
)
from torch_cute_ops.runtime.argspec import Argument, ScalarArg

STEP = 32  # elements of k of a product
SCALES_AHEAD = 4  # blocks of k whose scales a warp loads together
SLEEP = 200  # nanoseconds between looks of a warp that has loaded scales and waits for their stage


class FP8WgmmaKernel:
    """The kernel of one ``Config``.

    Methods pass on what a thread knows: ``t``, the tensors and this CTA's part; ``s``, where things lie in shared
    memory.
    """

    def __init__(self, config: Config):
        self.config = config
        self.out_dtype = DSL_DTYPES[config.out_dtype]
        self.tiles = ExpertTiles(config.rows, config.tokens, config.columns)

    def arguments(self) -> tuple[Argument, ...]:
        return (*self.tiles.arguments(self.out_dtype.__name__), ScalarArg("Int32"))

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, out, workers: Int32, stream):
        c = self.config
        view = self.tiles.views(a, b, a_scale, b_scale, out)
        load = cpasync.CopyBulkTensorTileG2SOp()
        layouts = [self._operand_layout(rows, 1) for rows in (c.box_rows, c.columns)]
        a_map = cpasync.make_tiled_tma_atom(load, view.a, cute.select(layouts[0], [0, 1]), (c.box_rows, BLOCK))
        b_map = cpasync.make_tiled_tma_atom(load, view.b, layouts[1], (c.columns, BLOCK, 1))
        scales = view.a_scale, view.b_scale
        self.kernel(a_map, b_map, scales, (offsets, counts), view.out, view.space).launch(
            grid=[workers, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _operand_layout(self, rows: int, stages: int):
        """An operand in shared memory, (rows, a block of k, stages)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        return cute.tile_to_shape(atom, (rows, BLOCK, stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(self, a_map, b_map, scales, given, out, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        s = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # The copies, and the scales
                cute.arch.mbarrier_init(s.full + i, 2)
                cute.arch.mbarrier_init(s.free + i, 4 * GROUPS)
            if const_expr(c.splits > 1):
                cute.arch.mbarrier_init(s.left, 4 * GROUPS * c.splits)
                cute.arch.mbarrier_init(s.read, 4 * GROUPS * c.splits)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        if const_expr(c.splits > 1):
            # No barrier is used before it is there.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        m, n = out.shape
        self.tiles.prepare(*given, b_map[1].shape[2], space, s.table, tid, THREADS)
        t = SimpleNamespace(
            m=m,
            n=n,
            blocks=scales[0].shape[0],
            begin=cta % c.splits * scales[0].shape[0] // c.splits,
            end=(cta % c.splits + 1) * scales[0].shape[0] // c.splits,
            first=cta // c.splits,
            rank=cta % c.splits,
            count=self.tiles.count(m, n, s.table),
            workers=workers // c.splits,
            a_scale=scales[0],
            b_scale=scales[1],
            out=out,
        )
        if warp >= 4 * GROUPS:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == 4 * GROUPS:
                self._produce(a_map, b_map, tid % 32, t, s)
            else:
                self._produce_scales(warp - (4 * GROUPS + 1), tid % 32, t, s)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._consume(tid, t, s)
        if const_expr(c.splits > 1):
            # No CTA may end while another still reads its sums, or arrives at its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _free(self, stage, lane, s) -> None:
        """A warp has read a stage, all lanes its scales."""
        cute.arch.sync_warp()
        ptx.arrive_if(s.free + stage, Uint32(lane == 0))

    def _tell(self, barrier, lane) -> None:
        """A warp arrives at the barriers of all CTAs that share the tile; what it stored, and read, is known there."""
        cute.arch.sync_warp()
        ptx.arrive_at_if(barrier, lane, Uint32(lane < self.config.splits))

    def _allocate(self) -> SimpleNamespace:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        columns = base + c.stages * c.tokens * BLOCK
        scales = columns + c.stages * c.columns * BLOCK
        records = scales + c.stages * c.stage_scales * 4
        stores = records + c.stages * RECORD_BYTES
        table = stores + c.store_bytes
        barriers = cute.recast_ptr(table + c.rows.table_bytes, dtype=Int64)
        return SimpleNamespace(
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
    def _produce(self, a_map, b_map, lane, t, s):
        """The copying warp: every block of k of the CTA's tiles, in their order."""
        c = self.config
        tokens = cute.group_modes(self._operand(s.tokens, c.box_rows, c.stages * c.boxes), 0, 2)
        columns = cute.group_modes(self._operand(s.columns, c.columns, c.stages), 0, 2)
        one = cute.make_layout(1)
        # A weight that few rows are multiplied with is read once.
        policy = {"cache_policy": Int64(ptx.EVICT_FIRST)} if c.is_swapped else {}
        # A ring that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        for number in range(t.first, t.count, t.workers):
            expert, row, rows, column = self.tiles.find(number, t.m, t.n, s.table, lane)
            # Rows begin anywhere.
            tiled = cute.local_tile(cute.domain_offset((row, 0), a_map[1]), (c.box_rows, BLOCK), (None, None))
            tokens_to, tokens_from = cpasync.tma_partition(a_map[0], 0, one, tokens, cute.group_modes(tiled, 0, 2))
            tiled = cute.local_tile(b_map[1], (c.columns, BLOCK, 1), (column // c.columns, None, expert))
            columns_to, columns_from = cpasync.tma_partition(b_map[0], 0, one, columns, cute.group_modes(tiled, 0, 3))
            boxes = cutlass.min(cute.ceil_div(rows, c.box_rows), Int32(c.boxes))
            size = c.columns * BLOCK + boxes * (c.box_rows * BLOCK)
            for block in cutlass.range(t.begin, t.end, unroll=1):
                ptx.wait(s.free + stage, parity)
                barrier = s.full + stage
                with cute.arch.elect_one():
                    store_words([Uint32(word) for word in (row, rows, column, 0)], self._record(stage, s))
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                for box in range_constexpr(c.boxes):
                    if box < boxes:
                        to = tokens_to[None, stage * c.boxes + box]
                        cute.copy(a_map[0], tokens_from[None, box, block], to, tma_bar_ptr=barrier)
                cute.copy(b_map[0], columns_from[None, block], columns_to[None, stage], tma_bar_ptr=barrier, **policy)
                stage, parity = next_stage(stage, parity, c.stages)

    @cute.jit
    def _produce_scales(self, own, lane, t, s):
        """A warp that loads the scales of every so manieth block of k, one of ``SCALE_WARPS``, and stores them in those
        blocks' stages. A load takes as long as several blocks are multiplied, so each warp has those of several of its
        blocks under way at once. There are at least as many stages as warps: so a warp's last block was at most a
        round of the ring ago, and a stage that it waits for cannot be two rounds behind, and seem free."""
        c = self.config
        before = Int32(0)  # blocks of the tiles before
        for number in range(t.first, t.count, t.workers):
            expert, row, rows, column = self.tiles.find(number, t.m, t.n, s.table, lane)
            places = range(0, c.tokens, 32)
            begin = t.begin + (own + SCALE_WARPS - before % SCALE_WARPS) % SCALE_WARPS
            for first in cutlass.range(begin, t.end, SCALE_WARPS * SCALES_AHEAD, unroll=1):
                loaded = []
                for i in range_constexpr(SCALES_AHEAD):
                    block = cutlass.min(first + i * SCALE_WARPS, t.end - 1)
                    at = t.a_scale.iterator + (Int64(block) * t.a_scale.stride[0] + row + lane)
                    # Zeros for rows that the expert does not have.
                    words = [ptx.load_if(at, lane < rows - place, 1, 4 * place)[0] for place in places]
                    loaded.append(([ptx.float_of(word) for word in words], t.b_scale[column // BLOCK, block, expert]))
                for i in range_constexpr(SCALES_AHEAD):
                    if first + i * SCALE_WARPS < t.end:
                        turn = before + (first + i * SCALE_WARPS - t.begin)
                        stage = turn % c.stages
                        ptx.wait(s.free + stage, turn // c.stages % 2 ^ 1, SLEEP)
                        self._store_scales(*loaded[i], stage, lane, s)
            before += t.end - t.begin

    @cute.jit
    def _store_scales(self, of_rows: list, of_columns, stage, lane, s):
        """Put a block's scales into its stage, which is free: those of rows by 32, and that of the columns."""
        c = self.config
        scales = self._scales(stage, s)
        for i in range_constexpr(len(of_rows)):
            if lane < c.tokens - 32 * i:
                scales[lane + 32 * i] = of_rows[i]
        if lane == 0:
            scales[c.tokens] = of_columns
        cute.arch.sync_warp()
        ptx.arrive_if(s.full + stage, Uint32(lane == 0))

    def _scales(self, stage, s) -> cute.Tensor:
        """The scales of a stage."""
        start = cute.assume(Int32(stage) * self.config.stage_scales, divby=4)
        return cute.make_tensor(s.scales + start, cute.make_layout(self.config.stage_scales))

    def _record(self, stage, s) -> cute.Tensor:
        """Where the tile lies whose block is in a stage: what ``RECORD_WORDS`` says."""
        start = cute.assume(Int32(stage) * RECORD_WORDS, divby=4)
        return cute.make_tensor(s.records + start, cute.make_layout(RECORD_WORDS))

    # Products

    @cute.jit
    def _consume(self, tid, t, s):
        """A warpgroup that multiplies: its 64 rows of each of the CTA's tiles."""
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        first = tid // 32 * 16  # of the warp's rows of the M side
        base = s.stores + cute.assume(tid // 32 * row_tile.SIZE_BYTES, divby=16)
        w = SimpleNamespace(lane=lane, quad=lane % 4, first=first, row=first + lane // 4, stores=base)
        multiply = self._multiplier(group, s)
        size = c.product_columns // 2
        sums = cute.make_rmem_tensor((size,), Float32)
        partials = [cute.make_rmem_tensor((size,), Float32) for _ in range(TOGETHER)]
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        # The tile whose sums are yet to be stored: its first row, rows from there on (none at first), and first column.
        kept = Int32(0), Int32(0), Int32(0)
        for number in range(t.first, t.count, t.workers):
            row, rows, column = self._await_tile(number, stage, parity, lane, t, s)
            exists = True if const_expr(c.is_swapped) else rows > group * GROUP_ROWS
            if exists:
                stage, parity = self._multiply_tile(multiply, sums, partials, kept, stage, parity, w, t, s)
                if const_expr(not c.is_swapped):
                    kept = row, rows, column
                elif const_expr(c.splits > 1):
                    self._add_up(sums, row, rows, column, turn, w, tid, t, s)
                    turn = turn ^ 1
                else:
                    store_columns(sums, t.out, row, rows, column + w.first, lane)
            else:
                # None of its rows exist.
                for _ in cutlass.range(t.blocks, unroll=1):
                    ptx.wait(s.full + stage, parity)
                    self._free(stage, lane, s)
                    stage, parity = next_stage(stage, parity, c.stages)
        if const_expr(not c.is_swapped):
            self._store_kept(sums, kept, w, t)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _await_tile(self, number, stage, parity, lane, t, s):
        """Wait for the first block of a tile, in ``stage``: its first row, rows from there on, and first column.

        The copying warp has left them there, since finding a tile takes some 1,000 clocks; but of CTAs that share a
        tile some may have no block of it.
        """
        if const_expr(self.config.splits == 1):
            ptx.wait(s.full + stage, parity)
            row, rows, column, _ = (Int32(word) for word in load_words(self._record(stage, s)))
        else:
            _, row, rows, column = self.tiles.find(number, t.m, t.n, s.table, lane)
            if t.begin < t.end:
                ptx.wait(s.full + stage, parity)
        return row, rows, column

    @cute.jit
    def _multiply_tile(self, multiply, sums, partials: list, kept, stage, parity, w, t, s):
        """Sum the products of the CTA's blocks of k of a tile; the first block is there.

        Of tiles with rows of ``a`` on the M side, the ``sums`` of the one before, ``kept``, are stored meanwhile.

        Returns the next stage, and its parity.
        """
        c = self.config
        count = t.end - t.begin
        if const_expr(c.is_swapped):
            sums.fill(0.0)
        else:
            if count >= TOGETHER:
                count = count - TOGETHER
                store = functools.partial(self._store_kept, sums, kept, w, t)
                stage, parity = self._add_blocks(multiply, sums, partials, count, stage, parity, w, s, store)
            else:
                self._store_kept(sums, kept, w, t)
        if const_expr(c.unrolls):
            # The round of the ring that others have begun, whole rounds, and what is left.
            begun = cutlass.min((c.stages - stage) % c.stages, count)
            stage, parity = self._add_some(multiply, sums, partials, begun, count - begun, stage, parity, w, s)
            for rest in cutlass.range(count - begun - c.stages, -1, -c.stages, unroll=1):
                for place in range_constexpr(0, c.stages, TOGETHER):
                    follow = rest + (c.stages - TOGETHER - place)
                    _, parity = self._add_blocks(multiply, sums, partials, follow, place, parity, w, s)
            count = (count - begun) % c.stages
        return self._add_some(multiply, sums, partials, count, 0, stage, parity, w, s)

    @cute.jit
    def _add_some(self, multiply, sums, partials: list, count, follow, stage, parity, w, s):
        """Add the products of ``count`` blocks of a tile, which ``follow`` more of its blocks. The next stage, and its
        parity."""
        for rest in cutlass.range(count - TOGETHER, -1, -TOGETHER, unroll=1):
            stage, parity = self._add_blocks(multiply, sums, partials, rest + follow, stage, parity, w, s)
        for _ in cutlass.range(count % TOGETHER, unroll=1):
            stage, parity = self._add_blocks(multiply, sums, partials[:1], follow, stage, parity, w, s)
        return stage, parity

    def _store_kept(self, sums, kept, w, t) -> None:
        """Store the sums of a tile, and begin anew with zeros."""
        row, rows, column = kept
        store_rows(sums, t.out, w.stores, row + w.first, rows - w.first, column, w.lane)
        sums.fill(0.0)

    def _add_blocks(self, multiply, sums, partials: list, follow, stage, parity, w, s, meanwhile=None) -> tuple:
        """Multiply as many blocks as there are ``partials``, of which the first is there, and add their sums to the
        totals: the first's while the products of the others run. ``meanwhile`` is called, if given, when all run. The
        next stage, and its parity.

        While a warpgroup adds its last block, the tensor cores have the other warpgroup's alone. So all else is done
        before a product has ended: scales are read, and of the blocks that ``follow`` the first is waited for.
        """
        c = self.config
        reads = []
        for i, partial in enumerate(partials):
            if i > 0:
                ptx.wait(s.full + stage, parity)
            multiply(stage, partial)
            reads.append(stage)
            stage, parity = next_stage(stage, parity, c.stages)
        if meanwhile is not None:
            meanwhile()
        for i, partial in enumerate(partials):
            later = len(partials) - 1 - i
            factors = self._factors(reads[i], w, s)
            if later == 0:
                self._wait_if(follow > 0, s.full + stage, parity)
            warpgroup.wait_group(later)
            self._free(reads[i], w.lane, s)
            self._promote(sums, partial, factors)
        return stage, parity

    @cute.jit
    def _wait_if(self, condition, barrier, parity):
        """Wait for a phase on a condition. Products under way overlap with this branch, as the machine code tells; with
        one around an arrival they did not (``ptx.arrive_if``)."""
        if condition:
            ptx.wait(barrier, parity)

    def _product(self) -> cute.TiledMma:
        """A step of the products of a warpgroup."""
        shape = GROUP_ROWS, self.config.product_columns, STEP
        sources = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
        return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))

    def _multiplier(self, group, s):
        """The function that starts a warpgroup's products of a stage."""
        c = self.config
        rows, columns = (s.columns, s.tokens) if c.is_swapped else (s.tokens, s.columns)
        # Groups lie one after the other in a stage.
        m_side = self._operand(rows, GROUP_ROWS, c.stages * GROUPS)
        n_side = self._operand(columns, c.product_columns, c.stages)
        product = self._product()
        thread = product.get_slice(0)
        m_operand = product.make_fragment_A(thread.partition_A(m_side))
        n_operand = product.make_fragment_B(thread.partition_B(n_side))

        def multiply(stage, partial) -> None:
            # One of its own: whether it accumulates is known where that was set alone.
            product = self._product()
            shape = product.partition_shape_C((GROUP_ROWS, c.product_columns))
            accumulators = cute.make_tensor(partial.iterator, shape)
            warpgroup.fence()
            for step in range(BLOCK // STEP):
                product.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(
                    product,
                    accumulators,
                    m_operand[None, None, step, stage * GROUPS + group],
                    n_operand[None, None, step, stage],
                    accumulators,
                )
            warpgroup.commit_group()

        return multiply

    @cute.jit
    def _add_up(self, sums, row, rows, column, turn, w, tid, t, s):
        """Add the sums of the CTAs that share a tile, in the order of k, and store them; ``turn`` is the parity of the
        tile among the CTA's."""
        c = self.config
        # All have read the sums of the tile before. (Barriers that were never used count as passed.)
        ptx.wait(s.read, turn ^ 1)
        leave_sums(c.sum_tile, sums, s.stores, w.row, w.quad)
        self._tell(s.left, w.lane)
        ptx.wait(s.left, turn)
        first = t.out.iterator + cute.assume(Int64(row) * t.n, divby=8)
        out = cute.make_tensor(first, cute.make_layout((rows, t.n), stride=(t.n, 1)))
        one = Float32(1.0), Float32(1.0)
        write_sums(c.sum_tile, c.splits, GROUPS * WARPGROUP, one, out, s.stores, t.rank, tid, Int32(0), column)
        self._tell(s.read, w.lane)

    def _factors(self, stage, w, s) -> list:
        """The factors of a lane's sums: of rows, or of columns where these are rows of ``a``."""
        c, scales = self.config, self._scales(stage, s)
        if c.is_swapped:
            places = [8 * i + w.quad * 2 + e for i in range(c.tokens // 8) for e in range(2)]
        else:
            places = [w.row, w.row + 8]
        of_columns = scales[c.tokens]
        return [ptx.mul_rn(scales[place], of_columns) for place in places]

    def _promote(self, sums, partial, factors: list) -> None:
        """Add a block's sums to the totals."""
        for i in range(self.config.product_columns // 2):
            which = i // 4 * 2 + i % 2 if self.config.is_swapped else i // 2 % 2
            sums[i] = ptx.fma_rn(factors[which], partial[i], sums[i])
