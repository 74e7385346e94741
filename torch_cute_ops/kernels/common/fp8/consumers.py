"""Parts of the consumer warpgroups of FP8 GEMMs by wgmma: MMAs, main loop, promotion, results.

``Consumers.run`` loops over the CTA's tiles. For each tile, it calls its *main loop*, which starts MMAs (``SmemMma`` or
a kernel's own class), promotes their results to the accumulators in fp32, and releases stages. Then ``Results`` stores
the accumulators, or first adds up partial sums with the other CTAs of the cluster.

A *promotion* adds the MMAs' result of a k tile, ``partial``, to the accumulators ``acc``:

- ``factors``: load the factors of a lane's elements, while the MMAs run;
- ``flags``: load flags of the stage, while the MMAs run;
- ``prepare``: change units if the flags ask for it, before the stage is released;
- ``promote``: ``acc += partial * factors``.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps, TileEpilogue
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, WGMMA_M
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.core.partial_sums import (
    add_accumulators,
    reduce_received,
    reduced_rows,
    send_accumulators,
    send_partial_sums,
    store_partial_sums,
    thread_columns,
)
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp8.gemm import Smem, Stages, WorkSchedule, k_tiles, wait_if
from torch_cute_ops.kernels.common.fp8.layouts import GROUPS, K_TILE, STORE_TILE_BYTES, FP8GemmConfig
from torch_cute_ops.kernels.common.fp8.row_stores import store_columns, store_rows

K_STEP = 32  # extent K of an MMA, in elements


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        tid: index of the thread among the consumers that share a tile.
        lane, quad: index of the thread in the warp, and index among the four lanes that share a row.
        first: first of the warp's 16 rows of the M side.
        row: first of the thread's two rows of the M side; the second is ``row + 8``.
        token: first of the thread's rows of ``a`` in a swapped tile.
        stores: shared memory in which the warp assembles lines of the result.
    """

    tid: Int32
    lane: Int32
    quad: Int32
    first: Int32
    row: Int32
    token: Int32
    stores: cute.Pointer


class Pending(NamedTuple):
    """Position of a tile whose accumulators are not stored yet."""

    row: Int32
    rows: Int32
    column: Int32
    expert: Int32


# MMAs


def tiled_mma(mma_n: int, m_source: Any) -> cute.TiledMma:
    """Return the tiled MMA of one K step of a consumer. Create a new tiled MMA wherever ACCUMULATE is set: the DSL
    tracks that field per scope."""
    shape = WGMMA_M, mma_n, K_STEP
    sources = m_source, OperandMajorMode.K, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))


class SmemMma:
    """MMAs of a k tile with both operands in shared memory.

    Args:
        config: configuration of the kernel.
        is_decoded: True if the MMAs read a decoded weight from the workspace, False if they read the copied weight from
            the stages.
    """

    parts = 1  # number of accumulators per element of the result and k tile

    def __init__(self, config: FP8GemmConfig, is_decoded: bool = False):
        self.config, self.is_decoded = config, is_decoded

    def begin(self, group, smem: Smem) -> Callable:
        """Return the function that starts a consumer's MMAs of a stage."""
        c = self.config
        source = warpgroup.OperandSource.SMEM
        weight = smem.workspace if self.is_decoded else smem.b
        m_base, n_base = (weight, smem.a) if c.is_swapped else (smem.a, weight)
        # The second consumer multiplies the next rows of the M side, or the same rows by another part of the N side.
        parts = c.m_parts
        m_side = k_tiles(m_base, WGMMA_M, c.stages * GROUPS // parts)
        n_side = k_tiles(n_base, c.mma_n, c.stages * parts)
        mma = tiled_mma(c.mma_n, source)
        thread = mma.get_slice(0)
        m_operand = mma.make_fragment_A(thread.partition_A(m_side))
        n_operand = mma.make_fragment_B(thread.partition_B(n_side))

        def multiply(stage, partial, adds: bool = False) -> None:
            """Start the MMAs of a stage, which overwrite ``partial``, or add to it."""
            mma = tiled_mma(c.mma_n, source)
            shape = mma.partition_shape_C((WGMMA_M, c.mma_n))
            accumulators = cute.make_tensor(partial.iterator, shape)
            warpgroup.fence()
            for step in range(K_TILE // K_STEP):
                mma.set(warpgroup.Field.ACCUMULATE, adds or step > 0)
                cute.gemm(
                    mma,
                    accumulators,
                    m_operand[None, None, step, stage * (GROUPS // parts) + (group if parts == 1 else 0)],
                    n_operand[None, None, step, stage * parts + (0 if parts == 1 else group)],
                    accumulators,
                )
            warpgroup.commit_group()

        return multiply


# Weights in registers, in stages of several k tiles


def token_operand(config: FP8GemmConfig, smem: Smem) -> cute.Tensor:
    """Return the activations of all slots as the B operand of MMAs whose A operand is in registers."""
    mma = tiled_mma(config.mma_n, warpgroup.OperandSource.RMEM)
    return mma.make_fragment_B(
        mma.get_slice(0).partition_B(k_tiles(smem.a, config.tile_m, config.stages * config.span))
    )


def register_operand(words, steps: int) -> cute.Tensor:
    """Return a lane's words of e4m3 numbers, four per K step, as the A operand of MMAs."""
    layout = cute.make_layout(((4, 2, 2), 1, steps), stride=((1, 4, 8), 0, 16))
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float8E4M3FN), layout)


# Promotion


def pair(values: cute.Tensor, group: int, consumer: Consumer) -> list:
    """Load the values of a lane's two columns in a group of eight."""
    at = values.iterator + cute.assume(8 * group + consumer.quad * 2, divby=2)
    words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
    return [ptx.float_of(word) for word in words]


def swapped_token_scales(mma_n: int, values: cute.Tensor, consumer: Consumer) -> list:
    """Load the scales of a lane's rows of ``a``, which are columns of a swapped tile."""
    own = cute.make_tensor(values.iterator + cute.assume(consumer.token, divby=2), values.layout)
    return [one for group in range(mma_n // 8) for one in pair(own, group, consumer)]


def token_factors(config: FP8GemmConfig, stages: Stages, stage, consumer: Consumer, smem: Smem) -> list:
    """Load the scales of a lane's rows of ``a``."""
    scales = stages.scales(stage, smem)
    if config.is_swapped:
        return swapped_token_scales(config.mma_n, scales, consumer)
    return [scales[consumer.row], scales[consumer.row + 8]]


def promote(config: FP8GemmConfig, acc: cute.Tensor, partial: cute.Tensor, factors: list) -> None:
    """Add the MMAs' result of a k tile, times the factors, to the accumulators."""
    for i in range(config.mma_n // 2):
        which = i // 4 * 2 + i % 2 if config.is_swapped else i // 2 % 2
        acc[i] = ptx.fma_rn(factors[which], partial[i], acc[i])


class TokenScaled:
    """Promotion rule: results are multiplied by the scales of ``a`` only. The weight's scales are powers of two, which
    the epilogue applies."""

    def __init__(self, config: FP8GemmConfig, stages: Stages):
        self.config, self.stages = config, stages

    def factors(self, stage, consumer, smem) -> list:
        return token_factors(self.config, self.stages, stage, consumer, smem)

    def flags(self, stage, consumer, smem) -> None:
        return None

    def prepare(self, acc, partial, flags, stage, consumer, smem) -> None:
        pass

    def promote(self, acc, partial, factors: list) -> None:
        promote(self.config, acc, partial, factors)


# The main loop


class MainLoop:
    """Multiplies the k tiles of a tile and promotes them.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        promotion: promotion rule.
        results: object that stores the previous tile while the first MMAs of the next tile run.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, promotion: Any, results: Any):
        self.config, self.stages, self.promotion, self.results = config, stages, promotion, results

    @cute.jit
    def run(self, multiply, acc, partials: list, pending, stage, parity, consumer, work, smem):
        """Multiply the CTA's stages of a tile. The first stage is full.

        With rows of ``a`` on the M side, ``acc`` still holds the ``pending`` tile, which is stored meanwhile.

        Return the next stage, and its parity.
        """
        c = self.config
        count = work.end - work.begin
        if const_expr(c.is_swapped):
            acc.fill(0.0)
        else:
            if count >= c.in_flight:
                count = count - c.in_flight
                store = functools.partial(self.results.store_pending, acc, pending, consumer, work)
                stage, parity = self._add_together(multiply, acc, partials, count, stage, parity, consumer, smem, store)
            else:
                self.results.store_pending(acc, pending, consumer, work)
        if const_expr(c.unrolls):
            # First complete the round of the pipeline that the previous tile has begun, then run whole rounds, then the
            # remainder.
            begun = cutlass.min((c.stages - stage) % c.stages, count)
            stage, parity = self.add(multiply, acc, partials, begun, count - begun, stage, parity, consumer, smem)
            for rest in cutlass.range(count - begun - c.stages, -1, -c.stages, unroll=1):
                for place in range_constexpr(0, c.stages, c.in_flight):
                    follow = rest + (c.stages - c.in_flight - place)
                    _, parity = self._add_together(multiply, acc, partials, follow, place, parity, consumer, smem)
            count = (count - begun) % c.stages
        return self.add(multiply, acc, partials, count, 0, stage, parity, consumer, smem)

    @cute.jit
    def add(self, multiply, acc, partials: list, count, follow, stage, parity, consumer, smem):
        """Multiply ``count`` stages of a tile, which ``follow`` more stages follow. Return the next stage, and its
        parity."""
        in_flight = self.config.in_flight
        for rest in cutlass.range(count - in_flight, -1, -in_flight, unroll=1):
            stage, parity = self._add_together(multiply, acc, partials, rest + follow, stage, parity, consumer, smem)
        for _ in cutlass.range(count % in_flight, unroll=1):
            stage, parity = self._add_together(multiply, acc, partials[:1], follow, stage, parity, consumer, smem)
        return stage, parity

    def _add_together(
        self, multiply, acc, partials: list, follow, stage, parity, consumer, smem, meanwhile: Any = None
    ) -> tuple:
        """Multiply one stage per entry of ``partials``. Promote the result of a stage while the MMAs of later stages
        run. The first stage is full. ``meanwhile`` is called after all MMAs have started. Return the next stage, and
        its parity.

        While a consumer promotes its last k tile, the tensor cores run only the other consumer's MMAs. Therefore a
        consumer loads factors, and waits for the next stage, before its last MMAs end.
        """
        rule, reads = self.promotion, []
        for i, partial in enumerate(partials):
            if i > 0:
                smem.stages.wait_full(stage, parity)
            multiply(stage, partial)
            reads.append(stage)
            stage, parity = smem.stages.next(stage, parity)
        if meanwhile is not None:
            meanwhile()
        for i, partial in enumerate(partials):
            later = len(partials) - 1 - i
            factors = rule.factors(reads[i], consumer, smem)
            flags = rule.flags(reads[i], consumer, smem)
            if later == 0:
                wait_if(follow > 0, smem.stages.full + stage, parity)
            warpgroup.wait_group(later)
            rule.prepare(acc, partial, flags, reads[i], consumer, smem)
            self.stages.release(reads[i], consumer.lane, smem)
            rule.promote(acc, partial, factors)
        return stage, parity


class TokenLoop:
    """Multiplies the k tiles of a tile with per-token scales. MMAs add up several k tiles in ``partial``.

    If the configuration ``promotes``, ``partial`` holds the sum of one pass of the loop, which is then added to the
    accumulators in fp32. Otherwise ``partial`` holds the sum over all of K. A consumer waits for its MMAs at the end of
    each pass, while the other consumer's MMAs run: ptxas would serialise MMAs that are in flight between passes.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        results: object that stores the previous tile while the first MMAs of the next tile run.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, results: Any):
        self.config, self.stages, self.results = config, stages, results

    @cute.jit
    def run(self, multiply, acc, partials: list, pending, stage, parity, consumer, work, smem):
        """Multiply the CTA's stages of a tile. The first stage is full.

        With rows of ``a`` on the M side, ``acc`` still holds the ``pending`` tile, which is stored meanwhile.

        Return the next stage, and its parity.
        """
        c, (partial,) = self.config, partials
        count = work.end - work.begin
        if const_expr(c.is_swapped):
            acc.fill(0.0)
            if const_expr(not c.promotes):
                partial.fill(0.0)
        elif count >= c.pass_k_tiles:
            count = count - c.pass_k_tiles
            store = functools.partial(self.results.store_pending, acc, pending, consumer, work)
            args = count, stage, parity, consumer, smem, True, store
            stage, parity = self._add(multiply, acc, partial, c.pass_k_tiles, *args)
        else:
            self.results.store_pending(acc, pending, consumer, work)
            if const_expr(not c.promotes):
                partial.fill(0.0)
        for rest in cutlass.range(count - c.pass_k_tiles, -1, -c.pass_k_tiles, unroll=1):
            stage, parity = self._add(multiply, acc, partial, c.pass_k_tiles, rest, stage, parity, consumer, smem)
        for rest in cutlass.range(count % c.pass_k_tiles - 1, -1, -1, unroll=1):
            stage, parity = self._add(multiply, acc, partial, 1, rest, stage, parity, consumer, smem)
        if const_expr(not c.promotes):
            acc.store(partial.load())
        return stage, parity

    def _add(
        self, multiply, acc, partial, count: int, follow, stage, parity, consumer, smem, begins=False, meanwhile=None
    ) -> tuple:
        """Multiply ``count`` stages of a tile, which ``follow`` more stages follow. The first stage is full.

        Args:
            begins: True if ``partial`` holds no sum yet.
            meanwhile: function that is called after all MMAs have started.

        Returns:
            Next stage, and its parity.
        """
        promotes, reads = self.config.promotes, []
        for i in range(count):
            if i > 0:
                smem.stages.wait_full(stage, parity)
            multiply(stage, partial, adds=i > 0 or not (promotes or begins))
            reads.append(stage)
            stage, parity = smem.stages.next(stage, parity)
        if meanwhile is not None:
            meanwhile()
        for i, read in enumerate(reads):
            if i == count - 1:
                wait_if(follow > 0, smem.stages.full + stage, parity)
            warpgroup.wait_group(count - 1 - i)
            self.stages.release(read, consumer.lane, smem)
        if promotes:
            for i in range(self.config.mma_n // 2):
                acc[i] = ptx.add_rn(acc[i], partial[i])
        return stage, parity


# The consumers


class Consumers:
    """Two consumer warpgroups. Each multiplies 64 rows of the M side by all or half of the N side.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        mma: MMAs of a k tile.
        loop: main loop.
        results: object that stores a tile's accumulators, or first adds up partial sums over the cluster.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, mma: Any, loop: Any, results: Any):
        self.config, self.stages, self.mma, self.loop, self.results = config, stages, mma, loop, results

    @cute.jit
    def run(self, tid, work, smem):
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        first, token = tid // 32 * 16, Int32(0)
        if const_expr(c.m_parts > 1):
            first, token = tid % WARPGROUP // 32 * 16, group * c.mma_n
        base = smem.stores + cute.assume(tid // 32 * STORE_TILE_BYTES, divby=16)
        consumer = Consumer(tid, lane, lane % 4, first, first + lane // 4, token, base)
        multiply = self.mma.begin(group, smem)
        size = c.mma_n // 2
        acc = cute.make_rmem_tensor((size,), Float32)
        partials = [cute.make_rmem_tensor((size * self.mma.parts,), Float32) for _ in range(c.in_flight)]
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        pending = Pending(Int32(0), Int32(0), Int32(0), Int32(0))  # none: no rows
        self.results.meet_cluster()
        for number in range(work.first, work.num_tiles, work.num_clusters):
            row, rows, column, expert = self.results.await_tile(number, stage, parity, lane, work, smem)
            exists = True if const_expr(c.is_swapped) else rows > group * WGMMA_M
            is_last = number + work.num_clusters >= work.num_tiles
            if exists:
                # In swapped tiles, alpha, bias and scales are loaded before the MMAs, which hide the latency.
                finish = self.results.finish(column, expert, consumer, work) if const_expr(c.is_swapped) else None
                scales = self.results.swapped_scales(row, rows, consumer, work) if const_expr(c.is_swapped) else None
                stage, parity = self.loop.run(multiply, acc, partials, pending, stage, parity, consumer, work, smem)
                if const_expr(not c.is_swapped):
                    if const_expr(c.split_k > 1):
                        # The other CTA of the pair stores the rows of the other warpgroup.
                        rows = ptx.select(work.rank == group, rows, Int32(0))
                    pending = Pending(row, rows, column, expert)
                elif const_expr(c.split_k > 1):
                    self.results.scale_swapped(acc, scales)
                    self.results.add_up(acc, finish, row, rows, column, turn, is_last, consumer, work, smem)
                else:
                    before = consumer.token
                    self.results.scale_swapped(acc, scales)
                    store_columns(acc, work.out, row + before, rows - before, column + consumer.first, lane, finish)
            else:
                # None of the warpgroup's rows exists.
                for _ in cutlass.range(work.end - work.begin, unroll=1):
                    smem.stages.wait_full(stage, parity)
                    self.stages.release(stage, lane, smem)
                    stage, parity = smem.stages.next(stage, parity)
            if const_expr(c.split_k > 1):
                if const_expr(not c.is_swapped):
                    self.results.exchange(acc, exists, group, turn, is_last, consumer, work, smem)
                turn = turn ^ 1
        if const_expr(not c.is_swapped):
            self.results.store_pending(acc, pending, consumer, work)
        if const_expr(c.pdl):
            if const_expr(c.waits_last):
                cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()


# Results


class GemmEpilogue:
    """The epilogue of ``FP8GemmConfig``: alpha, bias and rounding."""

    def __init__(self, config: FP8GemmConfig):
        self.config, self.ops = config, EpilogueOps(config.epilogue)

    def of_tile(self, expert, work) -> TileEpilogue:
        """Return the epilogue of a tile."""
        return self.ops.of_tile(work.alpha, work.bias, work.n, None if self.config.rows.is_plain else expert)


def load_token_scales(row, rows, places: list, work) -> list:
    """Load the per-token scales of the tile's rows ``places``; rows that do not exist get 0.

    Args:
        row, rows: first row of the tile, and its number of rows.
        places: indices of the rows in the tile.
        work: tensors of the call.
    """
    scale, words = work.a_scale, []
    for place in places:
        words += ptx.load_if(scale.iterator + Int64(row + place) * scale.stride[0], place < rows, 1)
    return [ptx.float_of(word) for word in words]


class Results:
    """End of a tile: stores finished accumulators; under split-K, first adds up the partial sums of the cluster.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        schedule: work schedule.
        epilogue: object whose ``of_tile`` returns the epilogue of a tile.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, schedule: WorkSchedule, epilogue: Any):
        self.config, self.stages, self.schedule, self.epilogue = config, stages, schedule, epilogue
        self.has_token_scales = config.scale_warps == 0

    @cute.jit
    def await_tile(self, number, stage, parity, lane, work, smem):
        """Wait for the first stage of a tile. Return the tile's first row, its number of rows, its first column, and
        its expert.

        Without split-K, they are read from the record of the stage, because finding a tile takes some 1,000 clocks.
        Under split-K, the CTA finds the tile itself, because it may have no k tile of the output tile, and thus no
        record.
        """
        if const_expr(self.config.split_k == 1):
            smem.stages.wait_full(stage, parity)
            row, rows, column, expert = (Int32(word) for word in load_words(self.stages.record(stage, smem)))
        else:
            expert, row, rows, column = self.schedule.find(number, lane, work, smem)
            if work.begin < work.end:
                smem.stages.wait_full(stage, parity)
        return row, rows, column, expert

    def meet_cluster(self) -> None:
        """Wait until the barriers of all CTAs that share this CTA's tiles are initialised."""
        if self.config.split_k > 1:
            cute.arch.cluster_wait()

    def finish(self, column, expert, consumer: Consumer, work):
        """Return the functions that apply the epilogue to a thread's accumulators of a swapped tile: one function for
        each of the thread's two columns, or, under split-K, one function for the columns of ``thread_columns``."""
        c, epilogue = self.config, self.epilogue.of_tile(expert, work)
        if c.split_k > 1:
            return epilogue(*thread_columns(c.sum_tile, GROUPS * WARPGROUP, consumer.tid, column))
        return tuple(epilogue(column + consumer.row + 8 * r, 1) for r in range(2))

    def swapped_scales(self, row, rows, consumer: Consumer, work) -> list | None:
        """Load the per-token scales of a lane's rows of ``a`` in a swapped tile, or return None for block scales."""
        if not self.has_token_scales:
            return None
        first = consumer.token + consumer.quad * 2
        places = [first + 8 * i + e for i in range(self.config.mma_n // 8) for e in range(2)]
        return load_token_scales(row, rows, places, work)

    def scale_swapped(self, acc, scales: list | None) -> None:
        """Multiply the accumulators of a swapped tile by the per-token scales of their rows."""
        if scales is not None:
            for i in range(self.config.mma_n // 2):
                acc[i] = ptx.mul_rn(acc[i], scales[i // 4 * 2 + i % 2])

    def store_pending(self, acc, pending: Pending, consumer: Consumer, work) -> None:
        """Store the accumulators of the pending tile, and clear them."""
        if self.has_token_scales:
            scales = load_token_scales(pending.row, pending.rows, [consumer.row, consumer.row + 8], work)
            for i in range(self.config.mma_n // 2):
                acc[i] = ptx.mul_rn(acc[i], scales[i // 2 % 2])
        store_rows(
            acc,
            work.out,
            consumer.stores,
            pending.row + consumer.first,
            pending.rows - consumer.first,
            pending.column,
            consumer.lane,
            self.epilogue.of_tile(pending.expert, work),
        )
        acc.fill(0.0)

    @cute.jit
    def add_up(self, acc, finish, row, rows, column, turn, is_last, consumer, work, smem):
        """Add up the partial sums of a swapped tile over the CTAs that share the tile, in the order of K. Apply the
        epilogue and store the results.

        The CTAs send each other the partial sums of rows and columns that exist. A CTA may end when it has received all
        partial sums that it waits for: afterwards, no CTA sends to it or arrives at its barriers.

        Args:
            turn: parity of the tile's number among the CTA's tiles.
            is_last: True for the CTA's last tile.
        """
        c, threads = self.config, GROUPS * WARPGROUP
        # All CTAs have read the previous tile's sums. (Waiting for parity 1 passes a barrier that was never used.)
        ptx.wait(smem.partial_sums.empty, turn ^ 1, scope="cluster")
        tokens, columns = cutlass.min(rows, Int32(c.tile_m)), cutlass.min(work.n - column, Int32(c.tile_n))
        own = reduced_rows(c.sum_tile, c.split_k, work.rank, tokens)
        if consumer.tid == 0:
            # Partial sums of other CTAs may arrive before this arrival.
            cute.arch.mbarrier_arrive_and_expect_tx(smem.partial_sums.full, own * columns * (c.split_k * 4))
        self._leave(acc, consumer, smem)
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        tile = c.sum_tile, c.split_k, threads
        send_partial_sums(
            *tile, smem.stores, smem.received, smem.partial_sums.full, work.rank, consumer.tid, tokens, columns
        )
        ptx.wait(smem.partial_sums.full, turn, scope="cluster")
        first = work.out.iterator + cute.assume(Int64(row) * work.n, divby=8)
        out = cute.make_tensor(first, cute.make_layout((rows, work.n), stride=(work.n, 1)))
        reduce_received(*tile, finish, out, smem.received, work.rank, consumer.tid, own, Int32(0), column)
        self._tell_read(is_last, consumer, smem)

    @cute.jit
    def exchange(self, acc, exists, group, turn, is_last, consumer, work, smem):
        """Add up the partial sums of a tile with ``a`` on the M side that two CTAs share. CTA i adds up both CTAs'
        accumulators of consumer warpgroup i, if any row of the warpgroup ``exists``, and sends its own accumulators of
        the other warpgroup to the other CTA. All warps arrive at the empty barrier, including warps that have read
        nothing: otherwise a late warp might find the barrier two phases ahead, and wait for the next phase. ``turn``
        and ``is_last`` are as in ``add_up``.
        """
        c, tid = self.config, consumer.tid % WARPGROUP
        ptx.wait(smem.partial_sums.empty, turn ^ 1, scope="cluster")
        if group == work.rank:
            if tid == 0:
                # Accumulators of the other CTA may arrive before this arrival.
                size = ptx.select(exists, Int32(c.received_bytes), Int32(0))
                cute.arch.mbarrier_arrive_and_expect_tx(smem.partial_sums.full, size)
            # Wait even if nothing is sent: a wait by parity must see every phase of the barrier.
            ptx.wait(smem.partial_sums.full, turn, scope="cluster")
            if exists:
                add_accumulators(acc, smem.received, tid)
        elif exists:
            send_accumulators(acc, smem.received, smem.partial_sums.full, work.rank ^ 1, tid)
        self._tell_read(is_last, consumer, smem)

    def _leave(self, acc, consumer: Consumer, smem: Smem) -> None:
        """Store the partial sums of a consumer's rows of ``a`` in this CTA's shared memory."""
        c = self.config
        of_part = replace(c.sum_tile, tile_m=c.mma_n)
        base = smem.stores + cute.assume(consumer.token * (4 * of_part.pitch), divby=16)
        store_partial_sums(of_part, acc, base, consumer.row, consumer.quad)

    @cute.jit
    def _tell_read(self, is_last, consumer, smem):
        """Tell all CTAs that share the tile that a warp has read their partial sums, unless this is the last tile."""
        if not is_last:
            # The next tile's partial sums will overwrite the partial sums of this tile.
            fence_async()
            cute.arch.sync_warp()
            shares = Uint32(consumer.lane < self.config.split_k)
            ptx.arrive_at_if(smem.partial_sums.empty, consumer.lane, shares, releases="shared")
