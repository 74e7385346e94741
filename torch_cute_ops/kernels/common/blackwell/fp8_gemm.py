"""Base class of GEMMs with ``tcgen05.mma``, whose activations are FP8 or 16-bit, and whose weight is on the M side.

``FP8GemmKernel`` inherits the roles of ``roles.Tcgen05Kernel``, and defines the code of the producer warp, of the MMA
thread and of the epilogue warps. A subclass defines how scales reach a stage (``_expect`` or ``_load_scales``). If
warps decode the weight, the subclass also overrides ``_produce``. MMAs are of ``kind::f8f6f4``, with a weight in e4m3,
unless a subclass overrides ``_multiply``.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import FP8TileConfig
from torch_cute_ops.kernels.common.blackwell.layouts import (
    EPILOGUE_WARPS,
    K_TILE_BYTES,
    MMA_M,
)
from torch_cute_ops.kernels.common.blackwell.results import store_acc, store_results
from torch_cute_ops.kernels.common.blackwell.roles import LEADER, WARP, OperandCopies, Smem, Tcgen05Kernel
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps, Finish
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.core.partial_sums import reduce_partial_sums, thread_columns
from torch_cute_ops.kernels.common.core.pipeline import Pipeline
from torch_cute_ops.kernels.common.fp8.gemm import store_token_scales
from torch_cute_ops.kernels.common.fp8.layouts import Arguments
from torch_cute_ops.kernels.common.fp8.tiles import ExpertTiles, Tile
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, PreparedWeight

MMA_K_BYTES = 32  # bytes of a token's activations that one MMA multiplies
MMAS_PER_K_TILE = K_TILE_BYTES // MMA_K_BYTES  # for FP8 activations
STAGES_WRITTEN = 1  # id of the named barrier of ``_await_stage_writers``
ALL_TILES = 1 << 30  # larger than any number of CTAs that a launch needs


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the kernel call.

    Attributes:
        m, n: numbers of rows and columns of the result. The rows of all experts are counted.
        num_mmas: number of MMAs that compute a tile over all of K.
        begin, end: range of k tiles that the CTA multiplies in each tile, at least one. The last k tile may be shorter.
        first, pitch: index of the CTA's first tile, and distance to its next tile.
        num_tiles: number of all tiles.
        rank: rank of the CTA in its cluster.
        experts, space: number of experts, and number of rows of the buffer (in the masked layout, per expert).
        offsets, counts: first row of each expert, and number of rows of each expert, or None.
        a_scale, b_scale: scales of ``a`` and of the weight, for all experts. ``b_scale`` is None with per-token scales.
        alpha, bias: operands of the epilogue, or None.
        out: result.
        workspace: (M, 128, slots) float32 in global memory, partial sums of stream-K, or None.
    """

    m: Int32
    n: Int32
    num_mmas: Int32
    begin: Int32
    end: Int32
    first: Int32
    pitch: Int32
    num_tiles: Int32
    rank: Int32
    experts: Int32
    space: Int32
    offsets: cute.Tensor | None
    counts: cute.Tensor | None
    a_scale: cute.Tensor
    b_scale: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor
    workspace: Any


@dataclass(frozen=True)
class FP8Smem(Smem):
    """Shared memory of a CTA.

    Attributes:
        factors: memory for scales. With block scales, each slot holds the factors of one k tile's accumulator. With
            per-token scales, each epilogue warp keeps a copy of the tile's scales.
        factor_pipeline: pipeline whose stages are the slots of ``factors``.
        copied: mbarriers, one per stage, if decoder warps decode the weight. They complete when the copies to the stage
            have arrived.
        table: table of experts.
    """

    factors: cute.Pointer
    factor_pipeline: Pipeline
    copied: cute.Pointer
    table: cute.Pointer


class FP8GemmKernel(Tcgen05Kernel):
    """Base class of the GEMM kernels. ``config`` is an ``FP8TileConfig``.

    Args:
        config: configuration.
        weight: weight source, which defines the arguments and views of the weight and its scales.

    Attributes:
        k_tile_bytes: bytes of a token's activations in a k tile.
    """

    k_tile_bytes: int = K_TILE_BYTES

    def __init__(self, config: FP8TileConfig, weight):
        super().__init__(config)
        self.weight = weight
        self.copies = self.weight_copies = OperandCopies()
        self.epilogue = EpilogueOps(config.epilogue)
        self.out_dtype = self.epilogue.out_dtype
        self.tiles = ExpertTiles(config.rows, config.tile_m, config.tile_n, weight, by_token=not config.has_blocks)

    def arguments(self) -> Arguments:
        return self.tiles.arguments(self.epilogue)

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas: Int32, stream):
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas)
        self._launch(given, self._ctas(given), None, stream)

    def _ctas(self, given: Arguments):
        """Return the number of CTAs of a launch, or 0 to refuse the launch."""
        if self.config.split_k > 1:
            # With split-K, launch one cluster per tile. A CTA then has a single tile, so its partial sums may overwrite
            # the stages.
            given = given._replace(max_ctas=Int32(ALL_TILES))
        return self.tiles.ctas(given, self.config.cluster)

    @cute.jit
    def _launch(self, given: Arguments, ctas, workspace, stream):
        """Launch the kernel. ``workspace`` is ``Work.workspace``."""
        c, view = self.config, self.tiles.views(given)
        maps = self.copies.map(bytes_of(view.a), self.stage.cta_mma_n), self._weight_map(view.b)
        scales, rows, terms = (view.a_scale, view.b_scale), (given.offsets, given.counts), (given.alpha, given.bias)
        self.kernel(*maps, scales, rows, terms, view.out, view.space, workspace).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _weight_map(self, b: cute.Tensor) -> tuple:
        """Return the TMA descriptor of the weight, (N, K, E)."""
        return self.copies.map(bytes_of(b), MMA_M)

    @cute.kernel
    def kernel(self, a_map, b_map, scales, rows, terms, out, space, workspace):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        m, n = out.shape
        k_tiles = cute.ceil_div(a_map[1].shape[1], self.k_tile_bytes)
        rank, cluster_index = cta % c.cluster, cta // c.cluster
        begin, end = Int32(0), Int32(k_tiles)
        if const_expr(c.split_k > 1):
            begin, end = rank * k_tiles // c.split_k, (rank + 1) * k_tiles // c.split_k
        work = Work(
            m=m,
            n=n,
            num_mmas=a_map[1].shape[1] // MMA_K_BYTES,
            begin=begin,
            end=end,
            first=cluster_index,
            pitch=num_ctas // c.cluster,
            num_tiles=Int32(0),
            rank=rank,
            experts=b_map[1].shape[2],
            space=space,
            offsets=rows[0],
            counts=rows[1],
            a_scale=scales[0],
            b_scale=scales[1],
            alpha=terms[0],
            bias=terms[1],
            out=out,
            workspace=workspace,
        )
        smem, tmem = self._run_roles(tid, (a_map, b_map), work)
        if const_expr(c.split_k > 1):
            self._reduce_split_k(tid, work, smem)
        else:
            # After this barrier, all loads from tensor memory have ended. In a CTA pair, the MMAs that read the other
            # CTA's shared memory have ended too.
            self._sync()
        self._free_tmem(tid, tmem)

    # Shared memory, and tiles

    def _allocate(self) -> FP8Smem:
        c = self.config
        smem = super()._allocate()
        barriers = cute.recast_ptr(smem.stages + (c.factor_offset + c.factor_bytes), dtype=Int64)
        of_base = {field.name: getattr(smem, field.name) for field in fields(smem)}
        return FP8Smem(
            **of_base,
            factors=smem.stages + c.factor_offset,
            factor_pipeline=Pipeline.at(barriers, c.factor_slots),
            copied=barriers + 2 * c.factor_slots,
            table=smem.stages + c.table_offset,
        )

    def _init_barriers(self, smem: FP8Smem) -> None:
        super()._init_barriers(smem)
        smem.factor_pipeline.init(self.config.factor_arrivals, EPILOGUE_WARPS)

    @cute.jit
    def _begin(self, tid, work, smem):
        """Return the work with its number of tiles. If experts own the rows, write the table of experts."""
        c = self.config
        if const_expr(not c.rows.is_plain):
            if const_expr(c.waits_first):
                cute.arch.griddepcontrol_wait()
            self.tiles.prepare(work.offsets, work.counts, work.experts, work.space, smem.table, tid, c.threads)
        return work._replace(num_tiles=self.tiles.count(work.m, work.n, smem.table))

    def _find(self, number, lane, work, smem) -> Tile:
        """Return the fields of tile ``number``. In a CTA pair, the field for the first column names the first column
        that this CTA computes."""
        tile = Tile(*self.tiles.find(number, work.m, work.n, smem.table, lane))
        if self.stage.cta_group == 2:
            tile = tile._replace(column=tile.column + work.rank * MMA_M)
        return tile

    def _factors(self, slot, smem) -> cute.Tensor:
        """Return the factors of a slot (block scales), or an epilogue warp's copy of the per-token scales: one element
        per token of the tile."""
        at = smem.factors + cute.assume(slot * (4 * self.config.slot_words), divby=16)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Float32), cute.make_layout(self.config.tile_m))

    def _k_range(self, number, work) -> tuple:
        """Return the range of k tiles that the CTA multiplies in tile ``number``."""
        return work.begin, work.end

    # MMAs

    @cute.jit
    def _issue_mmas(self, tmem, work, smem):
        """Run the MMA thread. In a CTA pair, the first CTA's MMA thread issues all MMAs."""
        if const_expr(self.stage.cta_group == 1):
            self._issue_all_mmas(tmem, work, smem)
        elif work.rank == LEADER:
            self._issue_all_mmas(tmem, work, smem)
        else:
            stage, parity = Int32(0), Int32(0)
            for _number in cutlass.range(work.first, work.num_tiles, work.pitch, unroll=1):
                stage, parity = self._relay_tile(stage, parity, work, smem)

    @cute.jit
    def _issue_all_mmas(self, tmem, work, smem):
        """Issue the MMAs of all tiles. With block scales, neighbouring k tiles use different accumulators, because the
        epilogue warps promote one while MMAs compute the next."""
        c, pair = self.config, self.stage.cta_group == 2
        stage, parity = Int32(0), Int32(0)
        accumulator, acc_parity = Int32(0), Int32(1)
        for number in cutlass.range(work.first, work.num_tiles, work.pitch, unroll=1):
            first_token = self._first_token(number, work, smem)
            begin, end = self._k_range(number, work)
            if const_expr(not c.has_blocks):
                self._wait_acc_empty(accumulator, acc_parity, smem)
            for k_tile in cutlass.range(begin, end, unroll=1):
                if const_expr(c.has_blocks):
                    self._wait_acc_empty(accumulator, acc_parity, smem)
                self._wait_full(stage, parity, smem)
                tcgen05.fence_after()
                adds = False if const_expr(c.has_blocks) else k_tile > begin
                num_mmas = work.num_mmas - k_tile * (self.k_tile_bytes // MMA_K_BYTES)
                acc = tmem + Uint32(accumulator * c.tile_m)
                self._multiply(tmem, acc, stage, num_mmas, adds, first_token, smem)
                tcgen05.commit(smem.pipeline.empty + stage, c.cta_group, pair)
                stage, parity = smem.pipeline.next(stage, parity)
                if const_expr(c.has_blocks):
                    tcgen05.commit(smem.acc_pipeline.full + accumulator, c.cta_group, pair)
                    accumulator, acc_parity = smem.acc_pipeline.next(accumulator, acc_parity)
            if const_expr(not c.has_blocks):
                tcgen05.commit(smem.acc_pipeline.full + accumulator, c.cta_group, pair)
                accumulator, acc_parity = smem.acc_pipeline.next(accumulator, acc_parity)

    def _first_token(self, number, work, smem) -> Any:
        """Return the first token of tile ``number`` for ``_multiply``, or None if ``_multiply`` does not use it."""
        return None

    @cute.jit
    def _multiply(self, tmem, acc, stage, num_mmas, adds, first_token, smem):
        """Issue the first ``num_mmas`` MMAs of a k tile. (ptxas of CUDA 12 crashes if this number is a constant.)"""
        c = self.config
        at = Uint32(smem.stages.toint()) + Uint32(stage * self.stage.size_bytes)
        instruction = tcgen05.fp8_instruction_descriptor(MMA_M * c.cta_group, c.tile_m)
        for step in range_constexpr(MMAS_PER_K_TILE):
            if step < num_mmas:
                a = tcgen05.operand_descriptor(at + step * MMA_K_BYTES)
                b = tcgen05.operand_descriptor(at + MMA_M * K_TILE_BYTES + step * MMA_K_BYTES)
                tcgen05.multiply_fp8(acc, a, b, instruction, adds if step == 0 else True, c.cta_group)

    # Copies

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which copies both operands to the stages."""
        tid, _, _ = cute.arch.thread_idx()
        rows = self.stage.cta_mma_n
        half = work.rank if const_expr(self.stage.cta_group == 2) else Int32(0)
        b_boxes = self.weight_copies.boxes(b_map, MMA_M)
        b_policy = ptx.EVICT_FIRST if const_expr(self.config.streams_weight) else None
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, tid % WARP, work, smem)
            # Boxes begin at multiples of their height. An expert's first row need not be such a multiple, so move the
            # origin of the matrix to this row.
            of_tile = a_map[0], cute.domain_offset((tile.row, 0), a_map[1])
            a_boxes = self.copies.boxes(of_tile, rows)
            for k_tile in cutlass.range(work.begin, work.end, unroll=1):
                smem.pipeline.wait_empty(stage, parity)
                base, full = self._stage_at(stage, smem), smem.pipeline.full + stage
                self._expect(tile, k_tile, base, full, b_policy, work)
                place = tile.column // MMA_M, k_tile, tile.expert
                self.weight_copies.copy_box(b_map, b_boxes, MMA_M, base, place, full, b_policy)
                to = base + MMA_M * K_TILE_BYTES
                self.copies.copy_box(of_tile, a_boxes, rows, to, (half, k_tile), full, None)
                stage, parity = smem.pipeline.next(stage, parity)

    def _expect(self, tile, k_tile, base, full, b_policy, work) -> None:
        """Make a stage's barrier expect the bytes of a k tile, and start the copies of its scales, if TMA copies
        them."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage.code_bytes)

    # Results

    @cute.jit
    def _run_epilogue(self, tmem, tid, work, smem):
        """Run an epilogue warp: apply scales and epilogue to all tiles, and store the results. With split-K, store
        partial sums instead of results."""
        c, lane = self.config, tid % WARP
        lanes = tmem + Uint32(tid // WARP * WARP << 16)
        accumulator, parity = Int32(0), Int32(0)
        slot, slot_parity = Int32(0), Int32(0)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, lane, work, smem)
            expert = None if const_expr(c.rows.is_plain) else tile.expert
            column = tile.column + tid
            finish = _unfinished
            if const_expr(c.split_k <= 1):
                finish = self._finish(column, 1, expert, work)
            if const_expr(c.has_blocks):
                acc = cute.make_rmem_tensor((c.tile_m,), Float32)
                acc.fill(0.0)
                for _k_tile in cutlass.range(work.begin, work.end, unroll=1):
                    smem.factor_pipeline.wait_full(slot, slot_parity)
                    self._promote(acc, lanes, accumulator, parity, slot, tid, smem)
                    self._signal_acc_loaded(smem.acc_pipeline.empty + accumulator, tid)
                    smem.factor_pipeline.arrive_empty(slot, Uint32(lane == 0))
                    accumulator, parity = smem.acc_pipeline.next(accumulator, parity)
                    slot, slot_parity = smem.factor_pipeline.next(slot, slot_parity)
                for first in range_constexpr(0, c.tile_m, c.columns_per_load):
                    values = [acc[first + i] for i in range(c.columns_per_load)]
                    self._store(values, first, finish, tile, column, tid, work, smem)
            else:
                scales = self._stage_token_scales(tile, tid, work, smem)
                smem.acc_pipeline.wait_full(accumulator, parity)
                tcgen05.fence_after()
                if const_expr(c.split_k > 1):
                    self._await_stage_writers()
                start = lanes + Uint32(accumulator * c.tile_m)
                for piece in cutlass.range(c.tile_m // c.columns_per_load, unroll=1):
                    first = piece * c.columns_per_load
                    words = tcgen05.load(start + Uint32(first), c.columns_per_load)
                    tcgen05.wait_for_loads()
                    values = self._scaled(words, scales, first)
                    self._store(values, first, finish, tile, column, tid, work, smem)
                self._signal_acc_loaded(smem.acc_pipeline.empty + accumulator, tid)
                accumulator, parity = smem.acc_pipeline.next(accumulator, parity)

    @cute.jit
    def _promote(self, acc, lanes, accumulator, parity, slot, tid, smem):
        """Multiply a k tile's accumulator by its factors, and add the results to ``acc``."""
        c = self.config
        factors = self._factors(slot, smem)
        smem.acc_pipeline.wait_full(accumulator, parity)
        tcgen05.fence_after()
        start = lanes + Uint32(accumulator * c.tile_m)
        for first in range_constexpr(0, c.tile_m, c.columns_per_load):
            words = tcgen05.load(start + Uint32(first), c.columns_per_load)
            of_columns = _load_floats(factors, first, c.columns_per_load)
            tcgen05.wait_for_loads()
            of_columns = self._factors_of_row(of_columns, slot, tid, smem)
            for i in range_constexpr(c.columns_per_load):
                acc[first + i] = ptx.fma_rn(of_columns[i], ptx.float_of(words[i]), acc[first + i])

    def _factors_of_row(self, factors: list, slot, tid, smem) -> list:
        """Return the factors of a k tile's columns for the weight row of this thread."""
        return factors

    def _finish(self, column, count: int, expert, work) -> Finish:
        """Load alpha and bias of ``count`` columns of the result, and return the function that applies the epilogue.

        If the weight's scales are prepared, the function also multiplies by the units of the columns.
        """
        terms = self.epilogue.terms(work.alpha, work.bias, column, count, work.n, expert)
        factor = self.epilogue.factor(work.alpha, expert)
        if not isinstance(self.weight, PreparedWeight):
            return self.epilogue.finisher(factor, terms)
        units = self.weight.units(work.b_scale, expert, column, count, work.n)
        return self.epilogue.unit_finisher(factor, terms, units)

    def _await_stage_writers(self) -> None:
        """Synchronise the epilogue warps with the warps that store to the stages, before partial sums overwrite the
        stages.

        This is needed because a ``tcgen05.commit`` orders MMAs, but not the stores of other threads. With block scales
        it is not needed, because the factors' barriers order these stores.
        """
        if self.config.stage_writers:
            threads = WARP * (EPILOGUE_WARPS + self.config.stage_writers)
            cute.arch.barrier(barrier_id=STAGES_WRITTEN, number_of_threads=threads)

    def _stage_token_scales(self, tile: Tile, tid, work, smem) -> cute.Tensor:
        """Copy the per-token scales of a tile to shared memory, for the lanes of this warp, and return them. Tokens
        beyond the tile's last row get zeros."""
        scales, lane = self._factors(tid // WARP, smem), tid % WARP
        of_rows = []
        for place in range(0, self.config.tile_m, WARP):
            row = work.a_scale.iterator + Int64(tile.row + lane + place) * work.a_scale.stride[0]
            of_rows += [ptx.float_of(word) for word in ptx.load_if(row, lane + place < tile.rows, 1)]
        # Wait until all lanes have read the previous tile's scales.
        cute.arch.sync_warp()
        store_token_scales(self.config.tile_m, scales, of_rows, lane)
        cute.arch.sync_warp()
        return scales

    def _scaled(self, words: list, scales: cute.Tensor, first) -> list:
        """Multiply columns of the accumulator, starting at column ``first``, by their tokens' scales."""
        of_rows = _load_floats(scales, first, len(words))
        return [ptx.mul_rn(ptx.float_of(word), of) for word, of in zip(words, of_rows, strict=True)]

    @cute.jit
    def _store(self, values: list, first, finish, tile, column, tid, work, smem):
        """Store scaled columns of the accumulator, starting at column ``first``, as results or, with split-K, as
        partial sums."""
        c = self.config
        if const_expr(c.split_k <= 1):
            results = [finish(value, 0) for value in values]
            token, end = tile.row + first, tile.row + tile.rows
            store_results(results, self.out_dtype, work.out, token, end, column, work.n, tid % 2)
        else:
            store_acc(c.sum_tile, [ptx.bits_of(value) for value in values], first, tid, smem.stages)

    @cute.jit
    def _reduce_split_k(self, tid, work, smem):
        """Reduce the partial sums of the cluster's CTAs, apply the epilogue and store the results. The epilogue warps
        call this method."""
        c = self.config
        threads = WARP * EPILOGUE_WARPS
        tile = self._find(work.first, tid % WARP, work, smem)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tid < threads:
            columns = thread_columns(c.sum_tile, threads, tid, tile.column)
            finish = self._finish(*columns, None, work)
            at = tile.row, tile.column
            reduce_partial_sums(c.sum_tile, c.split_k, threads, finish, work.out, smem.stages, work.rank, tid, *at)
        cute.arch.sync_warp()
        # No CTA may exit while another CTA still reads its partial sums.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def weight_source(config: Any, line: int, code_align: int = 16) -> FP4Weight:
    """Return the weight source of a kernel with an FP4 weight: with prepared scales if ``config.layout`` is None.

    ``FP4Weight`` describes ``line`` and ``code_align``.
    """
    is_plain = config.rows.is_plain
    if config.layout is None:
        return PreparedWeight(config.fmt, is_plain, MMA_M, line, code_align)
    return FP4Weight(config.fmt, config.layout, is_plain, MMA_M, line, code_align)


def _unfinished(total: Any, i: int) -> Any:
    return total


def bytes_of(matrix: cute.Tensor) -> cute.Tensor:
    """View a matrix with contiguous rows as bytes. A 16-bit matrix must have two dimensions; an FP8 matrix may have any
    number of dimensions."""
    layout = matrix.layout
    if const_expr(matrix.element_type.width == 16):
        rows, columns = matrix.shape
        layout = cute.make_layout((rows, 2 * columns), stride=(2 * matrix.stride[0], 1))
    return cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=Uint8), layout)


def _load_floats(values: cute.Tensor, first, count: int) -> list:
    """Load ``count`` fp32 values from shared memory, starting at element ``first``, four at a time."""
    loaded = []
    for i in range(0, count, 4):
        at = values.iterator + cute.assume(first + i, divby=4)
        words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        loaded += [ptx.float_of(word) for word in words]
    return loaded
