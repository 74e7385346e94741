"""Device code of the FP4 tcgen05 GEMM. The package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled import (
    MMAS_PER_K_TILE,
    BlockScaledKernel,
    ScaleTiles,
    as_bytes,
)
from torch_cute_ops.kernels.common.blackwell.layouts import EPILOGUE_WARPS, K_TILE_BYTES, MMA_K, MMA_M
from torch_cute_ops.kernels.common.blackwell.results import store_acc, store_results
from torch_cute_ops.kernels.common.blackwell.roles import LEADER, WARP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps, load_row_scale
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, raster_tile
from torch_cute_ops.kernels.common.core.partial_sums import reduce_partial_sums, thread_columns
from torch_cute_ops.kernels.common.core.pipeline import next_stage
from torch_cute_ops.kernels.common.fp4.codes import rows_of_bytes, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.kernels.fp4_tcgen05.config import Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    Attributes:
        n, m: numbers of columns and rows of the result.
        num_mmas, blocks: number of MMAs of a tile, and number of blocks of a row.
        n_tiles, m_tiles: numbers of tiles along N and M.
        first, pitch: index of the CTA's first tile, and distance to its next tile.
        begin, end: range of k tiles that the CTA multiplies in each tile.
        rank: rank of the CTA in its cluster.
        a_scale, b_scale: block scales as bytes.
        alpha, bias, row_scale: operands of the epilogue, or None.
        out: result.
    """

    n: Int32
    m: Int32
    num_mmas: Int32
    blocks: Int32
    n_tiles: Int32
    m_tiles: Int32
    first: Int32
    pitch: Int32
    begin: Int32
    end: Int32
    rank: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    row_scale: cute.Tensor | None
    out: cute.Tensor


class FP4Tcgen05Kernel(BlockScaledKernel):
    """GEMM kernel, compiled for a ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.epilogue = EpilogueOps(config.epilogue)
        self.out_dtype = self.epilogue.out_dtype

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        out = TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16)
        terms = *self.epilogue.arguments(n), self.epilogue.row_scale_argument(m)
        return Arguments(*self.mma.arguments(m, n), *terms, out, num_ctas=ScalarArg("Int32"))

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, row_scale, out, num_ctas: Int32, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tile_m) * cute.ceil_div(out.shape[1], c.tile_n)
        if const_expr(c.split_k > 1):
            num_ctas = tiles * c.split_k
        else:
            num_ctas = cutlass.min(tiles, cutlass.max(num_ctas // c.cta_group, Int32(1))) * c.cta_group
        num_ctas = ctas_unless_overlapping(num_ctas, (out,), (a, a_scale, b, b_scale, alpha, bias, row_scale))
        b_rows, b_bytes = rows_of_bytes(b, scale_matrix(b_scale, self.stage.layout))
        maps = self.mma.map(a, self.stage.cta_mma_n), self.mma.map(b_rows, MMA_M)
        self.kernel(*maps, as_bytes(a_scale, self.stage.layout), b_bytes, alpha, bias, row_scale, out).launch(
            grid=[num_ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, alpha, bias, row_scale, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        n, half = b_map[1].shape
        k_tiles = cute.ceil_div(half, K_TILE_BYTES)
        rank, cluster_index = cta % c.cluster, cta // c.cluster
        begin, end = Int32(0), Int32(k_tiles)
        if const_expr(c.split_k > 1):
            begin, end = rank * k_tiles // c.split_k, (rank + 1) * k_tiles // c.split_k
        work = Work(
            n=n,
            m=out.shape[0],
            num_mmas=half // (MMA_K // 2),
            blocks=half * 2 // c.fmt.block_size,
            n_tiles=cute.ceil_div(n, c.tile_n),
            m_tiles=cute.ceil_div(out.shape[0], c.tile_m),
            first=cluster_index,
            pitch=num_ctas // c.cluster,
            begin=begin,
            end=end,
            rank=rank,
            a_scale=a_scale,
            b_scale=b_scale,
            alpha=alpha,
            bias=bias,
            row_scale=row_scale,
            out=out,
        )
        smem, tmem = self._run_roles(tid, (a_map, b_map), work)
        if const_expr(c.split_k > 1):
            self._reduce_split_k(tid, work, smem)
        else:
            # Wait until all loads from tensor memory have ended. In a CTA pair, also wait until no MMA reads the other
            # CTA's shared memory.
            self._sync()
        self._free_tmem(tid, tmem)

    def _tile(self, number, work):
        """Return the index along N and the index along M of tile ``number``."""
        return raster_tile(number, work.n_tiles, work.m_tiles)

    # Copies

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which fills the stages."""
        c = self.config
        a_boxes, b_boxes = self.mma.boxes(a_map, self.stage.cta_mma_n), self.mma.boxes(b_map, MMA_M)
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        tile = work.first
        while tile < work.n_tiles * work.m_tiles:
            n_tile, m_tile = self._tile(tile, work)
            half = work.rank if const_expr(c.cta_group == 2) else Int32(0)
            for k_tile in cutlass.range(work.begin, work.end, unroll=1):
                smem.pipeline.wait_empty(stage, parity)
                base = self._stage_at(stage, smem)
                self._copy_scales_of(
                    n_tile * c.cta_group + half, m_tile, k_tile, base, smem.pipeline.full + stage, work
                )
                place = n_tile * c.cta_group + half, k_tile
                self.mma.copy_box(b_map, b_boxes, MMA_M, base, place, smem.pipeline.full + stage, ptx.EVICT_FIRST)
                place = m_tile * c.cta_group + half, k_tile
                to = base + MMA_M * K_TILE_BYTES
                self.mma.copy_box(a_map, a_boxes, self.stage.cta_mma_n, to, place, smem.pipeline.full + stage, None)
                stage, parity = smem.pipeline.next(stage, parity)
            tile += work.pitch

    @cute.jit
    def _copy_scales_of(self, n_tile, m_tile, k_tile, base, barrier, work):
        """If the scales are tiled, start the copies of a stage's scales. In any case, make the stage's full barrier
        expect the bytes of all copies to the stage."""
        c, stage = self.config, self.stage
        first = k_tile * stage.scale_tiles
        size = cutlass.min(work.b_scale.shape[1] // TILE_BLOCKS - first, Int32(stage.scale_tiles)) * SCALE_TILE_BYTES
        a_scale_tile = m_tile * c.tile_m // MMA_M
        a_scale_tiles = cutlass.min(cute.ceil_div(work.m, MMA_M) - a_scale_tile, Int32(stage.scale_row_tiles))
        b_scale_tiles = cutlass.max(cutlass.min(cute.ceil_div(work.n, MMA_M) - n_tile, Int32(1)), Int32(0))
        b_tiles = ScaleTiles(work.b_scale, n_tile, b_scale_tiles, ptx.EVICT_FIRST)
        a_tiles = ScaleTiles(work.a_scale, a_scale_tile, a_scale_tiles, None)
        self._copy_scale_tiles(b_tiles, (a_tiles,), first, size, base, barrier)

    @cute.jit
    def _load_scales(self, thread, work, smem):
        """Run a scale-loader warp, which writes linear scales to every fourth stage in the 128x4 layout."""
        c = self.config
        turn, lane = thread // WARP, thread % WARP
        stage, parity = Int32(0), Int32(1)
        tile = work.first
        while tile < work.n_tiles * work.m_tiles:
            n_tile, m_tile = self._tile(tile, work)
            half = work.rank if const_expr(c.cta_group == 2) else Int32(0)
            b_rows = work.b_scale, (n_tile * c.cta_group + half) * MMA_M + lane, work.n
            a_rows = work.a_scale, m_tile * c.tile_m + lane, work.m
            for k_tile in cutlass.range(work.begin, work.end, unroll=1):
                first = k_tile * (K_TILE // c.fmt.block_size)
                turn, stage, parity = self._load_linear_scales_of_k_tile(
                    turn, lane, b_rows, (a_rows,), first, work.blocks, stage, parity, smem
                )
            tile += work.pitch

    # MMAs

    @cute.jit
    def _relay_full(self, work, smem):
        """In one thread of a pair's second CTA, signal the first CTA whenever a stage of the second CTA is full."""
        stage, parity = Int32(0), Int32(0)
        tile = work.first
        while tile < work.n_tiles * work.m_tiles:
            stage, parity = self._relay_tile(stage, parity, work, smem)
            tile += work.pitch

    @cute.jit
    def _issue_mmas(self, tmem, work, smem):
        """Run the MMA thread. In a CTA pair, the first CTA's MMA thread issues all MMAs, and the second CTA's MMA
        thread only signals full stages."""
        if const_expr(self.config.cta_group == 1):
            self._issue_all_mmas(tmem, work, smem)
        elif work.rank == LEADER:
            self._issue_all_mmas(tmem, work, smem)
        else:
            self._relay_full(work, smem)

    @cute.jit
    def _issue_all_mmas(self, tmem, work, smem):
        """Issue the MMAs of all tiles of the CTA or the CTA pair."""
        c = self.config
        place = self._first_mma_state()
        accumulator, unused_parity = Int32(0), Int32(0)
        acc_stage, acc_parity = Int32(0), Int32(1)
        tile = work.first
        while tile < work.n_tiles * work.m_tiles:
            _, m_tile = self._tile(tile, work)
            if const_expr(c.acc_empty_barriers > 0):
                # If the accumulators overlap, wait until the epilogue has loaded the previous tile's shared columns.
                # The epilogue has then also loaded all columns of earlier tiles.
                self._wait_acc_empty(acc_stage, acc_parity, smem)
                acc_stage, acc_parity = next_stage(acc_stage, acc_parity, c.acc_empty_barriers)
            acc = tmem + Uint32(accumulator * c.acc_pitch)
            for k_tile in cutlass.range(work.begin, work.end, unroll=1):
                place = self._multiply_k_tile(
                    place,
                    tmem,
                    acc,
                    cutlass.min(work.num_mmas - k_tile * MMAS_PER_K_TILE, Int32(MMAS_PER_K_TILE)),
                    (m_tile * c.tile_m,),
                    k_tile > work.begin,
                    None,
                    smem,
                )
            tcgen05.commit(smem.acc_pipeline.full + accumulator, c.cta_group, c.cta_group == 2)
            accumulator, unused_parity = smem.acc_pipeline.next(accumulator, unused_parity)
            tile += work.pitch

    # Results

    def _first_n(self, n_tile, work):
        """Return the first weight row of a tile that this CTA computes."""
        half = work.rank if self.config.cta_group == 2 else Int32(0)
        return (n_tile * self.config.cta_group + half) * MMA_M

    @cute.jit
    def _run_epilogue(self, tmem, tid, work, smem):
        """Run an epilogue warp: apply the epilogue to all tiles and store the results. With split-K, store partial sums
        instead of results."""
        c = self.config
        factor = self.epilogue.factor(work.alpha)
        accumulator, parity = Int32(0), Int32(0)
        tile = work.first
        while tile < work.n_tiles * work.m_tiles:
            n_tile, m_tile = self._tile(tile, work)
            row = self._first_n(n_tile, work) + tid
            finish = None
            if const_expr(c.split_k == 1):
                finish = self.epilogue.finisher(factor, self.epilogue.terms(work.alpha, work.bias, row, 1, work.n))
            smem.acc_pipeline.wait_full(accumulator, parity)
            tcgen05.fence_after()
            start = tmem + Uint32(accumulator * c.acc_pitch) + Uint32(tid // 32 * 32 << 16)
            token = m_tile * c.tile_m
            if const_expr(c.shared_columns > 0):
                # The shared columns are the last columns of the first accumulator, and the first columns of the second
                # accumulator.
                skipped = ptx.select(accumulator == 0, Int32(c.acc_pitch), Int32(0))
                self._store_acc_columns(start, skipped, c.shared_columns, finish, token, row, tid, work, smem)
                self._signal_acc_loaded(smem.acc_pipeline.empty, tid)
                skipped = ptx.select(accumulator == 0, Int32(0), Int32(c.shared_columns))
                self._store_acc_columns(start, skipped, c.acc_pitch, finish, token, row, tid, work, smem)
            else:
                self._store_acc_columns(start, Int32(0), c.tile_m, finish, token, row, tid, work, smem)
                if const_expr(c.acc_empty_barriers > 0):
                    self._signal_acc_loaded(smem.acc_pipeline.empty + accumulator, tid)
            accumulator, parity = smem.acc_pipeline.next(accumulator, parity)
            tile += work.pitch

    @cute.jit
    def _store_acc_columns(self, start, skipped, count: int, finish, token, row, tid, work, smem):
        """Load ``count`` columns of the accumulator, starting with column ``skipped``, apply the epilogue, and store
        the results. With split-K, store partial sums instead of results."""
        c = self.config
        for piece in cutlass.range(count // c.columns_per_load, unroll=1):
            column = skipped + piece * c.columns_per_load
            acc = tcgen05.load(start + Uint32(column), c.columns_per_load)
            tcgen05.wait_for_loads()
            if const_expr(c.split_k == 1):
                factors = [None] * len(acc)
                if const_expr(self.epilogue.epilogue.has_row_scale):
                    factors = [load_row_scale(work.row_scale, token + column, work.m, i) for i in range(len(acc))]
                values = [finish(ptx.float_of(acc[i]), 0, factors[i]) for i in range(len(acc))]
                store_results(values, self.out_dtype, work.out, token + column, work.m, row, work.n, tid % 2)
            else:
                store_acc(c.sum_tile, acc, column, tid, smem.stages)

    @cute.jit
    def _reduce_split_k(self, tid, work, smem):
        """Add up the partial sums of the cluster's CTAs, apply the epilogue, and store the results. The epilogue warps
        call this method."""
        c = self.config
        threads = 32 * EPILOGUE_WARPS
        n_tile, m_tile = self._tile(work.first, work)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tid < threads:
            at = m_tile * c.tile_m, n_tile * MMA_M
            terms = self.epilogue.terms(
                work.alpha, work.bias, *thread_columns(c.sum_tile, threads, tid, n_tile * MMA_M), work.n
            )
            finish = self.epilogue.finisher(self.epilogue.factor(work.alpha), terms)
            tile = c.sum_tile, c.split_k, threads
            reduce_partial_sums(*tile, finish, work.out, smem.stages, work.rank, tid, *at, work.row_scale)
        cute.arch.sync_warp()
        # Wait, because other CTAs may still read this CTA's partial sums.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
