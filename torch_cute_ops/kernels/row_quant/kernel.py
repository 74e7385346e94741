"""Device code of the kernel that quantises rows.

The package's docstring describes the roles of the warps and the data path.
"""

from functools import reduce
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_DYNAMIC_TENSOR, FP8_TENSOR
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp4.codes import nvfp4_row_scale, scale_argument, scale_matrix
from torch_cute_ops.kernels.row_quant.codes import Encoder
from torch_cute_ops.kernels.row_quant.config import AMAX_THREADS, FEW_ROWS, WARP, Arguments, Config
from torch_cute_ops.kernels.row_quant.experts import fill_table, table_at
from torch_cute_ops.kernels.row_quant.rows import Rows, sync_group
from torch_cute_ops.kernels.row_quant.scales import FP4Scales
from torch_cute_ops.kernels.row_quant.stores import Stores
from torch_cute_ops.kernels.row_quant.tensor_amax import TensorAmax
from torch_cute_ops.kernels.row_quant.thread import Smem, Thread
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


def sum_of_squares(values: list) -> Float32:
    """Return the sum of the squares of ``values``, computed from four interleaved partial sums, so that fewer additions
    depend on each other."""
    partial_sums = [Float32(0.0)] * 4
    for i, value in enumerate(values):
        partial_sums[i % 4] = ptx.fma_rn(value, value, partial_sums[i % 4])
    return (partial_sums[0] + partial_sums[1]) + (partial_sums[2] + partial_sums[3])


def sum_of(values: list) -> Float32:
    """Return the sum of ``values``, computed from four interleaved partial sums, as in ``sum_of_squares``."""
    partial_sums = [reduce(ptx.add_rn, values[i::4]) for i in range(4)]
    return ptx.add_rn(ptx.add_rn(partial_sums[0], partial_sums[1]), ptx.add_rn(partial_sums[2], partial_sums[3]))


class RowQuantKernel:
    """Kernel that quantises rows, compiled for a ``Config``.

    Attributes:
        exchange: device code that replaces each row of the input by the sum of several GPUs' rows, an
            ``all_reduce_rows.exchange.Exchange``; or None.
    """

    exchange: Any = None

    def __init__(self, config: Config):
        self.config = config
        self.scales, self.encoder = FP4Scales(config), Encoder(config)
        self.rows = Rows(config, self.scales)
        self.stores = Stores(config, self.rows, self.scales, self.encoder)
        self.tensor_amax = TensorAmax(config.spec, config.pdl) if config.spec.fmt == FP8_DYNAMIC_TENSOR else None
        self.few_rows_config = None if config.few_rows_config is None else RowQuantKernel(config.few_rows_config)

    def arguments(self) -> Arguments:
        spec = self.config.spec
        rows = Dim("rows")
        dtype = self.rows.dtype.__name__

        def strided(width: int, stride: str, dtype: Any = self.rows.dtype) -> TensorArg:
            step = Dim(stride, divisibility=128 // dtype.width, bits=64)
            return TensorArg(dtype.__name__, (rows, width), (step, 1), align=16)

        def matrix(dtype: str, rows, columns, align: int = 16) -> TensorArg:
            return TensorArg(dtype, (rows, columns), (columns, 1), align)

        y = scale = linear = None
        if isinstance(spec.fmt, FP4Format):
            y = matrix("Uint8", rows, spec.width // 2)
        elif spec.fmt is not None:
            y = matrix("Float8E4M3FN", rows, spec.width)
        if spec.has_byte_scales:
            scale = scale_argument(spec.fmt, spec.layout, rows, self.config.blocks)
            if spec.also_linear:
                linear = matrix(scale.dtype, rows, self.config.blocks, align=1)
        elif spec.fmt is not None:
            if spec.interleaved:
                groups = (spec.blocks + spec.padding_blocks) * spec.block_elements // INTERLEAVED_K
                shape = rows, groups, INTERLEAVED_K
                y = TensorArg("Float8E4M3FN", shape, (groups * INTERLEAVED_K, INTERLEAVED_K, 1), align=16)
            scales = spec.fmt.scales_per_row(spec.width)
            if spec.has_tensor_scale:
                scale = TensorArg("Float32", (1,), (1,), align=4)
            elif spec.layout == COLUMN:
                scale = TensorArg("Float32", (rows, scales), (1, rows), align=4)
            else:
                scale = matrix("Float32", rows, scales, align=4)
        factors = 1 if self.tensor_amax is None else Dim("partials")
        weight = None
        if spec.weight_dtype is not None:
            weight = TensorArg(self.rows.weight_dtype.__name__, (spec.width,), (1,), align=16)
        return Arguments(
            input=strided(spec.input_width, "row_stride"),
            residual=strided(spec.width, "residual_stride", self.rows.residual_dtype) if spec.source == "add" else None,
            weight=weight if spec.has_weight else None,
            bias=weight if spec.has_bias else None,
            factor=TensorArg("Float32", (factors,), (1,), align=4) if spec.has_factor else None,
            y=y,
            scale=scale,
            scale_linear=linear,
            norm=matrix(dtype, rows, spec.width) if spec.writes_norm else None,
            row_scale=TensorArg("Float32", (rows,), (1,), align=4) if spec.has_row_scale else None,
            offsets=TensorArg("Int32", (Dim("ends"),), (1,), align=4) if spec.has_offsets else None,
            counts=TensorArg("Int32", (Dim("experts"),), (1,), align=4) if spec.has_counts else None,
            eps=ScalarArg("Float32"),
            swiglu_alpha=ScalarArg("Float32") if spec.swiglu else None,
            swiglu_beta=ScalarArg("Float32") if spec.swiglu else None,
            swiglu_limit=ScalarArg("Float32") if spec.swiglu else None,
            max_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(
        self,
        input,
        residual,
        weight,
        bias,
        factor,
        y,
        scale,
        scale_linear,
        norm,
        row_scale,
        offsets,
        counts,
        eps: Float32,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        max_ctas: Int32,
        stream,
    ):
        layout = self.config.spec.layout
        allowed = ctas_unless_overlapping(
            Int32(1),
            written=(y, scale, scale_linear, norm, row_scale, residual),
            read=(input, weight, bias, factor, offsets, counts),
            may_alias=() if residual is None or self.config.spec.has_fp32_residual else ((residual, input),),
        )
        if const_expr(not layout.is_linear):
            # TVM-FFI does not check the first size of the scales. If the size is wrong, launch an empty grid, which
            # raises an error. Overlapping tensors are refused in the same way.
            tile = layout.tile_rows
            allowed = ptx.select(scale.shape[0] == cute.ceil_div(input.shape[0], tile), allowed, Int32(0))
        scale = scale_matrix(scale, layout)
        if const_expr(self.tensor_amax is not None):
            self.tensor_amax.kernel(input, factor).launch(
                grid=[allowed * factor.shape[0], 1, 1],
                block=[AMAX_THREADS, 1, 1],
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=self.config.pdl,
            )
        gate = (swiglu_alpha, swiglu_beta, swiglu_limit) if const_expr(self.config.spec.swiglu) else None
        outputs = y, scale, scale_linear, norm, row_scale
        given = input, residual, weight, bias, factor, *outputs, offsets, counts, eps, gate, None
        if const_expr(self.few_rows_config is None):
            self.launch(allowed, given, max_ctas, stream)
        elif input.shape[0] <= FEW_ROWS:
            self.few_rows_config.launch(allowed, given, max_ctas, stream)
        else:
            self.launch(allowed, given, max_ctas, stream)

    @cute.jit
    def launch(self, allowed: Int32, given: tuple, max_ctas: Int32, stream):
        """Launch the kernel if ``allowed`` is 1. If ``allowed`` is 0, launch no CTAs, so that the launch fails."""
        c = self.config
        rows = given[0].shape[0]
        # Give a CTA a second row only if every CTA has a row. Launch several CTAs even for a single row, because they
        # also zero the padding: a single CTA would take 14 µs for the padding (H200, width 7,168).
        wanted = cute.ceil_div(rows, c.group_rows)
        if const_expr(not c.spec.layout.is_linear):
            wanted = cutlass.max(wanted, WARP)
        clusters = cutlass.max(max_ctas // c.splits, 1)
        threads = Int32(c.threads)
        if const_expr(not c.spec.has_table):
            # If there are enough CTAs for all rows, launch one group per CTA, because smaller CTAs start sooner.
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
    def kernel(
        self,
        input,
        residual,
        weight,
        bias,
        factor,
        y,
        scale,
        scale_linear,
        norm,
        row_scale,
        offsets,
        counts,
        eps,
        gate,
        peers,
    ):
        c = self.config
        spec = c.spec
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        threads, _, _ = cute.arch.block_dim()
        group = cute.arch.make_warp_uniform(tid // c.group_threads)
        in_group = tid % c.group_threads
        rank = cta % c.splits
        column = (in_group + c.first_column(group)) % c.group_threads
        thread = Thread(
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
            cta_blocks=cutlass.min(Int32(c.blocks) - rank * c.slice_blocks, c.slice_blocks),
            rows=input.shape[0],
            input=input,
            residual=residual,
            y=y,
            scale=scale,
            scale_linear=scale_linear,
            norm=norm,
            row_scale=row_scale,
            gate=gate,
            walkers=ctas // c.splits * (threads // c.group_threads),
            walker=group * (ctas // c.splits) + cta // c.splits,
        )
        if const_expr(spec.rows != "experts"):
            self.rows.distribute(thread)
        smem = self._allocate(thread)
        # The thread that initialises the barriers can start its group's copies at once. The other threads must first
        # wait for a barrier of the CTA.
        early = const_expr(c.group_rows == 1)
        if tid == 0:
            self._init_barriers(smem)
        cute.arch.mbarrier_init_fence()
        # This synchronisation is needed only for compute-sanitizer's racecheck, which attributes the initialisation to
        # the whole warp.
        cute.arch.sync_warp()
        pdl_start(c.pdl)
        if const_expr(self.exchange is not None):
            thread.peers = self.exchange.start(peers)
        if const_expr(spec.has_table):
            fill_table(smem.experts, offsets, counts, input.shape[0], tid, c.threads)
            cute.arch.sync_threads()
            thread.rows = smem.experts.total[0]
            self.rows.distribute(thread)
        elif const_expr(spec.rows == "experts"):
            # Clamp the range of rows to the buffer, because offsets may be wrong. Clamp the end before the subtraction,
            # which would overflow if the end were negative and the beginning large.
            thread.first_row = cutlass.max(offsets[0], Int32(0))
            end = cutlass.min(offsets[offsets.shape[0] - 1], input.shape[0])
            thread.rows = cutlass.max(end, thread.first_row) - thread.first_row
            self.rows.distribute(thread)
        # Look up the thread's rows in global memory: for this iteration and, with two stages, for the next iteration.
        memory_row, second_row = (
            self.rows.memory_row_at(Int32(0), thread, smem),
            self.rows.memory_row_at(Int32(c.stages - 1), thread, smem),
        )
        if tid == 0:
            if const_expr(spec.copies_terms):
                self.rows.issue_weight(weight, bias, thread, smem)
            if const_expr(early):
                self.rows.issue_first(memory_row, second_row, thread, smem)
        if const_expr(c.quads):
            if thread.quads > 0:
                self.scales.clear_quads(thread, smem)
        if const_expr(c.is_cluster):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if const_expr(early):
            if group > 0:
                self.rows.issue_first(memory_row, second_row, thread, smem)
        else:
            self.rows.issue_first(memory_row, second_row, thread, smem)
        if const_expr(self.exchange is not None):
            if const_expr(c.stages == 2):
                self.exchange.push(Int32(0), thread, smem)
            self.exchange.count_launch(thread)
        if const_expr(not spec.layout.is_linear):
            self.scales.zero_padding_rows(thread)
        global_scale = None
        if const_expr(self.tensor_amax is not None):
            global_scale = self.tensor_amax.scale(factor, thread.lane)
        elif const_expr(spec.has_factor):
            global_scale = factor[0]
        if const_expr(spec.has_tensor_scale):
            if (tid == 0) & (cta == 0):
                scale[0] = global_scale
        weights = []
        if const_expr(spec.copies_terms):
            ptx.wait(smem.weight_barrier, 0)
        if const_expr(spec.normalises and not spec.is_general):
            weights = [self.rows.weight(j, thread, smem) for j in range(c.blocks_per_thread)]

        again = Int32(0)  # number of rows whose amax was recomputed
        for iteration in range(thread.iterations):
            stage = iteration % c.stages
            row = self.rows.row_at(iteration, thread) + thread.row
            # Look up the row that will be copied next, while this iteration's row is still in flight.
            later_row = self.rows.memory_row_at(iteration + c.stages, thread, smem)
            ptx.wait(smem.full + stage, (iteration // c.stages) & 1)
            if const_expr(self.exchange is not None):
                self.exchange.push(iteration + (c.stages - 1), thread, smem)
                self.exchange.sum_row(row, stage, thread, smem)
            rstd = None
            if const_expr(spec.is_general):
                blocks, amax = self._general_norm(iteration, stage, eps, thread, smem)
            else:
                blocks, amax, reduced = self._load_row(stage, weights, row, thread, smem)
                if const_expr(spec.reductions > 0):
                    barrier = smem.partial_sums_full + iteration % 2
                    slots = smem.partial_sums + iteration % 2 * (c.num_partials * spec.reductions)
                    reduced = self._reduce_row(reduced, slots, barrier, (iteration // 2) & 1, thread)
                    if const_expr(spec.reduces_amax):
                        amax = reduced[-1]
                else:
                    fence_async()
                    sync_group(self.config, thread)
                if const_expr(spec.normalises):
                    total = reduced[0]
                    rstd = ptx.rsqrt_approx(ptx.fma_rn(total, Float32(1.0 / spec.norm_width), eps))
                    extreme = row < thread.rows
                    if const_expr(spec.folds):
                        extreme = extreme & (not self._can_fold(total, reduced[-1], global_scale))
                    if const_expr(spec.reduces_amax or spec.has_fp8_blocks):
                        # If several rows share a warp, all of them recompute their amax together, because the warp
                        # reduces as a whole. A row that need not recompute its amax gets the same amax again.
                        if cute.arch.vote_any_sync(extreme):
                            if extreme:
                                self._normalize(blocks, rstd, stage, weights, thread, smem)
                                rstd = Float32(1.0)
                            if const_expr(spec.reduces_amax):
                                amax = self._row_amax_again(blocks, again, thread, smem)
                                again = again + 1
                            else:
                                amax = self._shared_amax(blocks, thread)
                    else:
                        if extreme:
                            self._normalize(blocks, rstd, stage, weights, thread, smem)
                            rstd = Float32(1.0)
            row_factor = global_scale
            if const_expr(spec.has_row_scale):
                row_scale_value, row_factor, power = nvfp4_row_scale(self.encoder.scaled(amax, rstd))
                self._multiply(blocks, power)
                self.stores.store_row_scale(row_scale_value, row, thread)
            if const_expr(self.stores.is_bulk):
                self.stores.start_bulk(iteration, stage, thread, smem)
            if const_expr(spec.source != "add"):
                self.rows.issue(iteration + c.stages, stage, later_row, thread, smem)
            self.scales.write_quad(iteration - 1, thread, smem)
            self.stores.store_row(
                blocks,
                rstd,
                amax,
                row_factor,
                row,
                memory_row if spec.rows == "experts" else row,
                iteration,
                thread,
                smem,
            )
            if const_expr(not spec.layout.is_linear):
                self.scales.zero_padding_columns(row, iteration, thread)
            if const_expr(self.stores.is_bulk):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            if const_expr(spec.source == "add"):
                self.rows.issue(iteration + c.stages, stage, later_row, thread, smem)
            if const_expr(spec.rows == "experts"):
                memory_row = second_row if c.stages == 2 else later_row
                second_row = later_row
        if const_expr(c.bulk_norm):
            fence_async()
        if const_expr(c.quads or c.bulk_norm):
            sync_group(self.config, thread)
        if const_expr(c.quads):
            self.scales.write_quad(thread.iterations - 1, thread, smem)
        if const_expr(c.bulk_norm):
            if thread.iterations > 1:
                self.stores.start_norm(thread.iterations - 1, thread, smem)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(c.is_cluster):
            # Wait, because other CTAs may still write to this CTA's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # Shared memory and barriers

    def _allocate(self, thread: Thread) -> Smem:
        c = self.config
        group_elements = c.stages * c.group_rows * c.spec.input_units * c.slice_width
        # Use dynamic shared memory: the ptxas of CUDA 12 limits static shared memory to 48 KB.
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        at = c.smem_offsets
        buffers = cute.recast_ptr(base + at.rows, dtype=self.rows.dtype)
        weight_dtype = self.rows.weight_dtype
        weight = bias = None
        if weight_dtype is not None and c.spec.has_weight:
            weight = cute.recast_ptr(base + at.weight, dtype=weight_dtype)
        if c.spec.has_bias:
            bias = cute.recast_ptr(base + at.bias, dtype=weight_dtype)
        scales = cute.recast_ptr(base + at.scales, dtype=Uint8) if c.quads else None
        partial_sums = cute.recast_ptr(base + at.partial_sums, dtype=Float32)
        barriers = cute.recast_ptr(base + at.barriers, dtype=Int64)
        own = barriers + thread.group * c.group_barriers
        norms = None
        if c.bulk_norm:
            group_norms = cute.assume(thread.group * (2 * c.group_rows * c.slice_width), divby=16)
            norms = cute.recast_ptr(base + at.norms, dtype=self.rows.dtype) + group_norms
        return Smem(
            buffers=buffers + cute.assume(thread.group * group_elements, divby=16),
            norms=norms,
            weight=weight,
            bias=bias,
            all_scales=scales,
            scales=scales + cute.assume(thread.group * (2 * c.quad_bytes), divby=16) if c.quads else None,
            partial_sums=partial_sums + thread.group * c.group_partial_sums,
            experts=table_at(base + at.experts, c.spec.table_words) if c.spec.has_table else None,
            barriers=barriers,
            full=own,
            partial_sums_full=own + c.stages,
            weight_barrier=barriers + c.groups * c.group_barriers,
        )

    def _init_barriers(self, smem) -> None:
        c = self.config
        for i in range(c.groups * c.group_barriers + 1):
            cute.arch.mbarrier_init(smem.barriers + i, 1)

    # Rows

    def _load_row(self, stage, weights, row, thread, smem) -> tuple[list, Float32 | None, list]:
        """Load the thread's blocks of a row, multiply the blocks by the weight, and compute the amax of each product
        block.

        Returns:
            A tuple of three entries. The first holds, per block, the products v · w and their amax. The second is the
                amax of the FP8 block whose scale this thread computes, or None unless scales are per 128 elements. The
                third holds this thread's partial results of the row's ``RowQuantSpec.reductions``.
        """
        c = self.config
        spec = c.spec
        blocks = []
        squares = Float32(0.0)
        values = self._read_row(stage, thread, smem)
        for j in range(c.blocks_per_thread):
            block = cute.make_rmem_tensor((spec.block_elements,), Float32), cute.make_rmem_tensor((1,), Float32)
            if j < c.common_blocks:
                squares = squares + self._take_block(j, values[j][0], weights, block, thread)
            else:
                # If the thread has no last block, set the block's amax to a value that does not affect the reduction: 0
                # if the row's amax is reduced, or 1 if blocks of unusual amax are counted, because 1 is a usual amax
                # (see ``_can_fold``).
                block[1][0] = Float32(0.0 if spec.reduces_amax else 1.0)
                squares = squares + self._take_last_block(stage, weights, block, thread, smem)
            blocks.append(block)
        shared = self._shared_amax(blocks, thread) if spec.has_fp8_blocks else None
        reduced = [squares] * spec.normalises
        if spec.reduces_amax:
            reduced.append(self._amax_of(blocks))
        if spec.counts_unusual_blocks:
            scaled = [amax[0] for _, amax in blocks] if shared is None else [shared]
            reduced.append(Float32(sum(ptx.select(self._is_usual(amax), Int32(0), Int32(1)) for amax in scaled)))
        return blocks, shared, reduced

    def _read_row(self, stage, thread, smem) -> list:
        """Return ``Rows.values`` of the thread's first ``common_blocks`` blocks. Write sums over the residual's row."""
        c = self.config
        values = [self.rows.values(stage, j, thread, smem) for j in range(c.common_blocks)]
        if c.spec.source == "add":
            if c.has_short_block:
                # Synchronise first: this thread overwrites half of a short block, which other threads may still read
                # (``Rows._safe_block``).
                cute.arch.sync_warp()
            for j, (_, words) in enumerate(values):
                self.rows.fill_buffer(words, self.rows.buffer(1, stage, thread.row, smem), j, thread)
        if self.stores.is_bulk:
            fence_async()
        return values

    def _general_norm(self, iteration, stage, eps, thread, smem) -> tuple[list, Float32 | None]:
        """Load the thread's blocks of a row, and compute ``(v - mean) · rstd · weight + bias`` in this order.

        The mean, the weight and the bias are left out if the ``RowQuantSpec`` lacks them. Each reduction has separate
        partial results for even and for odd rows.

        Returns:
            A tuple of two entries. The first holds, per block, the norms and their amax. The second is the row's amax
            if ``RowQuantSpec.reduces_amax``, otherwise the second entry of ``_load_row``.
        """
        c = self.config
        spec = c.spec
        reduced = iter(range(spec.reductions))

        def reduced_row(value, is_sum: bool = True) -> Float32:
            index = iteration % 2 * spec.reductions + next(reduced)
            slots = smem.partial_sums + index * c.num_partials
            barrier = smem.partial_sums_full + index
            return self._reduce_row([value], slots, barrier, (iteration // 2) & 1, thread, num_sums=int(is_sum))[0]

        def total(function, rows: list) -> Float32:
            sums = [function(v) for v in rows]
            if self.rows.is_ragged:
                sums = [ptx.select(self.rows.has_block(j, thread), one, Float32(0.0)) for j, one in enumerate(sums)]
            return reduce(ptx.add_rn, sums)

        values = [v for v, _ in self._read_row(stage, thread, smem)]
        per_element = Float32(1.0 / spec.norm_width)
        if spec.subtracts_mean:
            # Divide, do not multiply by an inverse: the mean of a constant row is then exact whenever the sum is.
            mean = ptx.div_rn(reduced_row(total(sum_of, values)), Float32(float(spec.norm_width)))
            values = [[ptx.sub_rn(each, mean) for each in v] for v in values]
            values = [self.rows.without_padding(v, j, thread) for j, v in enumerate(values)]
        rstd = ptx.rsqrt_approx(ptx.fma_rn(reduced_row(total(sum_of_squares, values)), per_element, eps))
        blocks = []
        for j, v in enumerate(values):
            norm = [ptx.mul_rn(each, rstd) for each in v]
            if spec.has_weight:
                norm = [ptx.mul_rn(a, b) for a, b in zip(norm, self.rows.weight(j, thread, smem), strict=True)]
            if spec.has_bias:
                norm = [ptx.add_rn(a, b) for a, b in zip(norm, self.rows.bias(j, thread, smem), strict=True)]
            block = cute.make_rmem_tensor((spec.block_elements,), Float32), cute.make_rmem_tensor((1,), Float32)
            self._fill(*block, norm)
            blocks.append(block)
        if spec.reduces_amax:
            return blocks, reduced_row(self._amax_of(blocks), is_sum=False)
        return blocks, self._shared_amax(blocks, thread) if spec.has_fp8_blocks else None

    def _take_block(self, j: int, v: list, weights, block, thread) -> Float32:
        """Store the thread's j-th block in registers, multiplied by the norm's weight if there is one, and the block's
        amax. Return the sum of the squares of the elements before this multiplication."""
        products, square = v, Float32(0.0)
        if self.config.spec.normalises:
            products = [ptx.mul_rn(a, b) for a, b in zip(v, weights[j], strict=True)]
            square = sum_of_squares(v)
            if self.rows.is_ragged:
                square = ptx.select(self.rows.has_block(j, thread), square, Float32(0.0))
        self._fill(*block, products)
        return square

    @cute.jit
    def _take_last_block(self, stage, weights, block, thread, smem) -> Float32:
        square = Float32(0.0)
        if self.rows.has_last_block(thread):
            j = self.config.common_blocks
            v, _ = self.rows.values(stage, j, thread, smem)
            square = self._take_block(j, v, weights, block, thread)
        return square

    def _shared_amax(self, blocks, thread) -> Float32:
        """Return the amax of the FP8 block whose scale this thread computes."""
        return self.encoder.shared.largest([amax[0] for _, amax in blocks], thread.lane)

    def _amax_of(self, blocks) -> Float32:
        """Return the amax over all blocks of this thread."""
        return reduce(ptx.max_abs_nan, [largest[0] for _, largest in blocks], Float32(0.0))

    def _fill(self, products, amax, values: list) -> None:
        """Store ``values``, and their amax (NaN if a value is NaN), in a block's registers."""
        largest = Float32(0.0)
        for i, value in enumerate(values):
            products[i] = value
            largest = ptx.max_abs_nan(largest, value)
        amax[0] = largest

    def _can_fold(self, total, other, scale):
        """Return True if ``(v · rstd) · w`` may be computed as ``(v · w) · rstd``, so that the row factor is applied to
        whole blocks.

        The two products differ by rounding. The difference is larger if v · w overflows or is subnormal (weights are
        assumed to be below 2^88). Therefore the sum of squares ``total`` must have an ordinary magnitude. The number
        from which scales are computed must have an ordinary magnitude too: ``scale`` if the caller passes an FP8 scale,
        or the row's amax (``other``). With block scales, ``other`` is instead the number of the row's blocks whose amax
        is unusual, and this number must be 0. NVFP4 needs no check of blocks: NVFP4 scales cannot represent a block
        that is tiny compared to its row. An element that is tiny compared to its own block gets code 0 with either
        product, and a norm in bf16 or fp16 is too coarse to show the difference unless eps is below 2^-34. If v · rstd
        is subnormal and v · w is not, (v · w) · rstd is more exact. A block of zeros counts as unusual, so its row
        takes longer.
        """
        fmt = self.config.spec.fmt
        usual = (total >= Float32(2.0**-80)) & (total <= Float32(2.0**80))
        if self.config.spec.reduces_amax:
            usual = usual & self._is_usual(other)
        if self.config.spec.counts_unusual_blocks:
            usual = usual & (other == Float32(0.0))
        if fmt == FP8_TENSOR:
            usual = usual & (ptx.max_abs_nan(Float32(0.0), scale) >= Float32(2.0**-80))
        return usual

    def _is_usual(self, amax):
        """Return True if ``amax``, the largest magnitude of a block's products v · w, is finite and at least 2^-80."""
        return (amax >= Float32(2.0**-80)) & (amax < Float32(float("inf")))

    @cute.jit
    def _normalize(self, blocks, rstd, stage, weights, thread, smem):
        """Replace the products ``v · w`` by ``(v · rstd) · w``, for which the row is read from shared memory again."""
        for j in range_constexpr(self.config.blocks_per_thread):
            v, _ = self.rows.values(stage, j, thread, smem, again=True)
            scaled = [ptx.mul_rn(ptx.mul_rn(a, rstd), b) for a, b in zip(v, weights[j], strict=True)]
            self._fill(*blocks[j], scaled)
        fence_async()
        if const_expr(self.config.group_rows == 1):
            # The next copy overwrites the row's buffer. Wait until all threads have read it.
            sync_group(self.config, thread)

    @cute.jit
    def _multiply(self, blocks, power: Float32):
        """Multiply the thread's blocks and their amaxes by ``power``, which is 1 unless the row is extreme."""
        if power != Float32(1.0):
            for j in range_constexpr(self.config.blocks_per_thread):
                products, amax = blocks[j]
                for i in range_constexpr(self.config.spec.block_elements):
                    products[i] = ptx.mul_rn(products[i], power)
                amax[0] = ptx.mul_rn(amax[0], power)

    @cute.jit
    def _reduce_row(
        self,
        values: list,
        slots: cute.Pointer,
        barrier: cute.Pointer,
        parity,
        thread,
        num_sums: cutlass.Constexpr = None,
    ):
        """Reduce sums of squares, amaxes and block counts over the threads that share a row.

        The order of the additions depends only on the configuration.

        Args:
            values: this thread's values of ``RowQuantSpec.reductions``, or only its amax.
            slots: shared memory, ``num_partials`` words per value.
            barrier: mbarrier that counts the bytes that the CTAs of a cluster send.
            num_sums: number of leading values that are sums; the following values are amaxes. None if only the row's
                amax is not a sum.
        """
        c = self.config
        lanes = min(WARP, c.threads_per_row)
        if const_expr(num_sums is None):
            # The amax, if any, is the last value. All other values are sums.
            num_sums = len(values) - c.spec.reduces_amax
        combine = [(lambda a, b: a + b) if i < num_sums else ptx.max_abs_nan for i in range(len(values))]
        values = [
            cute.arch.warp_reduction(value, op, threads_in_group=lanes)
            for value, op in zip(values, combine, strict=True)
        ]
        if const_expr(c.splits > 1):
            if thread.in_group == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(values) * c.num_partials * 4)
            if thread.lane < c.splits:
                for i in range_constexpr(len(values)):
                    slot = slots + (i * c.num_partials + thread.rank * c.group_warps + thread.warp)
                    cute.arch.store_async_dsmem(slot, Int32(ptx.bits_of(values[i])), barrier, thread.lane)
            ptx.wait(barrier, parity, scope="cluster")
            sync_group(self.config, thread)
        elif const_expr(c.num_partials > 1):
            if thread.lane == 0:
                for i in range_constexpr(len(values)):
                    slots[i * c.num_partials + thread.warp] = values[i]
            sync_group(self.config, thread)
        else:
            cute.arch.sync_warp()
        if const_expr(c.num_partials > 1):
            for i in range_constexpr(len(values)):
                value = slots[i * c.num_partials]
                for k in range_constexpr(1, c.num_partials):
                    value = combine[i](value, slots[i * c.num_partials + k])
                values[i] = value
        return values

    def _row_amax_again(self, blocks, again, thread, smem):
        """Recompute the row's amax from the current blocks. ``again`` is the number of earlier calls."""
        c = self.config
        slots = smem.partial_sums + 2 * c.num_partials * c.spec.reductions
        return self._reduce_row([self._amax_of(blocks)], slots, smem.partial_sums_full + 2, again & 1, thread)[0]
