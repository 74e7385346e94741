"""End of a work tile: multiply by experts' factors, add up partial sums of several CTAs, and store results."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps, factor_counts, load_row_scale
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.core.memory import load_words, pack, store_words
from torch_cute_ops.kernels.common.core.partial_sums import (
    reduce_partial_sums,
    reduce_received,
    reduced_rows,
    send_partial_sums,
    store_partial_sums,
    thread_columns,
)
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M
from torch_cute_ops.kernels.fp4_wgmma.config import Config
from torch_cute_ops.kernels.fp4_wgmma.load import existing_sizes

COLLECTED_ATOMS = 8  # number of groups of eight tokens whose partial sums are added at once


class WorkTileEpilogue:
    """Device code for the end of a work tile. ``acc_scale`` is the factor that undoes the scaling of decoded codes in
    the accumulators."""

    def __init__(self, config: Config, epilogue: EpilogueOps, acc_scale: float):
        self.config, self.epilogue, self.acc_scale = config, epilogue, acc_scale

    @cute.jit
    def finish(self, acc, n_tile, first, count, factor, tid, consumer, work, smem):
        """Store a work tile's results, or write its partial sums for the CTA that computes the n tile's last k tile.

        ``factor`` is the result of ``EpilogueOps.factor``. The work tile consists of ``count`` k tiles of the n tile,
        starting with k tile ``first``.
        """
        c = self.config
        if const_expr(c.reduces):
            self._reduce(acc, n_tile, factor, tid, consumer, work, smem)
        elif const_expr(c.split_k == 1):
            self._write(acc, n_tile, factor, consumer, work)
        elif first + count < work.k_tiles:
            self._leave(acc, consumer, work)
        else:
            if first > 0:
                self._collect(acc, n_tile, consumer, work)
            self._write(acc, n_tile, factor, consumer, work)

    def add_expert(self, acc, total, stage, consumer, smem) -> None:
        """Multiply an expert's accumulators by the tokens' factors, and add the products to ``total``.

        The factors are read from stage ``stage`` of the activations. A factor of zero adds nothing, even if the
        accumulator is NaN.
        """
        c = self.config
        scale = Float32(self.acc_scale)
        for j in range(c.tile_m // ATOM_M):
            at = smem.factors + cute.assume(stage * c.factor_bytes + (j * ATOM_M + consumer.quad * 2) * 4, divby=8)
            pair = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
            for e in range(2):
                factor = ptx.float_of(pair[e])
                counts = factor_counts(factor)
                for r in range(2):
                    at = 4 * j + 2 * r + e
                    total[at] = ptx.fma_if(counts, factor, ptx.mul_rn(acc[at], scale), total[at])
        # Fence and synchronise, so that all lanes have read the factors before the stage is released.
        fence_async()
        cute.arch.sync_warp()

    def _partial_sums_of(self, cta, consumer, work) -> cute.Tensor:
        """Return this thread's elements of a CTA's partial sums in the workspace, as a (4, tile_m / 8) tensor."""
        c = self.config
        slot = (Int64(work.m_tile) * work.num_ctas + cta) * (c.tile_n * c.tile_m)
        start = slot + (consumer.group * WARPGROUP + consumer.thread) * 4
        layout = cute.make_layout((4, c.tile_m // ATOM_M), stride=(1, c.consumer_groups * WARPGROUP * 4))
        return cute.make_tensor(
            cute.recast_ptr(work.workspace.partial_sums.iterator + cute.assume(start, divby=4), dtype=Uint32), layout
        )

    def _flag(self, cta, consumer, work) -> cute.Pointer:
        """Return the address of the flag that CTA ``cta`` sets for this warpgroup's partial sums."""
        c = self.config
        place = (work.m_tile * work.num_ctas + cta) * c.consumer_groups + consumer.group
        return work.workspace.flags.iterator + place

    def _sync_warpgroup(self, consumer) -> None:
        """Synchronise the threads of the consumer warpgroup."""
        cute.arch.barrier(barrier_id=1 + consumer.group, number_of_threads=WARPGROUP)

    @cute.jit
    def _leave(self, acc, consumer, work):
        """Write this CTA's partial sums to the workspace, for the CTA that computes the n tile's last k tile, and set
        the flag."""
        to = self._partial_sums_of(work.cta, consumer, work)
        for j in range_constexpr(self.config.tile_m // ATOM_M):
            store_words([ptx.bits_of(acc[4 * j + i]) for i in range(4)], to[None, j])
        self._sync_warpgroup(consumer)
        if consumer.thread == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(self._flag(work.cta, consumer, work), Uint32(1))

    @cute.jit
    def _collect(self, acc, n_tile, consumer, work):
        """Add other CTAs' partial sums of this n tile to ``acc``, in the order of k. This CTA's own partial sums come
        last."""
        c = self.config
        count = c.tile_m // ATOM_M
        # ``first`` is the CTA that computes the n tile's first k tile. Find it by inverting the formula that assigns
        # ranges to CTAs.
        start = Int64(n_tile) * work.k_tiles
        first = Int32(((start + 1) * work.num_ctas - 1) // work.iterations)
        for cta in range(first, work.cta):
            flag = self._flag(cta, consumer, work)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        # Add a few groups of tokens at a time: a second copy of all accumulators would not fit into registers.
        step = min(count, COLLECTED_ATOMS)
        for j in range_constexpr(0, count, step):
            total = cute.make_rmem_tensor((4 * step,), Float32)
            total.fill(0.0)
            for cta in range(first, work.cta):
                partial_sums = self._partial_sums_of(cta, consumer, work)
                for i in range_constexpr(step):
                    for e, word in enumerate(load_words(partial_sums[None, j + i])):
                        total[4 * i + e] = total[4 * i + e] + ptx.float_of(word)
            for i in range_constexpr(4 * step):
                acc[4 * j + i] = total[i] + acc[4 * j + i]

    @cute.jit
    def _reduce(self, acc, n_tile, factor, tid, consumer, work, smem):
        """Add up the partial sums of the cluster's CTAs, and of the warps that divide k. Then apply the epilogue, and
        store the results."""
        c = self.config
        threads, finishers = c.consumer_warps * 32, c.n_warps * 32
        columns = thread_columns(c.partial_sums, finishers, tid, n_tile * c.tile_n)
        terms = self.epilogue.terms(work.alpha, work.bias, *columns, work.n)
        finish = self.epilogue.finisher(factor, terms, self.acc_scale)
        # The partial sums overwrite the weight's codes. Wait until all warps have read the codes.
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        column = consumer.column
        if const_expr(c.warp_split_k > 1):
            column += consumer.warp_k * c.partial_sums.split_n
        store_partial_sums(c.partial_sums, acc, smem.codes, column, consumer.quad)
        rank = work.cta % c.split_k
        at = work.m_tile * c.tile_m, n_tile * c.tile_n
        tile = c.partial_sums, c.split_k, finishers
        if const_expr(c.sends):
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            # After this barrier, the mbarriers of the other CTAs are initialised, so partial sums may be sent.
            cute.arch.cluster_wait()
            m, n = existing_sizes(c, work)
            own = reduced_rows(c.partial_sums, c.split_k, rank, m)
            if tid < finishers:
                send_partial_sums(*tile, smem.codes, smem.received, smem.received_full, rank, tid, m, n)
                ptx.wait(smem.received_full, 0, scope="cluster")
                reduce_received(*tile, finish, work.out, smem.received, rank, tid, own, *at, work.row_scale)
        else:
            self._sync_cluster(threads)
            if tid < finishers:
                reduce_partial_sums(*tile, finish, work.out, smem.codes, rank, tid, *at, work.row_scale)
            if const_expr(c.split_k > 1):
                # Wait, because other CTAs may still read this CTA's partial sums.
                self._sync_cluster(threads)

    def _sync_cluster(self, threads: int) -> None:
        """Synchronise the consumer threads of all CTAs of the cluster."""
        if self.config.split_k > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    @cute.jit
    def _write(self, acc, n_tile, factor, consumer, work):
        """Apply the epilogue to the accumulators and store the results. With experts, ``add_expert`` has already undone
        the scaling of decoded codes."""
        c = self.config
        scale = self.acc_scale if c.expert_k is None else 1.0
        columns = [n_tile * c.tile_n + consumer.column + 8 * r for r in range(2)]
        terms = [self.epilogue.terms(work.alpha, work.bias, column, 1, work.n) for column in columns]
        finish = [self.epilogue.finisher(factor, one, scale) for one in terms]
        first_row = work.m_tile * c.tile_m
        for j in range_constexpr(c.tile_m // ATOM_M):
            factors = [None, None]
            if const_expr(self.epilogue.epilogue.has_row_scale):
                pair = first_row + consumer.quad * 2
                factors = [load_row_scale(work.row_scale, pair, work.m, 8 * j + e) for e in range(2)]
            values = [finish[i // 2](acc[4 * j + i], 0, factors[i % 2]) for i in range(4)]
            for r in range_constexpr(2):
                # A word holds two rows of one column. Seven other lanes hold the neighbouring columns, so 16-bit
                # results are transposed across lanes.
                pair = values[2 * r : 2 * r + 2]
                if const_expr(self.epilogue.out_dtype is Float32):
                    n = n_tile * c.tile_n + consumer.column + 8 * r
                    for e in range_constexpr(2):
                        row = first_row + 8 * j + consumer.quad * 2 + e
                        if (n < work.n) & (row < work.m):
                            self._store(row, n, [ptx.bits_of(pair[e])], 1, work)
                else:
                    word = ptx.transpose_8x8(pack(pair, self.epilogue.out_dtype)[0])
                    row = first_row + 8 * j + consumer.lane // 4
                    n = n_tile * c.tile_n + consumer.column - consumer.lane // 4 + 8 * r + consumer.quad * 2
                    if (n < work.n) & (row < work.m):
                        self._store(row, n, [word], 2, work)

    def _store(self, row, n, words: list, divby: int, work) -> None:
        offset = cute.assume(Int64(row) * work.n + n, divby=divby)
        to = cute.recast_ptr(work.out.iterator + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(to, cute.make_layout(len(words))))
