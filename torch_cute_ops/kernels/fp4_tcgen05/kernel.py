"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common import ptx, tcgen05
from torch_cute_ops.kernels.common.activation_layout import CHUNK
from torch_cute_ops.kernels.common.cluster_sums import sum_columns, write_sums
from torch_cute_ops.kernels.common.convert import pack, store_words
from torch_cute_ops.kernels.common.epilogue_ops import EpilogueOps
from torch_cute_ops.kernels.common.fp4_weights import rows_of_bytes, scale_argument
from torch_cute_ops.kernels.common.overlap import ctas_unless_overlapping
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.weight_ring import next_stage
from torch_cute_ops.kernels.fp4_tcgen05.config import (
    ALIGNMENT,
    ARRANGING_WARPS,
    LINE,
    ROWS,
    SCALE_BUFFERS,
    SCALE_TILE,
    STEP,
    STORING_WARPS,
    Arguments,
    Config,
)
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

STEPS = CHUNK // STEP
COPIER, MULTIPLIER = STORING_WARPS, STORING_WARPS + 1
BAND = 8  # tiles of tokens that run side by side
LEADER = 0  # the CTA of a pair that issues MMAs


class Part(NamedTuple):
    """A CTA's part of the GEMM, and the operands.

    Attributes:
        n, m: sizes of the result.
        steps, blocks: MMAs of a tile, and blocks of a row.
        row_tiles, token_tiles: how many there are.
        first, pitch: the first of the CTA's tiles, and how far it is to the next.
        begin, end: its chunks of each tile.
        rank: the CTA in its cluster.
        a_scale, b_scale: as bytes.
        alpha, bias: operands of the epilogue, if it has them.
        out: the result.
    """

    n: Int32
    m: Int32
    steps: Int32
    blocks: Int32
    row_tiles: Int32
    token_tiles: Int32
    first: Int32
    pitch: Int32
    begin: Int32
    end: Int32
    rank: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor


class Smem(NamedTuple):
    """Shared memory: the stages, and barriers. A stage is full, in this CTA or its pair's second, or free; columns of
    scales are free; sums are complete, or their columns free. ``columns`` is where those of tensor memory begin."""

    stages: cute.Pointer
    full: cute.Pointer
    peer_full: cute.Pointer
    free: cute.Pointer
    scales_free: cute.Pointer
    sums_full: cute.Pointer
    sums_free: cute.Pointer
    columns: cute.Pointer


class FP4Tcgen05Kernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.epilogue = EpilogueOps(config.epilogue)
        self.out_dtype = self.epilogue.out_dtype
        self.chunk_blocks = CHUNK // config.fmt.block_size
        self.steps_per_tile = STEPS // config.scale_tiles

    def arguments(self) -> Arguments:
        c = self.config
        m, n = Dim("m"), Dim("n", divisibility=8)
        half = Dim("k_bytes", divisibility=STEP // 2)
        linear = c.arranges
        blocks = Dim("blocks", divisibility=TILE_BLOCKS)
        a_rows, b_rows = (m, n) if linear else (Dim(name, divisibility=ROWS) for name in ("a_rows", "b_rows"))
        alpha, bias = self.epilogue.arguments(n)
        return Arguments(
            a=TensorArg("Uint8", (m, half), (half, 1), align=16),
            a_scale=scale_argument(c.fmt, a_rows, blocks),
            b=TensorArg("Uint8", (half, n), (1, half), align=16),
            b_scale=scale_argument(c.fmt, b_rows, blocks),
            alpha=alpha,
            bias=bias,
            out=TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, ctas: Int32, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tokens) * cute.ceil_div(out.shape[1], c.rows)
        if const_expr(c.splits > 1):
            ctas = tiles * c.splits
        else:
            ctas = cutlass.min(tiles, cutlass.max(ctas // c.group, Int32(1))) * c.group
        ctas = ctas_unless_overlapping(ctas, (out,), (a, a_scale, b, b_scale, alpha, bias))
        b_rows, b_bytes = rows_of_bytes(b, b_scale)
        a_bytes = cute.make_tensor(cute.recast_ptr(a_scale.iterator, dtype=Uint8), a_scale.layout)
        maps = self._map(a, c.own_tokens), self._map(b_rows, ROWS)
        self.kernel(*maps, a_bytes, b_bytes, alpha, bias, out).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _map(self, codes: cute.Tensor, rows: int) -> tuple:
        """A tensor map of codes, in boxes of a chunk of so many rows."""
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), codes, self._box(rows), (rows, LINE))

    def _box(self, rows: int):
        """A chunk's codes in shared memory, (rows, line)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Uint8)
        return cute.tile_to_shape(atom, (rows, LINE), order=(0, 1))

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, alpha, bias, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        n, half = b_map[1].shape
        chunks = cute.ceil_div(half, LINE)
        rank, team = cta % c.cluster, cta // c.cluster
        begin, end = Int32(0), Int32(chunks)
        if const_expr(c.splits > 1):
            begin, end = rank * chunks // c.splits, (rank + 1) * chunks // c.splits
        part = Part(
            n=n,
            m=out.shape[0],
            steps=half // (STEP // 2),
            blocks=half * 2 // c.fmt.block_size,
            row_tiles=cute.ceil_div(n, c.rows),
            token_tiles=cute.ceil_div(out.shape[0], c.tokens),
            first=team,
            pitch=ctas // c.cluster,
            begin=begin,
            end=end,
            rank=rank,
            a_scale=a_scale,
            b_scale=b_scale,
            alpha=alpha,
            bias=bias,
            out=out,
        )
        smem = self._allocate()
        if warp == MULTIPLIER:
            tcgen05.allocate(smem.columns, c.columns, c.group)
        if tid == 0:
            self._initialise(smem)
        cute.arch.mbarrier_init_fence()
        self._meet()
        columns = Uint32(cute.make_tensor(smem.columns, cute.make_layout(1))[0])
        if warp == COPIER:
            self._copy(a_map, b_map, part, smem)
        elif warp == MULTIPLIER:
            if lane == 0:
                if const_expr(c.group == 1):
                    self._multiply(columns, part, smem)
                elif rank == LEADER:
                    self._multiply(columns, part, smem)
                else:
                    self._relay(part, smem)
        elif warp < STORING_WARPS:
            self._store(columns, tid, part, smem)
        elif const_expr(c.arranges):
            self._arrange(tid - 32 * (MULTIPLIER + 1), part, smem)
        cute.arch.sync_warp()
        if const_expr(c.splits > 1):
            self._add_up(tid, part, smem)
        else:
            # All loads of tensor memory are done, and in a pair the MMAs that read the other's shared memory.
            self._meet()
        if warp == MULTIPLIER:
            tcgen05.free(columns, c.columns, c.group)

    @cute.jit
    def _meet(self):
        """A barrier of the CTA, or of a pair."""
        if const_expr(self.config.group > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, ALIGNMENT)
        barriers = cute.recast_ptr(base + c.stages * c.stage_bytes, dtype=Int64)
        ends = [0]
        for count in (c.stages, c.stages, c.stages, SCALE_BUFFERS, c.accumulators, c.frees):
            ends.append(ends[-1] + count)
        return Smem(base, *(barriers + end for end in ends[:-1]), cute.recast_ptr(barriers + ends[-1], dtype=Uint32))

    def _initialise(self, smem: Smem) -> None:
        c = self.config
        for i in range(c.stages):
            cute.arch.mbarrier_init(smem.full + i, 1 + c.arranges)
            if c.group == 2:
                cute.arch.mbarrier_init(smem.peer_full + i, 1)
            cute.arch.mbarrier_init(smem.free + i, 1)
        for i in range(SCALE_BUFFERS):
            cute.arch.mbarrier_init(smem.scales_free + i, 1)
        for i in range(c.accumulators):
            cute.arch.mbarrier_init(smem.sums_full + i, 1)
        for i in range(c.frees):
            cute.arch.mbarrier_init(smem.sums_free + i, STORING_WARPS * c.group)

    def _tile(self, number, part):
        """The tile of rows and that of tokens. Tiles of tokens are taken in bands of ``BAND``: in a band, all of a tile
        of rows, then those of the next."""
        band = number // (part.row_tiles * BAND)
        width = cutlass.min(part.token_tiles - band * BAND, Int32(BAND))
        place = number - band * (part.row_tiles * BAND)
        return place // width, band * BAND + place % width

    # Copies

    @cute.jit
    def _copy(self, a_map, b_map, part, smem):
        """The copying warp: fill stages."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        a_from = self._boxes(a_map, c.own_tokens, smem)
        b_from = self._boxes(b_map, ROWS, smem)
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            row_tile, token_tile = self._tile(tile, part)
            half = part.rank if const_expr(c.group == 2) else Int32(0)
            for chunk in cutlass.range(part.begin, part.end, unroll=1):
                ptx.wait(smem.free + stage, parity)
                base = smem.stages + cute.assume(stage * c.stage_bytes, divby=ALIGNMENT)
                self._copy_scales(row_tile * c.group + half, token_tile, chunk, base, smem.full + stage, part)
                weight = self._to(ROWS, base, b_map, b_from)
                self._copy_box(b_map[0], weight, row_tile * c.group + half, chunk, smem.full + stage, ptx.EVICT_FIRST)
                tokens = self._to(c.own_tokens, base + ROWS * LINE, a_map, a_from)
                self._copy_box(a_map[0], tokens, token_tile * c.group + half, chunk, smem.full + stage, None)
                stage, parity = next_stage(stage, parity, c.stages)
            tile += part.pitch
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    def _boxes(self, map, rows: int, smem):
        """A matrix as boxes: (tiles of rows, chunks)."""
        return cute.local_tile(map[1], (rows, LINE), (None, None))

    def _to(self, rows: int, at: cute.Pointer, map, boxes) -> tuple:
        """The box in shared memory, and those in memory."""
        layout = self._box(rows)
        box = cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=Uint8), layout.outer)
        return cpasync.tma_partition(
            map[0], 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(boxes, 0, 2)
        )

    def _copy_box(self, copy, boxes: tuple, row, chunk, barrier, policy) -> None:
        target, source = boxes
        options = {} if policy is None else {"cache_policy": Int64(policy)}
        cute.copy(copy, source[None, row, chunk], target, tma_bar_ptr=barrier, **options)

    @cute.jit
    def _copy_scales(self, row_band, token_tile, chunk, base, barrier, part):
        """Start the copies of a stage's scales, if they are in tiles; the stage's barrier expects all of its bytes."""
        c = self.config
        if const_expr(c.arranges):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, c.code_bytes)
        else:
            first = chunk * c.scale_tiles
            pitch = part.b_scale.shape[1] // TILE_BLOCKS
            size = cutlass.min(pitch - first, Int32(c.scale_tiles)) * SCALE_TILE
            token_band = token_tile * c.tokens // ROWS
            token_bands = cutlass.min(cute.ceil_div(part.m, ROWS) - token_band, Int32(c.bands))
            row_bands = cutlass.min(cute.ceil_div(part.n, ROWS) - row_band, Int32(1))
            row_bands = cutlass.max(row_bands, Int32(0))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, c.code_bytes + size * (token_bands + row_bands))
                at = base + c.code_bytes
                for i in range_constexpr(c.bands):
                    if i < token_bands:
                        source = (Int64(token_band + i) * pitch + first) * SCALE_TILE
                        ptx.copy_bulk(
                            at + i * c.scale_tiles * SCALE_TILE,
                            part.a_scale.iterator + cute.assume(source, divby=SCALE_TILE),
                            size,
                            barrier,
                        )
                if row_bands > 0:
                    source = (Int64(row_band) * pitch + first) * SCALE_TILE
                    ptx.copy_bulk(
                        at + c.token_scale_bytes,
                        part.b_scale.iterator + cute.assume(source, divby=SCALE_TILE),
                        size,
                        barrier,
                        policy=ptx.EVICT_FIRST,
                    )

    @cute.jit
    def _arrange(self, thread, part, smem):
        """An arranging warp: write linear scales to every fourth stage in the order of tiles. So the warps have several
        chunks in flight. A lane has every 32nd row of each 128, whose words are neighbours in a tile."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        turn, lane = thread // 32, thread % 32
        stage, parity = Int32(0), Int32(1)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            row_tile, token_tile = self._tile(tile, part)
            half = part.rank if const_expr(c.group == 2) else Int32(0)
            row = (row_tile * c.group + half) * ROWS + lane
            token = token_tile * c.tokens + lane
            for chunk in cutlass.range(part.begin, part.end, unroll=1):
                if turn == 0:
                    self._arrange_chunk(row, token, chunk, stage, parity, lane, part, smem)
                else:
                    # A warp that left out phases could take one for the next but one, which has the same parity.
                    ptx.wait(smem.free + stage, parity)
                turn = (turn + ARRANGING_WARPS - 1) % ARRANGING_WARPS
                stage, parity = next_stage(stage, parity, c.stages)
            tile += part.pitch

    @cute.jit
    def _arrange_chunk(self, row, token, chunk, stage, parity, lane, part, smem):
        """Scales of a chunk, of a lane's rows from ``row`` and ``token`` on."""
        c = self.config
        # They are loaded while the stage is still in use.
        bands = [
            self._load_scales(part.a_scale, token + i * ROWS, part.m, min(c.tokens, ROWS), chunk, part)
            for i in range(c.bands)
        ]
        bands.append(self._load_scales(part.b_scale, row, part.n, ROWS, chunk, part))
        ptx.wait(smem.free + stage, parity)
        base = smem.stages + cute.assume(stage * c.stage_bytes + c.code_bytes + lane * 16, divby=16)
        for i, rows in enumerate(bands):
            for j, words in enumerate(zip(*rows, strict=True)):
                to = cute.recast_ptr(base + (i * c.scale_tiles + j) * SCALE_TILE, dtype=Uint32)
                store_words(list(words), cute.make_tensor(to, cute.make_layout(len(words))))
        fence_async()
        cute.arch.sync_warp()
        ptx.arrive_if(smem.full + stage, Uint32(lane == 0))

    def _load_scales(self, scales, row, rows, used: int, chunk, part) -> list:
        """A chunk's scales of every 32nd of 128 rows, each as a list of words; zeros beyond the matrix, and beyond the
        ``used`` of these rows."""
        first = chunk * self.chunk_blocks
        tiles = range(self.config.scale_tiles)
        loaded = []
        for after in range(0, ROWS, 32):
            at = scales.iterator + cute.assume(Int64(row + after) * part.blocks + first, divby=4)
            exist = [(row + after < rows) & (first + TILE_BLOCKS * j < part.blocks) for j in tiles]
            words = [ptx.load_if(at, exist[j], 1, TILE_BLOCKS * j)[0] for j in tiles if after < used]
            loaded.append(words or [Uint32(0) for _ in tiles])
        return loaded

    # MMAs

    @cute.jit
    def _relay(self, part, smem):
        """A thread of a pair's second CTA: tell the first one when a stage is full."""
        c = self.config
        stage, parity = Int32(0), Int32(0)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            for _chunk in cutlass.range(part.begin, part.end, unroll=1):
                ptx.wait(smem.full + stage, parity)
                ptx.arrive_at_if(smem.peer_full + stage, Uint32(LEADER), Uint32(1))
                stage, parity = next_stage(stage, parity, c.stages)
            tile += part.pitch

    @cute.jit
    def _multiply(self, columns, part, smem):
        """The multiplying thread: issue the MMAs of all tiles."""
        c = self.config
        pair = c.group == 2
        stage, parity = Int32(0), Int32(0)
        buffer, buffer_parity = Int32(0), Int32(1)
        accumulator, sums_parity = Int32(0), Int32(0)
        free, free_parity = Int32(0), Int32(1)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            _, token_tile = self._tile(tile, part)
            if const_expr(c.frees > 0):
                # Where accumulators overlap: of the tile before, those columns that both have have been loaded, and so
                # have all of the one before that.
                ptx.wait(smem.sums_free + free, free_parity)
                free, free_parity = next_stage(free, free_parity, c.frees)
            total = columns + Uint32(accumulator * c.pitch)
            for chunk in cutlass.range(part.begin, part.end, unroll=1):
                ptx.wait(smem.scales_free + buffer, buffer_parity)
                ptx.wait(smem.full + stage, parity)
                if const_expr(pair):
                    ptx.wait(smem.peer_full + stage, parity)
                tcgen05.fence_after()
                scales = columns + Uint32(c.sum_columns + buffer * c.scale_columns)
                steps = cutlass.min(part.steps - chunk * STEPS, Int32(STEPS))
                at = Uint32(smem.stages.toint()) + Uint32(stage * c.stage_bytes)
                self._multiply_chunk(total, at, scales, steps, token_tile, chunk > part.begin)
                tcgen05.commit(smem.free + stage, c.group, pair)
                tcgen05.commit(smem.scales_free + buffer, c.group, False)
                stage, parity = next_stage(stage, parity, c.stages)
                buffer, buffer_parity = next_stage(buffer, buffer_parity, SCALE_BUFFERS)
            tcgen05.commit(smem.sums_full + accumulator, c.group, pair)
            accumulator, sums_parity = next_stage(accumulator, sums_parity, c.accumulators)
            tile += part.pitch

    @cute.jit
    def _multiply_chunk(self, total, at, scales, steps, token_tile, adds):
        """Issue the copies of a chunk's scales, and its first ``steps`` MMAs."""
        c = self.config
        # Of a tile of fewer tokens than a tile of scales has, the first row's lane and column.
        lane, column = Uint32(0), Uint32(0)
        if const_expr(c.tokens < ROWS and not c.arranges):
            first = token_tile * c.tokens % ROWS
            lane, column = Uint32(first % 32), Uint32(first // 32)
        token_scales = at + c.code_bytes
        weight_scales = token_scales + c.token_scale_bytes
        token_columns = scales + c.scale_tiles * TILE_BLOCKS
        for i in range_constexpr(c.scale_tiles):
            if i * self.steps_per_tile < steps:
                source = tcgen05.scale_descriptor(weight_scales + i * SCALE_TILE)
                tcgen05.copy_scales(scales + i * TILE_BLOCKS, source, c.group)
                for band in range_constexpr(c.bands):
                    source = token_scales + (band * c.scale_tiles + i) * SCALE_TILE + lane * 16
                    to = token_columns + (i * c.bands + band) * TILE_BLOCKS
                    tcgen05.copy_scales(to, tcgen05.scale_descriptor(source), c.group)
        for step in range_constexpr(STEPS):
            if step < steps:
                tile, scale_id = step // self.steps_per_tile, step % self.steps_per_tile * 2
                tcgen05.multiply(
                    total,
                    tcgen05.operand_descriptor(at + step * (STEP // 2)),
                    tcgen05.operand_descriptor(at + ROWS * LINE + step * (STEP // 2)),
                    tcgen05.instruction_descriptor(c.rows, c.tokens, c.fmt == MXFP4, scale_id),
                    scales + tile * TILE_BLOCKS,
                    token_columns + tile * c.bands * TILE_BLOCKS + column,
                    adds if step == 0 else True,
                    c.fmt.block_size,
                    c.group,
                )

    # Results

    def _first_row(self, row_tile, part):
        """The first of the CTA's rows of the weight."""
        half = part.rank if self.config.group == 2 else Int32(0)
        return (row_tile * self.config.group + half) * ROWS

    @cute.jit
    def _store(self, columns, tid, part, smem):
        """A storing warp: finish and store the sums of all tiles; with ``splits`` leave them to ``_add_up``."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        factor = self.epilogue.factor(part.alpha)
        accumulator, parity = Int32(0), Int32(0)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            row_tile, token_tile = self._tile(tile, part)
            row = self._first_row(row_tile, part) + tid
            finish = None
            if const_expr(c.splits == 1):
                finish = self.epilogue.finisher(factor, self.epilogue.terms(part.alpha, part.bias, row, 1, part.n))
            ptx.wait(smem.sums_full + accumulator, parity)
            tcgen05.fence_after()
            start = columns + Uint32(accumulator * c.pitch) + Uint32(tid // 32 * 32 << 16)
            token = token_tile * c.tokens
            if const_expr(c.shared > 0):
                # Those that the accumulators share are the last of the first, and the first of the second.
                skipped = ptx.select(accumulator == 0, Int32(c.pitch), Int32(0))
                self._store_columns(start, skipped, c.shared, finish, token, row, tid, part, smem)
                self._leave_columns(smem.sums_free, tid)
                skipped = ptx.select(accumulator == 0, Int32(0), Int32(c.shared))
                self._store_columns(start, skipped, c.pitch, finish, token, row, tid, part, smem)
            else:
                self._store_columns(start, Int32(0), c.tokens, finish, token, row, tid, part, smem)
                if const_expr(c.frees > 0):
                    self._leave_columns(smem.sums_free + accumulator, tid)
            accumulator, parity = next_stage(accumulator, parity, c.accumulators)
            tile += part.pitch

    @cute.jit
    def _store_columns(self, start, skipped, count: int, finish, token, row, tid, part, smem):
        """Load ``count`` columns of sums, behind some that are skipped; finish and store them, or leave them."""
        c = self.config
        for piece in cutlass.range(count // c.loaded, unroll=1):
            column = skipped + piece * c.loaded
            sums = tcgen05.load(start + Uint32(column), c.loaded)
            tcgen05.wait_for_loads()
            if const_expr(c.splits == 1):
                values = [finish(ptx.float_of(word), 0) for word in sums]
                self._write(values, token + column, row, tid % 2, part)
            else:
                self._leave(sums, column, tid, smem)

    def _leave_columns(self, barrier, tid) -> None:
        """The warp has loaded what others may overwrite now."""
        tcgen05.fence_before()
        cute.arch.sync_warp()
        leads = Uint32(tid % 32 == 0)
        if self.config.group == 2:
            ptx.arrive_at_if(barrier, Uint32(LEADER), leads)
        else:
            ptx.arrive_if(barrier, leads)

    @cute.jit
    def _write(self, values: list, token, row, odd, part):
        """Store a column of results, of tokens from ``token`` on."""
        if const_expr(self.out_dtype is Float32):
            for i, value in enumerate(values):
                if (token + i < part.m) & (row < part.n):
                    self._put(token + i, row, ptx.bits_of(value), part)
        else:
            # Lanes exchange halves of words: then each has a token's results of two columns.
            for i in range_constexpr(0, len(values), 2):
                word = pack(values[i : i + 2], self.out_dtype)[0]
                other = cute.arch.shuffle_sync_bfly(word, offset=1)
                even = ptx.prmt(word, other, 0x5410)
                word = ptx.select(odd == 1, ptx.prmt(word, other, 0x3276), even)
                if (token + i + odd < part.m) & (row < part.n):
                    self._put(token + i + odd, row - odd, word, part)

    def _put(self, token, row, word, part) -> None:
        at = part.out.iterator + (Int64(token) * part.n + row)
        cute.make_tensor(cute.recast_ptr(at.align(4), dtype=Uint32), cute.make_layout(1))[0] = word

    def _leave(self, sums: list, token, row, smem) -> None:
        """Store a row of sums in this CTA's shared memory."""
        tile = self.config.sum_tile
        at = smem.stages + cute.assume((token * tile.pitch + row) * 4, divby=4)
        for i, word in enumerate(sums):
            ptx.store_shared_if(at + i * tile.pitch * 4, word, True)

    @cute.jit
    def _add_up(self, tid, part, smem):
        """Add up the sums of the cluster's CTAs, finish and store them; warps that have none wait only."""
        c = self.config
        threads = 32 * STORING_WARPS
        row_tile, token_tile = self._tile(part.first, part)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tid < threads:
            at = token_tile * c.tokens, row_tile * ROWS
            terms = self.epilogue.terms(
                part.alpha, part.bias, *sum_columns(c.sum_tile, threads, tid, row_tile * ROWS), part.n
            )
            finish = self.epilogue.finisher(self.epilogue.factor(part.alpha), terms)
            write_sums(c.sum_tile, c.splits, threads, finish, part.out, smem.stages, part.rank, tid, *at)
        cute.arch.sync_warp()
        # No CTA may end while another still reads its sums.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
