"""From sums to results: totals over experts; partial sums that workers leave for each other; sums of the CTAs of a
cluster, and of warps that share a band; stores."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
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
from torch_cute_ops.kernels.common.experts.factors import factor_counts
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M
from torch_cute_ops.kernels.fp4_wgmma.config import Config
from torch_cute_ops.kernels.fp4_wgmma.part import existing

COLLECTED = 8  # groups of eight tokens whose sums are added up at once


class Results:
    """The results of one ``Config``, of sums that ``acc_scale`` makes true sums of."""

    def __init__(self, config: Config, epilogue: EpilogueOps, acc_scale: float):
        self.config, self.epilogue, self.acc_scale = config, epilogue, acc_scale

    @cute.jit
    def end_segment(self, sums, tile, first, count, factor, tid, consumer, part, smem):
        """What becomes of the sums of a segment: results, or partial sums for the worker that has the tile's last
        chunk. ``factor``: what ``EpilogueOps.factor`` returns."""
        c = self.config
        if const_expr(c.adds_up):
            self._add_up(sums, tile, factor, tid, consumer, part, smem)
        elif const_expr(c.splits == 1):
            self._write(sums, tile, factor, consumer, part)
        elif first + count < part.chunks:
            self._leave(sums, consumer, part)
        else:
            if first > 0:
                self._collect(sums, tile, consumer, part)
            self._write(sums, tile, factor, consumer, part)

    def add_expert(self, sums, totals, stage, consumer, smem) -> None:
        """Multiply an expert's sums by its factors, which that stage of activations has, and add them to the totals. A
        factor of zero adds nothing."""
        c = self.config
        scale = Float32(self.acc_scale)
        for j in range(c.tokens // ATOM_M):
            at = smem.factors + cute.assume(stage * c.factor_bytes + (j * ATOM_M + consumer.quad * 2) * 4, divby=8)
            pair = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
            for e in range(2):
                factor = ptx.float_of(pair[e])
                counts = factor_counts(factor)
                for r in range(2):
                    at = 4 * j + 2 * r + e
                    totals[at] = ptx.fma_if(counts, factor, ptx.mul_rn(sums[at], scale), totals[at])
        # All lanes have read when the first one frees the stage.
        fence_async()
        cute.arch.sync_warp()

    def _partials_of(self, worker, consumer, part) -> cute.Tensor:
        """The thread's partial sums of a worker in memory, (4, tokens / 8)."""
        c = self.config
        slot = (Int64(part.token_tile) * part.workers + worker) * (c.rows * c.tokens)
        start = slot + (consumer.group * WARPGROUP + consumer.thread) * 4
        layout = cute.make_layout((4, c.tokens // ATOM_M), stride=(1, c.groups * WARPGROUP * 4))
        return cute.make_tensor(
            cute.recast_ptr(part.workspace.partials.iterator + cute.assume(start, divby=4), dtype=Uint32), layout
        )

    def _flag(self, worker, consumer, part) -> cute.Pointer:
        """The flag of a worker's warpgroup."""
        c = self.config
        return part.workspace.flags.iterator + ((part.token_tile * part.workers + worker) * c.groups + consumer.group)

    def _meet(self, consumer) -> None:
        """A barrier of the warpgroup."""
        cute.arch.barrier(barrier_id=1 + consumer.group, number_of_threads=WARPGROUP)

    @cute.jit
    def _leave(self, sums, consumer, part):
        """Write this worker's partial sums to the workspace, for the one that has the tile's last chunk."""
        to = self._partials_of(part.worker, consumer, part)
        for j in range_constexpr(self.config.tokens // ATOM_M):
            store_words([ptx.bits_of(sums[4 * j + i]) for i in range(4)], to[None, j])
        self._meet(consumer)
        if consumer.thread == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(self._flag(part.worker, consumer, part), Uint32(1))

    @cute.jit
    def _collect(self, sums, tile, consumer, part):
        """Add other workers' partial sums of this tile, in the order of k; this worker's come last."""
        c = self.config
        count = c.tokens // ATOM_M
        # The worker that has the tile's first chunk: portions are rounded down.
        start = Int64(tile) * part.chunks
        first = Int32(((start + 1) * part.workers - 1) // part.units)
        for worker in range(first, part.worker):
            flag = self._flag(worker, consumer, part)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        # Some at a time: there are no registers for a second copy of all sums.
        step = min(count, COLLECTED)
        for j in range_constexpr(0, count, step):
            total = cute.make_rmem_tensor((4 * step,), Float32)
            total.fill(0.0)
            for worker in range(first, part.worker):
                left = self._partials_of(worker, consumer, part)
                for i in range_constexpr(step):
                    for e, word in enumerate(load_words(left[None, j + i])):
                        total[4 * i + e] = total[4 * i + e] + ptx.float_of(word)
            for i in range_constexpr(4 * step):
                sums[4 * j + i] = total[i] + sums[4 * j + i]

    @cute.jit
    def _add_up(self, sums, tile, factor, tid, consumer, part, smem):
        """Add up the sums of the cluster's CTAs, and those of the warps of shared bands; finish and store them."""
        c = self.config
        threads, finishers = c.warps * 32, c.bands * 32
        columns = thread_columns(c.sum_tile, finishers, tid, tile * c.rows)
        terms = self.epilogue.terms(part.alpha, part.bias, *columns, part.n)
        finish = self.epilogue.finisher(factor, terms, self.acc_scale)
        # All warps have read the codes, which the sums replace.
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        row = consumer.row
        if const_expr(c.turns > 1):
            row += consumer.turn * c.sum_tile.split_n
        store_partial_sums(c.sum_tile, sums, smem.codes, row, consumer.quad)
        rank = part.worker % c.splits
        at = part.token_tile * c.tokens, tile * c.rows
        if const_expr(c.sends):
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            # The peers' barriers are initialised.
            cute.arch.cluster_wait()
            tokens, rows = existing(c, part)
            own = reduced_rows(c.sum_tile, c.splits, rank, tokens)
            if tid < finishers:
                sent = smem.codes, smem.received, smem.sums_full
                send_partial_sums(c.sum_tile, c.splits, finishers, *sent, rank, tid, tokens, rows)
                ptx.wait(smem.sums_full, 0)
                reduce_received(c.sum_tile, c.splits, finishers, finish, part.out, smem.received, rank, tid, own, *at)
        else:
            self._meet_cluster(threads)
            if tid < finishers:
                reduce_partial_sums(c.sum_tile, c.splits, finishers, finish, part.out, smem.codes, rank, tid, *at)
            if const_expr(c.splits > 1):
                # No CTA may end while another still reads its sums.
                self._meet_cluster(threads)

    def _meet_cluster(self, threads: int) -> None:
        """A barrier of the consumers of all CTAs that have a tile."""
        if self.config.splits > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    @cute.jit
    def _write(self, sums, tile, factor, consumer, part):
        """Finish the sums, and store them. Over experts they have been scaled."""
        c = self.config
        scale = self.acc_scale if c.width is None else 1.0
        rows = [tile * c.rows + consumer.row + 8 * r for r in range(2)]
        terms = [self.epilogue.terms(part.alpha, part.bias, row, 1, part.n) for row in rows]
        finish = [self.epilogue.finisher(factor, one, scale) for one in terms]
        first_token = part.token_tile * c.tokens
        for j in range_constexpr(c.tokens // ATOM_M):
            values = [finish[i // 2](sums[4 * j + i], 0) for i in range(4)]
            for r in range_constexpr(2):
                # Two tokens of a row of the weight; other lanes have the other seven rows.
                pair = values[2 * r : 2 * r + 2]
                if const_expr(self.epilogue.out_dtype is Float32):
                    n = tile * c.rows + consumer.row + 8 * r
                    for e in range_constexpr(2):
                        token = first_token + 8 * j + consumer.quad * 2 + e
                        if (n < part.n) & (token < part.m):
                            self._store(token, n, [ptx.bits_of(pair[e])], 1, part)
                else:
                    word = ptx.transpose_8x8(pack(pair, self.epilogue.out_dtype)[0])
                    token = first_token + 8 * j + consumer.lane // 4
                    n = tile * c.rows + consumer.row - consumer.lane // 4 + 8 * r + consumer.quad * 2
                    if (n < part.n) & (token < part.m):
                        self._store(token, n, [word], 2, part)

    def _store(self, token, n, words: list, divby: int, part) -> None:
        offset = cute.assume(Int64(token) * part.n + n, divby=divby)
        to = cute.recast_ptr(part.out.iterator + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(to, cute.make_layout(len(words))))
