"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled_kernel import (
    LEADER,
    WARP,
    BlockScaledKernel,
    ScaleTiles,
    as_bytes,
)
from torch_cute_ops.kernels.common.blackwell.block_scaled_mma import STEPS
from torch_cute_ops.kernels.common.blackwell.layouts import LINE, ROWS, STEP, STORING_WARPS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, raster_tile
from torch_cute_ops.kernels.common.core.memory import pack
from torch_cute_ops.kernels.common.core.partial_sums import reduce_partial_sums, thread_columns
from torch_cute_ops.kernels.common.core.pipeline import next_stage
from torch_cute_ops.kernels.common.fp4.decode import rows_of_bytes
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.kernels.fp4_tcgen05.config import Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


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


class FP4Tcgen05Kernel(BlockScaledKernel):
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.epilogue = EpilogueOps(config.epilogue)
        self.out_dtype = self.epilogue.out_dtype

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        out = TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16)
        return Arguments(*self.mma.arguments(m, n), *self.epilogue.arguments(n), out, ctas=ScalarArg("Int32"))

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
        maps = self.mma.map(a, self.stage.own_columns), self.mma.map(b_rows, ROWS)
        self.kernel(*maps, as_bytes(a_scale), b_bytes, alpha, bias, out).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, alpha, bias, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
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
        smem, columns = self._work(tid, (a_map, b_map), part)
        if const_expr(c.splits > 1):
            self._add_up(tid, part, smem)
        else:
            # All loads of tensor memory are done, and in a pair the MMAs that read the other's shared memory.
            self._meet()
        self._free(tid, columns)

    def _tile(self, number, part):
        """The tile of rows and that of tokens."""
        return raster_tile(number, part.row_tiles, part.token_tiles)

    # Copies

    @cute.jit
    def _copy(self, a_map, b_map, part, smem):
        """The copying warp: fill stages."""
        c = self.config
        tokens, rows = self.mma.boxes(a_map, self.stage.own_columns), self.mma.boxes(b_map, ROWS)
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            row_tile, token_tile = self._tile(tile, part)
            half = part.rank if const_expr(c.group == 2) else Int32(0)
            for chunk in cutlass.range(part.begin, part.end, unroll=1):
                ptx.wait(smem.free + stage, parity)
                base = self._stage_at(stage, smem)
                self._copy_scales_of(row_tile * c.group + half, token_tile, chunk, base, smem.full + stage, part)
                place = row_tile * c.group + half, chunk
                self.mma.copy_box(b_map, rows, ROWS, base, place, smem.full + stage, ptx.EVICT_FIRST)
                place = token_tile * c.group + half, chunk
                to = base + ROWS * LINE
                self.mma.copy_box(a_map, tokens, self.stage.own_columns, to, place, smem.full + stage, None)
                stage, parity = next_stage(stage, parity, c.stages)
            tile += part.pitch

    @cute.jit
    def _copy_scales_of(self, row_tile, token_tile, chunk, base, barrier, part):
        """Start the copies of a stage's scales, if they are in tiles."""
        c, stage = self.config, self.stage
        first = chunk * stage.scale_tiles
        size = cutlass.min(part.b_scale.shape[1] // TILE_BLOCKS - first, Int32(stage.scale_tiles)) * SCALE_TILE_BYTES
        token_row_tile = token_tile * c.tokens // ROWS
        token_tiles = cutlass.min(cute.ceil_div(part.m, ROWS) - token_row_tile, Int32(stage.scale_row_tiles))
        row_tiles = cutlass.max(cutlass.min(cute.ceil_div(part.n, ROWS) - row_tile, Int32(1)), Int32(0))
        rows = ScaleTiles(part.b_scale, row_tile, row_tiles, ptx.EVICT_FIRST)
        tokens = ScaleTiles(part.a_scale, token_row_tile, token_tiles, None)
        self._copy_scales(rows, tokens, first, size, base, barrier)

    @cute.jit
    def _arrange(self, thread, part, smem):
        """An arranging warp: write linear scales to every fourth stage."""
        c = self.config
        turn, lane = thread // WARP, thread % WARP
        stage, parity = Int32(0), Int32(1)
        tile = part.first
        while tile < part.row_tiles * part.token_tiles:
            row_tile, token_tile = self._tile(tile, part)
            half = part.rank if const_expr(c.group == 2) else Int32(0)
            rows = part.b_scale, (row_tile * c.group + half) * ROWS + lane, part.n
            tokens = part.a_scale, token_tile * c.tokens + lane, part.m
            for chunk in cutlass.range(part.begin, part.end, unroll=1):
                first = chunk * (K_TILE // c.fmt.block_size)
                turn, stage, parity = self._arrange_chunk(
                    turn, lane, rows, tokens, first, part.blocks, stage, parity, smem
                )
            tile += part.pitch

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
        """The multiplying thread. In a pair, that of the first CTA issues all MMAs."""
        if const_expr(self.config.group == 1):
            self._issue(columns, part, smem)
        elif part.rank == LEADER:
            self._issue(columns, part, smem)
        else:
            self._relay(part, smem)

    @cute.jit
    def _issue(self, columns, part, smem):
        """Issue the MMAs of all tiles."""
        c = self.config
        place = self._first_chunk()
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
                place = self._multiply_chunk(
                    place,
                    columns,
                    total,
                    cutlass.min(part.steps - chunk * STEPS, Int32(STEPS)),
                    token_tile * c.tokens,
                    chunk > part.begin,
                    None,
                    smem,
                )
            tcgen05.commit(smem.sums_full + accumulator, c.group, c.group == 2)
            accumulator, sums_parity = next_stage(accumulator, sums_parity, c.accumulators)
            tile += part.pitch

    # Results

    def _first_row(self, row_tile, part):
        """The first of the CTA's rows of the weight."""
        half = part.rank if self.config.group == 2 else Int32(0)
        return (row_tile * self.config.group + half) * ROWS

    @cute.jit
    def _store(self, columns, tid, part, smem):
        """A storing warp: finish and store the sums of all tiles; with ``splits`` leave them to ``_add_up``."""
        c = self.config
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
                part.alpha, part.bias, *thread_columns(c.sum_tile, threads, tid, row_tile * ROWS), part.n
            )
            finish = self.epilogue.finisher(self.epilogue.factor(part.alpha), terms)
            reduce_partial_sums(c.sum_tile, c.splits, threads, finish, part.out, smem.stages, part.rank, tid, *at)
        cute.arch.sync_warp()
        # No CTA may end while another still reads its sums.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
