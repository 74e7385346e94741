"""The device code; the package's docstring describes roles and data path."""

from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, FP8_TENSOR, FP8_TOKEN
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.row_quant.codes import Encoder
from torch_cute_ops.kernels.row_quant.config import FEW_ROWS, WARP, Arguments, Config
from torch_cute_ops.kernels.row_quant.experts import fill_table, table_at
from torch_cute_ops.kernels.row_quant.rows import Rows, sync_group
from torch_cute_ops.kernels.row_quant.scales import FP4Scales
from torch_cute_ops.kernels.row_quant.stores import Stores
from torch_cute_ops.kernels.row_quant.thread import Shared, Thread
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


def sum_of_squares(values: list) -> Float32:
    """The sum of squares, in four interleaved partial sums."""
    sums = [Float32(0.0)] * 4
    for i, value in enumerate(values):
        sums[i % 4] = ptx.fma_rn(value, value, sums[i % 4])
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


class RowQuantKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.scales, self.encoder = FP4Scales(config), Encoder(config)
        self.rows = Rows(config, self.scales)
        self.stores = Stores(config, self.rows, self.scales, self.encoder)
        self.of_few_rows = None if config.of_few_rows is None else RowQuantKernel(config.of_few_rows)

    def arguments(self) -> Arguments:
        p = self.config.problem
        rows = Dim("rows")
        dtype = self.rows.dtype.__name__

        def strided(width: int, stride: str) -> TensorArg:
            step = Dim(stride, divisibility=16 // p.dtype.itemsize, bits=64)
            return TensorArg(dtype, (rows, width), (step, 1), align=16)

        def matrix(dtype: str, rows, columns, align: int = 16) -> TensorArg:
            return TensorArg(dtype, (rows, columns), (columns, 1), align)

        y = scale = linear = None
        if isinstance(p.fmt, FP4Format):
            y = matrix("Uint8", rows, p.width // 2)
            scale_dtype = DSL_DTYPES[p.fmt.scale_dtype].__name__
            scale_rows = rows if p.layout.is_linear else Dim("scale_rows")
            scale = matrix(scale_dtype, scale_rows, p.layout.padded_blocks(self.config.blocks))
            if p.also_linear:
                linear = matrix(scale_dtype, rows, self.config.blocks, align=1)
        elif p.fmt is not None:
            y = matrix("Float8E4M3FN", rows, p.width)
            scales = p.fmt.scales_per_row(p.width)
            if p.fmt == FP8_TENSOR:
                scale = TensorArg("Float32", (1,), (1,), align=4)
            elif p.layout == COLUMN:
                scale = matrix("Float32", scales, rows, align=4)
            else:
                scale = matrix("Float32", rows, scales, align=4)
        weight = None
        if p.weight_dtype is not None:
            weight = TensorArg(self.rows.weight_dtype.__name__, (p.width,), (1,), align=16)
        return Arguments(
            input=strided(p.input_width, "row_stride"),
            residual=strided(p.width, "residual_stride") if p.source == "add" else None,
            weight=weight,
            factor=TensorArg("Float32", (1,), (1,), align=4) if p.has_factor else None,
            y=y,
            scale=scale,
            scale_linear=linear,
            norm=matrix(dtype, rows, p.width) if p.writes_norm else None,
            offsets=TensorArg("Int32", (Dim("ends"),), (1,), align=4) if p.has_offsets else None,
            counts=TensorArg("Int32", (Dim("experts"),), (1,), align=4) if p.has_counts else None,
            eps=ScalarArg("Float32"),
            swiglu_alpha=ScalarArg("Float32") if p.swiglu else None,
            swiglu_beta=ScalarArg("Float32") if p.swiglu else None,
            swiglu_limit=ScalarArg("Float32") if p.swiglu else None,
            max_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(
        self,
        input,
        residual,
        weight,
        factor,
        y,
        scale,
        scale_linear,
        norm,
        offsets,
        counts,
        eps: Float32,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        max_ctas: Int32,
        stream,
    ):
        layout = self.config.problem.layout
        allowed = ctas_unless_overlapping(
            Int32(1),
            written=(y, scale, scale_linear, norm, residual),
            read=(input, weight, factor, offsets, counts),
            may_alias=() if residual is None else ((residual, input),),
        )
        if const_expr(not layout.is_linear):
            # The one extent that the declared arguments leave open. A launch of no CTAs fails, as where they overlap.
            tile = layout.tile_rows
            allowed = ptx.select(scale.shape[0] == cute.ceil_div(input.shape[0], tile) * tile, allowed, Int32(0))
        gate = (swiglu_alpha, swiglu_beta, swiglu_limit) if const_expr(self.config.problem.swiglu) else None
        given = input, residual, weight, factor, y, scale, scale_linear, norm, offsets, counts, eps, gate
        if const_expr(self.of_few_rows is None):
            self._launch(allowed, given, max_ctas, stream)
        elif input.shape[0] <= FEW_ROWS:
            self.of_few_rows._launch(allowed, given, max_ctas, stream)
        else:
            self._launch(allowed, given, max_ctas, stream)

    @cute.jit
    def _launch(self, allowed: Int32, given: tuple, max_ctas: Int32, stream):
        """Launch the kernel; no CTAs of it, unless ``allowed`` is 1."""
        c = self.config
        rows = given[0].shape[0]
        # A CTA gets a second row only when every CTA has one. Padding needs some CTAs even for a single row: one alone
        # would take 14 µs to zero it (H200, width 7168).
        wanted = cute.ceil_div(rows, c.group_rows)
        if const_expr(not c.problem.layout.is_linear):
            wanted = cutlass.max(wanted, WARP)
        clusters = cutlass.max(max_ctas // c.splits, 1)
        threads = Int32(c.threads)
        if const_expr(not c.problem.has_table):
            # One group for each CTA while there are enough CTAs: smaller CTAs start sooner.
            threads = ptx.select(rows <= clusters * c.group_rows, Int32(c.group_threads), threads)
        self.kernel(*given).launch(
            grid=[allowed * cutlass.min(wanted, clusters) * c.splits, 1, 1],
            block=[threads, 1, 1],
            max_number_threads=[c.threads, 1, 1],
            min_blocks_per_mp=1,
            cluster=[c.splits, 1, 1] if const_expr(c.is_cluster) else None,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, input, residual, weight, factor, y, scale, scale_linear, norm, offsets, counts, eps, gate):
        c = self.config
        p = c.problem
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        threads, _, _ = cute.arch.block_dim()
        group = cute.arch.make_warp_uniform(tid // c.group_threads)
        in_group = tid % c.group_threads
        rank = cta % c.splits
        column = (in_group + c.first_column(group)) % c.group_threads
        t = Thread(
            tid=tid,
            threads=threads,
            lane=tid % WARP,
            group=group,
            in_group=in_group,
            warp=cute.arch.make_warp_uniform(column // WARP),
            column=column % c.threads_per_row,
            row=in_group // c.threads_per_row,
            rank=rank,
            first_block=rank * c.slice_blocks,
            my_blocks=cutlass.min(Int32(c.blocks) - rank * c.slice_blocks, c.slice_blocks),
            rows=input.shape[0],
            input=input,
            residual=residual,
            y=y,
            scale=scale,
            scale_linear=scale_linear,
            norm=norm,
            gate=gate,
            walkers=ctas // c.splits * (threads // c.group_threads),
            walker=group * (ctas // c.splits) + cta // c.splits,
        )
        if const_expr(p.rows != "experts"):
            self.rows.deal(t)
        s = self._allocate(t)
        # The thread that initialises the barriers starts its group's copies at once; others wait for a CTA barrier.
        early = const_expr(c.group_rows == 1)
        if tid == 0:
            self._init_barriers(s)
        cute.arch.mbarrier_init_fence()
        # For compute-sanitizer's racecheck, which attributes the initialisation to the whole warp.
        cute.arch.sync_warp()
        pdl_start(c.pdl)
        if const_expr(p.has_table):
            fill_table(s.experts, offsets, counts, input.shape[0], tid, c.threads)
            cute.arch.sync_threads()
            t.rows = s.experts.total[0]
            self.rows.deal(t)
        elif const_expr(p.rows == "experts"):
            # Never beyond the buffer.
            t.first_row = cutlass.max(offsets[0], Int32(0))
            t.rows = cutlass.max(cutlass.min(offsets[offsets.shape[0] - 1], input.shape[0]) - t.first_row, Int32(0))
            self.rows.deal(t)
        # The thread's row in global memory, of this iteration and, with two stages, of the next.
        place, after = self.rows.place_of(Int32(0), t, s), self.rows.place_of(Int32(c.stages - 1), t, s)
        if tid == 0:
            if const_expr(p.normalises):
                self.rows.issue_weight(weight, t, s)
            if const_expr(early):
                self.rows.issue_first(place, after, t, s)
        if const_expr(c.quads):
            if t.quads > 0:
                self.scales.clear_quads(t, s)
        if const_expr(c.is_cluster):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if const_expr(early):
            if group > 0:
                self.rows.issue_first(place, after, t, s)
        else:
            self.rows.issue_first(place, after, t, s)
        if const_expr(not p.layout.is_linear):
            self.scales.zero_padding_rows(t)
        g = None
        if const_expr(p.has_factor):
            g = factor[0]
        if const_expr(p.fmt == FP8_TENSOR):
            if (tid == 0) & (cta == 0):
                scale[0] = g
        weights = []
        if const_expr(p.normalises):
            ptx.wait(s.weight_barrier, 0)
            weights = [self.rows.weight(j, t, s) for j in range(c.thread_blocks)]

        again = Int32(0)  # rows whose amax was recomputed
        for it in range(t.its):
            stage = it % c.stages
            row = self.rows.row_at(it, t) + t.row
            # Looked up while the row is in flight.
            beyond = self.rows.place_of(it + c.stages, t, s)
            ptx.wait(s.full + stage, (it // c.stages) & 1)
            blocks, amax, reduced = self._load_row(stage, weights, row, t, s)
            rstd = None
            if const_expr(p.reductions > 0):
                barrier = s.summed + it % 2
                slots = s.sums + it % 2 * (c.partials * p.reductions)
                reduced = self._reduce_row(reduced, slots, barrier, (it // 2) & 1, t)
                if const_expr(p.reduces_amax):
                    amax = reduced[-1]
            else:
                fence_async()
                sync_group(self.config, t)
            if const_expr(p.normalises):
                total = reduced[0]
                rstd = ptx.rsqrt_approx(ptx.fma_rn(total, Float32(1.0 / p.norm_width), eps))
                extreme = row < t.rows
                if const_expr(p.folds):
                    extreme = extreme & (not self._can_fold(total, reduced[-1], g))
                if const_expr(p.fmt in (FP8_TOKEN, FP8_BLOCK128)):
                    # Rows that share a warp recompute their amax together; for those that need not, it is the same.
                    if cute.arch.vote_any_sync(extreme):
                        if extreme:
                            self._normalize(blocks, rstd, stage, weights, t, s)
                            rstd = Float32(1.0)
                        if const_expr(p.reduces_amax):
                            amax = self._row_amax_again(blocks, again, t, s)
                            again = again + 1
                        else:
                            amax = self._shared_amax(blocks, t)
                else:
                    if extreme:
                        self._normalize(blocks, rstd, stage, weights, t, s)
                        rstd = Float32(1.0)
            if const_expr(self.stores.is_bulk):
                self.stores.start_bulk(it, stage, t, s)
            if const_expr(p.source != "add"):
                self.rows.issue(it + c.stages, stage, beyond, t, s)
            self.scales.write_quad(it - 1, t, s)
            self.stores.store_row(blocks, rstd, amax, g, row, place if p.rows == "experts" else row, it, t, s)
            if const_expr(not p.layout.is_linear):
                self.scales.zero_padding_columns(row, it, t)
            if const_expr(self.stores.is_bulk):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            if const_expr(p.source == "add"):
                self.rows.issue(it + c.stages, stage, beyond, t, s)
            if const_expr(p.rows == "experts"):
                place = after if c.stages == 2 else beyond
                after = beyond
        if const_expr(c.bulk_norm):
            fence_async()
        if const_expr(c.quads or c.bulk_norm):
            sync_group(self.config, t)
        if const_expr(c.quads):
            self.scales.write_quad(t.its - 1, t, s)
        if const_expr(c.bulk_norm):
            if t.its > 1:
                self.stores.start_norm(t.its - 1, t, s)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(c.is_cluster):
            # No CTA may exit while another can still write into its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # Shared memory and barriers

    def _allocate(self, t: Thread) -> Shared:
        c = self.config
        group_elements = c.stages * c.group_rows * c.problem.inputs * c.slice_width
        # Dynamic shared memory: the ptxas of CUDA 12 allows no more than 48 KB of static shared memory.
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        at = c.smem_offsets
        buffers = cute.recast_ptr(base + at.rows, dtype=self.rows.dtype)
        weight_dtype = self.rows.weight_dtype
        weight = None if weight_dtype is None else cute.recast_ptr(base + at.weight, dtype=weight_dtype)
        scales = cute.recast_ptr(base + at.scales, dtype=Uint8) if c.quads else None
        sums = cute.recast_ptr(base + at.sums, dtype=Float32)
        barriers = cute.recast_ptr(base + at.barriers, dtype=Int64)
        own = barriers + t.group * c.group_barriers
        norms = None
        if c.bulk_norm:
            group_norms = cute.assume(t.group * (2 * c.group_rows * c.slice_width), divby=16)
            norms = cute.recast_ptr(base + at.norms, dtype=self.rows.dtype) + group_norms
        return Shared(
            buffers=buffers + cute.assume(t.group * group_elements, divby=16),
            norms=norms,
            weight=weight,
            all_scales=scales,
            scales=scales + cute.assume(t.group * (2 * c.quad_bytes), divby=16) if c.quads else None,
            sums=sums + t.group * c.group_sums,
            experts=table_at(base + at.experts) if c.problem.has_table else None,
            barriers=barriers,
            full=own,
            summed=own + c.stages,
            weight_barrier=barriers + c.groups * c.group_barriers,
        )

    def _init_barriers(self, s) -> None:
        c = self.config
        for i in range(c.groups * c.group_barriers + 1):
            cute.arch.mbarrier_init(s.barriers + i, 1)

    # A row

    def _load_row(self, stage, weights, row, t, s) -> tuple[list, Float32 | None, list]:
        """Load the thread's blocks of a row.

        Returns:
            For each block its products v · w and their amax; the amax of the FP8 block whose scale this thread
            computes, if blocks of 128 have scales; and the thread's partial results of ``Problem.reductions``.
        """
        c = self.config
        p = c.problem
        blocks = []
        squares = Float32(0.0)
        values = [self.rows.values(stage, j, t, s) for j in range(c.common_blocks)]
        if p.source == "add":
            if c.has_short_block:
                # Some threads have read the half of a short block that others overwrite now (``Rows._safe_block``).
                cute.arch.sync_warp()
            for j, (_, words) in enumerate(values):
                self.rows.fill_buffer(words, self.rows.buffer(1, stage, t.row, s), j, t)
        if self.stores.is_bulk:
            fence_async()
        for j in range(c.thread_blocks):
            block = cute.make_rmem_tensor((p.unit,), Float32), cute.make_rmem_tensor((1,), Float32)
            if j < c.common_blocks:
                squares = squares + self._take_block(j, values[j][0], weights, block, t)
            else:
                # An ordinary magnitude where the block is skipped.
                block[1][0] = Float32(1.0)
                squares = squares + self._take_last_block(stage, weights, block, t, s)
            blocks.append(block)
        shared = self._shared_amax(blocks, t) if p.fmt == FP8_BLOCK128 else None
        reduced = [squares] * p.normalises
        if p.reduces_amax:
            reduced.append(self._amax_of(blocks))
        if p.counts_unusual:
            scaled = [amax[0] for _, amax in blocks] if shared is None else [shared]
            reduced.append(Float32(sum(ptx.select(self._is_usual(amax), Int32(0), Int32(1)) for amax in scaled)))
        return blocks, shared, reduced

    def _take_block(self, j: int, v: list, weights, block, t) -> Float32:
        """Put products and amax of the thread's j-th block into its registers; returns the sum of its squares."""
        products, square = v, Float32(0.0)
        if self.config.problem.normalises:
            products = [ptx.mul_rn(a, b) for a, b in zip(v, weights[j], strict=True)]
            square = sum_of_squares(v)
            if self.rows.is_ragged:
                square = ptx.select(t.column + j * self.config.threads_per_row < t.my_blocks, square, Float32(0.0))
        self._fill(*block, products)
        return square

    @cute.jit
    def _take_last_block(self, stage, weights, block, t, s) -> Float32:
        square = Float32(0.0)
        if self.rows.has_last_block(t):
            j = self.config.common_blocks
            v, _ = self.rows.values(stage, j, t, s)
            square = self._take_block(j, v, weights, block, t)
        return square

    def _shared_amax(self, blocks, t) -> Float32:
        """The amax of the FP8 block whose scale this thread computes."""
        return self.encoder.shared.largest([amax[0] for _, amax in blocks], t.lane)

    def _amax_of(self, blocks) -> Float32:
        """The amax over a thread's blocks."""
        return reduce(ptx.max_abs_nan, [largest[0] for _, largest in blocks], Float32(0.0))

    def _fill(self, products, amax, values: list) -> None:
        """Put ``values`` and their amax, NaN if one is, into a block's registers."""
        largest = Float32(0.0)
        for i, value in enumerate(values):
            products[i] = value
            largest = ptx.max_abs_nan(largest, value)
        amax[0] = largest

    def _can_fold(self, total, other, scale):
        """Whether ``(v · rstd) · w`` may be computed as ``(v · w) · rstd``, with the row factor applied to blocks.

        The two differ by rounding, and where v · w overflows or is subnormal (weights are assumed to be below 2^88). So
        the sum of squares must be of ordinary magnitude, and everything that scales are computed from: ``other``, which
        is the row's amax, or the number of blocks of unusual amax; or the given ``scale`` of FP8. Scales of NVFP4
        cannot represent a block that is tiny compared to its row. An element that is tiny compared to its own block has
        code 0 either way, and a norm in bf16 or fp16 is too coarse to show the difference unless eps is below 2^-34.
        Where v · rstd is subnormal and v · w is not, the folded product is the more exact one. (A block of zeros counts
        as unusual, so its row takes longer.)
        """
        fmt = self.config.problem.fmt
        usual = (total >= Float32(2.0**-80)) & (total <= Float32(2.0**80))
        if fmt == FP8_TOKEN:
            usual = usual & self._is_usual(other)
        if self.config.problem.counts_unusual:
            usual = usual & (other == Float32(0.0))
        if fmt == FP8_TENSOR:
            usual = usual & (ptx.max_abs_nan(Float32(0.0), scale) >= Float32(2.0**-80))
        return usual

    def _is_usual(self, amax):
        """Whether an amax of products v · w is of ordinary magnitude."""
        return (amax >= Float32(2.0**-80)) & (amax < Float32(float("inf")))

    @cute.jit
    def _normalize(self, blocks, rstd, stage, weights, t, s):
        """Replace products ``v · w`` by ``(v · rstd) · w``, computed from the row in shared memory."""
        for j in range_constexpr(self.config.thread_blocks):
            v, _ = self.rows.values(stage, j, t, s, again=True)
            scaled = [ptx.mul_rn(ptx.mul_rn(a, rstd), b) for a, b in zip(v, weights[j], strict=True)]
            self._fill(*blocks[j], scaled)
        fence_async()
        if const_expr(self.config.group_rows == 1):
            # The buffer is refilled next, and other threads may still be reading it.
            sync_group(self.config, t)

    @cute.jit
    def _reduce_row(self, values: list, slots: cute.Pointer, barrier: cute.Pointer, parity, t):
        """Reduce sums of squares, amaxes and block counts over the threads that share a row.

        The order depends on the configuration alone. ``values`` are those of ``Problem.reductions``, or an amax alone;
        ``slots`` has ``partials`` words for each value; in a cluster ``barrier`` counts the bytes that were sent.
        """
        c = self.config
        lanes = min(WARP, c.threads_per_row)
        # An amax comes last.
        sums = len(values) - c.problem.reduces_amax
        combine = [(lambda a, b: a + b) if i < sums else ptx.max_abs_nan for i in range(len(values))]
        values = [
            cute.arch.warp_reduction(value, op, threads_in_group=lanes)
            for value, op in zip(values, combine, strict=True)
        ]
        if const_expr(c.splits > 1):
            if t.in_group == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(values) * c.partials * 4)
            if t.lane < c.splits:
                for i in range_constexpr(len(values)):
                    slot = slots + (i * c.partials + t.rank * c.group_warps + t.warp)
                    cute.arch.store_async_dsmem(slot, Int32(ptx.bits_of(values[i])), barrier, t.lane)
            ptx.wait(barrier, parity)
            sync_group(self.config, t)
        elif const_expr(c.partials > 1):
            if t.lane == 0:
                for i in range_constexpr(len(values)):
                    slots[i * c.partials + t.warp] = values[i]
            sync_group(self.config, t)
        else:
            cute.arch.sync_warp()
        if const_expr(c.partials > 1):
            for i in range_constexpr(len(values)):
                value = slots[i * c.partials]
                for k in range_constexpr(1, c.partials):
                    value = combine[i](value, slots[i * c.partials + k])
                values[i] = value
        return values

    def _row_amax_again(self, blocks, again, t, s):
        """The row's amax, recomputed from the blocks as they are now; ``again`` counts these calls."""
        c = self.config
        slots = s.sums + 2 * c.partials * c.problem.reductions
        return self._reduce_row([self._amax_of(blocks)], slots, s.summed + 2, again & 1, t)[0]
