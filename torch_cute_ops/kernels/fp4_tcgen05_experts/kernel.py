"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common import ptx, tcgen05
from torch_cute_ops.kernels.common.activation_layout import CHUNK
from torch_cute_ops.kernels.common.block_scaled_kernel import WARP, BlockScaledKernel, ScaleTiles, as_bytes
from torch_cute_ops.kernels.common.block_scaled_mma import STEPS
from torch_cute_ops.kernels.common.block_scaled_stage import LINE, ROWS, SCALE_TILE, STEP, STORING_WARPS
from torch_cute_ops.kernels.common.cluster_sums import write_sums
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, store_words
from torch_cute_ops.kernels.common.expert_factors import factor_counts, factors_argument
from torch_cute_ops.kernels.common.fp4_weights import rows_of_bytes
from torch_cute_ops.kernels.common.overlap import ctas_unless_overlapping
from torch_cute_ops.kernels.common.weight_ring import next_stage
from torch_cute_ops.kernels.fp4_tcgen05_experts.config import (
    ACCUMULATORS,
    LIST_BYTES,
    LOADED,
    MAX_EXPERTS,
    Arguments,
    Config,
)
from torch_cute_ops.runtime.argspec import Dim, TensorArg

SCANNED = 32  # factors that a thread loads at once, to find out which experts are touched


class Part(NamedTuple):
    """A CTA's part of the GEMM, and the operands.

    Attributes:
        m, n: sizes of the result.
        steps: MMAs of an expert. (As a constant, of which all chunks are whole, it made ptxas crash.)
        blocks: blocks of a row, of all experts.
        token_tile, row_tile: which tile of the result.
        rank: the CTA in its cluster.
        count: experts that it has; routed, those that are touched.
        touched, listed: in shared memory, a bit for each of the CTA's experts, and the numbers of those whose bit is
            set; ``None``: all are computed.
        a_scale, b_scale: as bytes.
        alpha: factors (M, E).
        out: the result.
    """

    m: Int32
    n: Int32
    steps: Int32
    blocks: Int32
    token_tile: Int32
    row_tile: Int32
    rank: Int32
    count: Int32
    touched: cute.Tensor | None
    listed: cute.Tensor | None
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor
    out: cute.Tensor


class FP4Tcgen05ExpertsKernel(BlockScaledKernel):
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.out_dtype = DSL_DTYPES[config.out_dtype]

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        out = TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16)
        return Arguments(*self.mma.arguments(m, n), factors_argument(m), out)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, out, stream):
        c = self.config
        ctas = cute.ceil_div(out.shape[0], ROWS) * cute.ceil_div(out.shape[1], c.columns) * c.splits
        ctas = ctas_unless_overlapping(ctas, (out,), (a, a_scale, b, b_scale, alpha))
        b_rows, b_bytes = rows_of_bytes(b, b_scale)
        maps = (
            self.mma.map(self._by_expert(a, alpha.shape[1]), ROWS),
            self.mma.map(self._by_expert(b_rows, alpha.shape[1]), c.columns),
        )
        self.kernel(*maps, as_bytes(a_scale), b_bytes, alpha, out).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _by_expert(self, codes: cute.Tensor, experts) -> cute.Tensor:
        """Codes of rows as (rows, bytes of an expert, experts)."""
        line = cute.assume(codes.shape[1] // experts, divby=STEP // 2)
        layout = cute.make_layout((codes.shape[0], line, experts), stride=(codes.stride[0], 1, line))
        return cute.make_tensor(codes.iterator, layout)

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, alpha, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        rank, tile = cta % c.splits, cta // c.splits
        m, n = out.shape
        token_tiles = cute.ceil_div(m, ROWS)
        experts = alpha.shape[1]
        part = Part(
            m=m,
            n=n,
            steps=a_map[1].shape[1] // (STEP // 2),
            blocks=experts * (c.width // c.fmt.block_size),
            # Tiles of tokens run side by side, and share the weight in L2.
            token_tile=tile % token_tiles,
            row_tile=tile // token_tiles,
            rank=rank,
            count=(experts - rank + c.splits - 1) // c.splits,
            touched=None,
            listed=None,
            a_scale=a_scale,
            b_scale=b_scale,
            alpha=alpha,
            out=out,
        )
        smem = self._set_up(tid)
        if const_expr(c.routed):
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            part = self._list(tid, part, smem)
        cute.arch.sync_threads()
        columns = self._work(tid, (a_map, b_map), part, smem)
        # All totals are in shared memory, and all loads of tensor memory done.
        self._meet()
        self._free(tid, columns)
        if tid < WARP * STORING_WARPS:
            at = part.token_tile * ROWS, part.row_tile * c.columns
            threads = WARP * STORING_WARPS
            write_sums(c.sum_tile, c.splits, threads, _as_it_is, out, smem.stages, rank, tid, *at)
        if const_expr(c.splits > 1):
            # No CTA may end while another still reads its totals.
            cute.arch.sync_warp()
            self._meet()

    @cute.jit
    def _meet(self):
        """A barrier of the CTA, or of the cluster."""
        if const_expr(self.config.splits > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    # Experts

    @cute.jit
    def _list(self, tid, part, smem) -> Part:
        """List the CTA's experts that a token of the tile is routed to, in their order."""
        c = self.config
        lists = smem.stages + (c.smem_bytes - LIST_BYTES)
        listed = cute.make_tensor(cute.recast_ptr(lists, dtype=Int32), cute.make_layout(MAX_EXPERTS))
        touched = cute.recast_ptr(lists + 4 * MAX_EXPERTS, dtype=Uint32)
        touched = cute.make_tensor(touched, cute.make_layout(MAX_EXPERTS // WARP))
        part = part._replace(listed=listed, touched=touched)
        lane, threads = tid % WARP, c.threads
        first = part.token_tile * ROWS
        last = cutlass.min(part.m, first + ROWS)
        groups = cute.ceil_div(part.count, WARP)
        for group in range(tid // WARP, groups, threads // WARP):
            place = group * WARP + lane
            found = Uint32(0)
            for token in range(first, last, SCANNED):
                for i in range_constexpr(SCANNED):
                    exists = (place < part.count) & (token + i < last)
                    found = found | self._factor_bits(token + i, place * c.splits + part.rank, exists, part)
            word = cute.arch.vote_ballot_sync(factor_counts(ptx.float_of(found)))
            if lane == 0:
                part.touched[group] = Uint32(word)
        cute.arch.sync_threads()
        total = Int32(0)
        for group in range(groups):
            bits = part.touched[group]
            place = group * WARP + lane
            if (tid < WARP) & ((bits >> Uint32(lane)) & 1 != 0):
                before = Int32(cute.arch.popc(bits & ((Uint32(1) << Uint32(lane)) - 1)))
                part.listed[total + before] = place * c.splits + part.rank
            total = total + Int32(cute.arch.popc(bits))
        return part._replace(count=total)

    def _factor_bits(self, token, expert, exists, part) -> Uint32:
        """The factor of a token for an expert, as bits; zero, unless it ``exists``."""
        offset = Int64(token) * part.alpha.stride[0] + Int64(expert) * part.alpha.stride[1]
        return ptx.load_if(part.alpha.iterator + offset, exists, 1)[0]

    def _expert(self, i, part) -> Int32:
        """The ``i``-th of the experts that the CTA computes."""
        return part.listed[i] if self.config.routed else i * self.config.splits + part.rank

    def _first_tile(self, expert, chunk):
        """The tile of scales that a chunk begins in."""
        return (expert * self.config.width + chunk * CHUNK) // self.stage.tile_elements

    # Copies

    @cute.jit
    def _copy(self, a_map, b_map, part, smem):
        """The copying warp: fill stages."""
        c = self.config
        if const_expr(c.pdl and not c.routed):
            cute.arch.griddepcontrol_wait()
        tokens, rows = self.mma.boxes(a_map, ROWS), self.mma.boxes(b_map, c.columns)
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        for i in cutlass.range(part.count, unroll=1):
            expert = self._expert(i, part)
            for chunk in cutlass.range(c.chunks, unroll=1):
                ptx.wait(smem.free + stage, parity)
                base = self._stage_at(stage, smem)
                self._copy_scales_of(expert, chunk, base, smem.full + stage, part)
                place = part.row_tile, chunk, expert
                to = base + ROWS * LINE
                self.mma.copy_box(b_map, rows, c.columns, to, place, smem.full + stage, ptx.EVICT_FIRST)
                place = part.token_tile, chunk, expert
                self.mma.copy_box(a_map, tokens, ROWS, base, place, smem.full + stage, None)
                stage, parity = next_stage(stage, parity, c.stages)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _copy_scales_of(self, expert, chunk, base, barrier, part):
        """Start the copies of a stage's scales, if they are in tiles."""
        c, stage = self.config, self.stage
        first = self._first_tile(expert, chunk)
        end = expert * c.width + cutlass.min(chunk * CHUNK + CHUNK, Int32(c.width))
        size = (cute.ceil_div(end, stage.tile_elements) - first) * SCALE_TILE
        rows = ScaleTiles(part.b_scale, part.row_tile * c.columns // ROWS, 1, ptx.EVICT_FIRST)
        tokens = ScaleTiles(part.a_scale, part.token_tile, 1, None)
        self._copy_scales(tokens, rows, first, size, base, barrier)

    @cute.jit
    def _arrange(self, thread, part, smem):
        """An arranging warp: write linear scales to every fourth stage."""
        c = self.config
        if const_expr(c.pdl and not c.routed):
            cute.arch.griddepcontrol_wait()
        turn, lane = thread // WARP, thread % WARP
        tokens = part.a_scale, part.token_tile * ROWS + lane, part.m
        rows = part.b_scale, part.row_tile * c.columns + lane, part.n
        stage, parity = Int32(0), Int32(1)
        for i in cutlass.range(part.count, unroll=1):
            expert = self._expert(i, part)
            for chunk in cutlass.range(c.chunks, unroll=1):
                first = self._first_tile(expert, chunk) * (self.stage.tile_elements // c.fmt.block_size)
                turn, stage, parity = self._arrange_chunk(
                    turn, lane, tokens, rows, first, part.blocks, stage, parity, smem
                )

    # MMAs

    @cute.jit
    def _multiply(self, columns, part, smem):
        """The multiplying thread: issue the MMAs of all experts."""
        c = self.config
        place = self._first_chunk()
        accumulator, free_parity = Int32(0), Int32(1)
        first_column = part.row_tile * c.columns
        for i in cutlass.range(part.count, unroll=1):
            phase = None
            if const_expr(self.stage.spread):
                # The width is an odd multiple of half a tile of scales.
                phase = self._expert(i, part) % 2
            ptx.wait(smem.sums_free + accumulator, free_parity)
            total = columns + Uint32(accumulator * c.columns)
            for chunk in cutlass.range(c.chunks, unroll=1):
                steps = cutlass.min(part.steps - chunk * STEPS, Int32(STEPS))
                place = self._multiply_chunk(place, columns, total, steps, first_column, chunk > 0, phase, smem)
            tcgen05.commit(smem.sums_full + accumulator, 1, False)
            accumulator, free_parity = next_stage(accumulator, free_parity, ACCUMULATORS)

    # Results

    @cute.jit
    def _store(self, columns, tid, part, smem):
        """A storing warp: add up the experts' sums, and leave the totals in shared memory."""
        c = self.config
        if const_expr(c.pdl and not c.routed):
            cute.arch.griddepcontrol_wait()
        token = part.token_tile * ROWS + tid
        totals = cute.make_rmem_tensor(cute.make_layout(c.columns), Float32)
        totals.fill(0.0)
        accumulator, parity = Int32(0), Int32(0)
        for i in cutlass.range(part.count, unroll=1):
            expert = self._expert(i, part)
            factor = ptx.float_of(self._factor_bits(token, expert, token < part.m, part))
            ptx.wait(smem.sums_full + accumulator, parity)
            tcgen05.fence_after()
            counts = factor_counts(factor)
            if cute.arch.vote_ballot_sync(counts) != 0:
                start = columns + Uint32(accumulator * c.columns) + Uint32(tid // WARP * WARP << 16)
                for piece in range_constexpr(c.columns // LOADED):
                    sums = tcgen05.load(start + piece * LOADED, LOADED)
                    tcgen05.wait_for_loads()
                    if counts:
                        for j in range_constexpr(LOADED):
                            at = piece * LOADED + j
                            totals[at] = ptx.fma_rn(factor, ptx.float_of(sums[j]), totals[at])
            self._leave_columns(smem.sums_free + accumulator, tid)
            accumulator, parity = next_stage(accumulator, parity, ACCUMULATORS)
        # The last sums are complete, so that no copy and no MMA needs the stages any more.
        row = smem.stages + cute.assume(tid * (c.sum_tile.pitch * 4), divby=16)
        for j in range_constexpr(0, c.columns, 4):
            words = [ptx.bits_of(totals[j + k]) for k in range(4)]
            store_words(words, cute.make_tensor(cute.recast_ptr(row + j * 4, dtype=Uint32), cute.make_layout(4)))


def _as_it_is(total: Float32, i: int) -> Float32:
    """The epilogue, which is none."""
    return total
