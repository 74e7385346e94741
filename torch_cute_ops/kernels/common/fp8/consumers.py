"""Consumer warpgroups of the FP8 wgmma kernels: MMAs, mainloop, promotion and results.

``Consumers.run`` loops over the CTA's output tiles. For each tile, it calls its *mainloop*. The mainloop starts MMAs
(``SmemMma`` or a kernel's own class), promotes their results to accumulators in fp32, and releases stages. Then
``Results`` stores the accumulators. Under split-K, it first adds up the partial sums of all CTAs of the cluster.

A *promotion* adds ``partial``, the result of a k tile's MMAs, to the accumulators ``acc``. It is an object with four
methods:

- ``factors``: load the factors of a lane's elements, while the MMAs run;
- ``flags``: load flags of the stage, while the MMAs run;
- ``prepare``: if the flags ask for it, change the units of ``acc`` and ``partial``, before the stage is released;
- ``promote``: compute ``acc += partial * factors``.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps, Finish, TileEpilogue
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

K_STEP = 32  # K of an MMA, in elements


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        tid: index of the thread among all consumer threads of the tile.
        lane, quad: index of the thread in its warp, and index among the four lanes that share a row.
        first: first of the 16 rows of the M side that this warp computes.
        row: first of the thread's two rows of the M side. The second is ``row ^ 1`` if ``FP8GemmConfig.pairs_rows``,
            otherwise ``row + 8``.
        token: in a swapped tile, first row of ``a`` that this warpgroup computes.
        stores: shared memory in which the warp assembles lines of the result before it stores them.
    """

    tid: Int32
    lane: Int32
    quad: Int32
    first: Int32
    row: Int32
    token: Int32
    stores: cute.Pointer


class Pending(NamedTuple):
    """An output tile whose accumulators are not stored yet: first row, number of rows, first column, and expert."""

    row: Int32
    rows: Int32
    column: Int32
    expert: Int32


# MMAs


def tiled_mma(mma_n: int, m_source: Any) -> cute.TiledMma:
    """Return the tiled MMA for one K step of a consumer.

    Create a new tiled MMA in each scope that sets ACCUMULATE, because the DSL tracks this field per scope.
    """
    shape = WGMMA_M, mma_n, K_STEP
    sources = m_source, OperandMajorMode.K, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))


class SmemMma:
    """MMAs of a k tile with both operands in shared memory.

    Args:
        config: configuration of the kernel.
        is_decoded: True if the weight operand is a decoded weight in ``Smem.workspace``, False if it is the weight that
            was copied to the stages.
    """

    parts = 1  # number of accumulators per element of the result, for one k tile

    def __init__(self, config: FP8GemmConfig, is_decoded: bool = False):
        self.config, self.is_decoded = config, is_decoded

    def begin(self, group, smem: Smem) -> Callable:
        """Return a function that starts this consumer warpgroup's MMAs on a stage. ``group`` is the index of the
        warpgroup."""
        c = self.config
        source = warpgroup.OperandSource.SMEM
        weight = smem.workspace if self.is_decoded else smem.b
        m_base, n_base = (weight, smem.a) if c.is_swapped else (smem.a, weight)
        # If ``m_parts`` is 1, the two consumers multiply different rows of the M side. Otherwise both consumers
        # multiply the same rows of the M side, each by its own part of the N side.
        parts = c.m_parts
        m_side = k_tiles(m_base, WGMMA_M, c.stages * GROUPS // parts)
        n_side = k_tiles(n_base, c.mma_n, c.stages * parts)
        mma = tiled_mma(c.mma_n, source)
        thread = mma.get_slice(0)
        m_operand = mma.make_fragment_A(thread.partition_A(m_side))
        n_operand = mma.make_fragment_B(thread.partition_B(n_side))

        def multiply(stage, partial, adds: bool = False) -> None:
            """Start the MMAs on a stage. They add to ``partial`` if ``adds``, otherwise they overwrite it."""
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


# MMAs with the weight in registers, and several k tiles per stage


def token_operand(config: FP8GemmConfig, smem: Smem) -> cute.Tensor:
    """Return the activations of all slots (k tiles in the pipeline) as the B operand of MMAs whose A operand is in
    registers."""
    mma = tiled_mma(config.mma_n, warpgroup.OperandSource.RMEM)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(k_tiles(smem.a, config.tile_m, config.slots)))


def register_operand(words, steps: int) -> cute.Tensor:
    """Return a lane's words of e4m3 numbers, four words per K step, as the A operand of MMAs."""
    layout = cute.make_layout(((4, 2, 2), 1, steps), stride=((1, 4, 8), 0, 16))
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float8E4M3FN), layout)


class RegisterMma:
    """MMAs of a k tile. The A operand is a decoded weight, in registers."""

    def __init__(self, config: FP8GemmConfig):
        self.config = config

    def begin(self, smem: Smem) -> Callable:
        """Return a function that starts a consumer's MMAs of a k tile."""
        c = self.config
        operand = token_operand(c, smem)

        def multiply(slot, words, partial, adds: bool = False) -> None:
            """Start the MMAs of the k tile in ``slot``. They add to ``partial`` if ``adds``, otherwise they overwrite
            it."""
            weight = register_operand(words, K_TILE // K_STEP)
            mma = tiled_mma(c.mma_n, warpgroup.OperandSource.RMEM)
            acc = cute.make_tensor(partial.iterator, mma.partition_shape_C((WGMMA_M, c.mma_n)))
            warpgroup.fence()
            for step in range(K_TILE // K_STEP):
                mma.set(warpgroup.Field.ACCUMULATE, adds or step > 0)
                cute.gemm(mma, acc, weight[None, None, step], operand[None, None, step, slot], acc)
            warpgroup.commit_group()

        return multiply


# Promotion


def pair(values: cute.Tensor, group: int, consumer: Consumer) -> list:
    """Load the values of the lane's two columns in the ``group``-th group of eight columns."""
    at = values.iterator + cute.assume(8 * group + consumer.quad * 2, divby=2)
    words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
    return [ptx.float_of(word) for word in words]


def swapped_token_scales(mma_n: int, values: cute.Tensor, consumer: Consumer) -> list:
    """Load the scales of the lane's rows of ``a`` in a swapped tile, where rows of ``a`` are columns of the
    accumulators."""
    own = cute.make_tensor(values.iterator + cute.assume(consumer.token, divby=2), values.layout)
    return [one for group in range(mma_n // 8) for one in pair(own, group, consumer)]


def token_factors(config: FP8GemmConfig, stages: Stages, stage, consumer: Consumer, smem: Smem) -> list:
    """Load, from a stage, the scales of this lane's rows: the rows of ``a`` whose results the lane holds."""
    scales = stages.scales(stage, smem)
    if config.is_swapped:
        return swapped_token_scales(config.mma_n, scales, consumer)
    return [scales[consumer.row], scales[consumer.row + 8]]


def promote(config: FP8GemmConfig, acc: cute.Tensor, partial: cute.Tensor, factors: list) -> None:
    """Multiply the result of a k tile's MMAs by the factors, and add it to the accumulators."""
    for i in range(config.mma_n // 2):
        which = i // 4 * 2 + i % 2 if config.is_swapped else i // 2 % 2
        acc[i] = ptx.fma_rn(factors[which], partial[i], acc[i])


class TokenScaled:
    """Promotion that multiplies only by the scales of ``a``. The epilogue applies the weight's scales."""

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


class RowScaled(TokenScaled):
    """Promotion that multiplies the results of a k tile by the weight rows' scales, and then by the scales of ``a``. In
    a stage, the scales of the weight rows follow the scales of the rows of ``a``.

    The results are multiplied by the weight rows' scales before the stage is released, because too few registers are
    left to hold the scales of all columns.
    """

    def prepare(self, acc, partial, flags, stage, consumer, smem) -> None:
        c, scales = self.config, self.stages.scales(stage, smem)
        own = cute.make_tensor(scales.iterator + c.tile_m, cute.make_layout(c.tile_n))
        if c.is_swapped:
            of_rows = [own[consumer.row], own[consumer.row + 8]]
            factors = [of_rows[i // 2 % 2] for i in range(c.mma_n // 2)]
        else:
            of_columns = [pair(own, group, consumer) for group in range(c.mma_n // 8)]
            factors = [of_columns[i // 4][i % 2] for i in range(c.mma_n // 2)]
        for i, factor in enumerate(factors):
            partial[i] = ptx.mul_rn(partial[i], factor)


# The mainloop


class MainLoop:
    """Mainloop: multiplies the k tiles of an output tile, and promotes their results.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        promotion: object with the methods of a promotion (see the module docstring).
        results: object that stores the previous tile while the first MMAs of this tile run.
        general: promotion for the k tiles before and after whole rounds through the stages, and for all k tiles of
            output tiles for which ``is_plain`` is False; None to use ``promotion`` there too.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, promotion: Any, results: Any, general: Any = None):
        self.config, self.stages, self.promotion, self.results = config, stages, promotion, results
        self.general = general or promotion

    @cute.jit
    def run(self, multiply, acc, partials: list, pending, stage, parity, consumer, work, smem, is_plain=True):
        """Multiply this CTA's k tiles of an output tile, stage by stage. The caller has waited for the first stage.

        If rows of ``a`` are on the M side, ``acc`` still holds the results of the previous output tile, whose position
        is ``pending``. In this case, store that tile, but only after the first MMAs have started. ``is_plain`` is False
        if ``general`` must promote all k tiles of the tile. Return the next stage and its parity.
        """
        c = self.config
        count = work.end - work.begin
        if const_expr(c.is_swapped):
            acc.fill(0.0)
        else:
            if (count >= c.in_flight) & Boolean(is_plain):
                count = count - c.in_flight
                store = functools.partial(self.results.store_pending, acc, pending, consumer, work)
                stage, parity = self._add_together(multiply, acc, partials, count, stage, parity, consumer, smem, store)
            else:
                self.results.store_pending(acc, pending, consumer, work)
        if const_expr(c.unrolls):
            # First finish the round through the stages that the previous tile began. Then run whole rounds, then the
            # remainder. A loop that calls ``add`` twice makes the kernel shorter than two separate calls.
            begun = cutlass.min((c.stages - stage) % c.stages, count)
            begun = ptx.select(Boolean(is_plain), begun, count)
            follow = count - begun
            for _ in cutlass.range(2, unroll=1):
                stage, parity = self.add(multiply, acc, partials, begun, follow, stage, parity, consumer, smem)
                for rest in cutlass.range(follow - c.stages, -1, -c.stages, unroll=1):
                    for place in range_constexpr(0, c.stages, c.in_flight):
                        later = rest + (c.stages - c.in_flight - place)
                        _, parity = self._add_together(multiply, acc, partials, later, place, parity, consumer, smem)
                begun, follow = follow % c.stages, Int32(0)
            return stage, parity
        return self.add(multiply, acc, partials, count, 0, stage, parity, consumer, smem)

    @cute.jit
    def add(self, multiply, acc, partials: list, count, follow, stage, parity, consumer, smem):
        """Multiply ``count`` stages of a tile, after which ``follow`` stages of the tile remain, and promote the
        results by ``general``. Return the next stage and its parity."""
        in_flight = self.config.in_flight
        for rest in cutlass.range(count - in_flight, -1, -in_flight, unroll=1):
            stage, parity = self._add_together(
                multiply, acc, partials, rest + follow, stage, parity, consumer, smem, rule=self.general
            )
        for _ in cutlass.range(count % in_flight, unroll=1):
            stage, parity = self._add_together(
                multiply, acc, partials[:1], follow, stage, parity, consumer, smem, rule=self.general
            )
        return stage, parity

    def _add_together(
        self,
        multiply,
        acc,
        partials: list,
        follow,
        stage,
        parity,
        consumer,
        smem,
        meanwhile: Any = None,
        rule: Any = None,
    ) -> tuple:
        """Multiply one stage per entry of ``partials``, and promote each result by ``rule`` (default: the loop's
        ``promotion``) while the later stages' MMAs run. Return the next stage and its parity.

        The caller has waited for the first stage. After these stages, ``follow`` stages of the tile remain.
        ``meanwhile`` is called after all MMAs have started.

        While a consumer promotes its last k tile, the tensor cores run only the other consumer's MMAs. To shorten this
        time, a consumer loads factors, and waits for the next stage, before its last MMAs end.
        """
        rule, reads = rule or self.promotion, []
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
                wait_if(follow > 0, smem.stages.full + stage, parity, smem.stages.full_scope)
            warpgroup.wait_group(later)
            rule.prepare(acc, partial, flags, reads[i], consumer, smem)
            self.stages.release(reads[i], consumer.lane, smem)
            rule.promote(acc, partial, factors)
        return stage, parity


class TokenLoop:
    """Mainloop for per-token scales: multiplies the k tiles of an output tile. MMAs add up several k tiles in
    ``partial``.

    If the configuration ``promotes``, ``partial`` holds the sum of one pass of the loop, which is then added to the
    accumulators in fp32. Otherwise ``partial`` holds the sum over all of K. At the end of each pass, a consumer waits
    for its MMAs, while the other consumer's MMAs run: ptxas would serialise MMAs that are in flight from one pass to
    the next.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        results: object that stores the previous tile while the first MMAs of this tile run.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, results: Any):
        self.config, self.stages, self.results = config, stages, results

    @cute.jit
    def run(self, multiply, acc, partials: list, pending, stage, parity, consumer, work, smem):
        """Multiply this CTA's k tiles of an output tile, stage by stage. The caller has waited for the first stage.

        If rows of ``a`` are on the M side, ``acc`` still holds the results of the previous output tile, whose position
        is ``pending``. In this case, store that tile, but only after the first MMAs have started. Return the next stage
        and its parity.
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
        """Multiply ``count`` stages of a tile, after which ``follow`` stages remain. The caller has waited for the
        first stage.

        Args:
            begins: True if the first MMA must overwrite ``partial``, because it holds no sum yet.
            meanwhile: function that is called after all MMAs have started.

        Returns:
            Next stage and its parity.
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
                wait_if(follow > 0, smem.stages.full + stage, parity, smem.stages.full_scope)
            warpgroup.wait_group(count - 1 - i)
            self.stages.release(read, consumer.lane, smem)
        if promotes:
            for i in range(self.config.mma_n // 2):
                acc[i] = ptx.add_rn(acc[i], partial[i])
        return stage, parity


# The consumers


class Consumers:
    """Two consumer warpgroups. Each multiplies 64 rows of the M side by all rows, or half of the rows, of the N side.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        mma: object that starts the MMAs of a k tile.
        loop: mainloop.
        results: object that adds up partial sums over the cluster (under split-K), and stores a tile's accumulators.
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
        pending = Pending(Int32(0), Int32(0), Int32(0), Int32(0))  # zero rows: no tile is pending
        self.results.meet_cluster()
        for number in range(work.first, work.num_tiles, work.num_clusters):
            row, rows, column, expert = self.results.await_tile(number, stage, parity, lane, work, smem)
            exists = True if const_expr(c.is_swapped) else rows > group * WGMMA_M
            is_last = number + work.num_clusters >= work.num_tiles
            if exists:
                # In swapped tiles, load alpha, bias and scales before the MMAs, so that the MMAs hide the latency of
                # the loads.
                finish = self.results.finish(column, expert, consumer, work) if const_expr(c.is_swapped) else None
                scales = self.results.swapped_scales(row, rows, consumer, work) if const_expr(c.is_swapped) else None
                stage, parity = self.loop.run(multiply, acc, partials, pending, stage, parity, consumer, work, smem)
                if const_expr(not c.is_swapped):
                    if const_expr(c.split_k > 1):
                        # Two CTAs share the tile, and CTA i stores the rows of warpgroup i. So the other warpgroup of
                        # this CTA stores no rows.
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
                # No row of this warpgroup exists. Release the stages without multiplying them.
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
    """Epilogue that ``FP8GemmConfig`` describes: alpha, bias and rounding."""

    def __init__(self, config: FP8GemmConfig):
        self.config, self.ops = config, EpilogueOps(config.epilogue)

    def of_tile(self, expert, tile_column, work) -> TileEpilogue:
        """Return a function that loads alpha and bias for columns of a tile and applies the epilogue."""
        return self.ops.of_tile(work.alpha, work.bias, work.n, None if self.config.rows.is_plain else expert)


class UnitEpilogue:
    """Epilogue that multiplies by the product of alpha and the weight row's unit, adds the bias and rounds.

    Args:
        config: configuration of a GEMM with prepared scales of the weight.
        weight: ``PreparedWeight``, which loads the units.
    """

    def __init__(self, config: Any, weight: Any):
        self.is_plain, self.ops, self.weight = config.rows.is_plain, EpilogueOps(config.epilogue), weight

    def of_tile(self, expert, tile_column, work) -> TileEpilogue:
        """Return a function that loads alpha, bias and units for columns of a tile and applies the epilogue."""
        owner = None if self.is_plain else expert
        factor = self.ops.factor(work.alpha, owner)

        def of_columns(column, count: int, after: int = 0) -> Finish:
            terms = self.ops.terms(work.alpha, work.bias, column, count, work.n, owner, after)
            units = self.weight.units(work.b_scale, expert, column, count, work.n, after)
            return self.ops.unit_finisher(factor, terms, units)

        return of_columns


def load_token_scales(row, rows, places: list, work) -> list:
    """Load the per-token scales of some rows of a tile. Rows that do not exist get 0.

    Args:
        row, rows: first row of the tile, and number of rows that exist.
        places: indices in the tile of the rows whose scales are loaded.
        work: tensors of the call.
    """
    scale, words = work.a_scale, []
    for place in places:
        words += ptx.load_if(scale.iterator + Int64(row + place) * scale.stride[0], place < rows, 1)
    return [ptx.float_of(word) for word in words]


class Results:
    """Stores the accumulators of an output tile. Under split-K, it first adds up the partial sums of the cluster's
    CTAs.

    Args:
        config: configuration of the kernel.
        stages: pipeline.
        schedule: work schedule.
        epilogue: object whose method ``of_tile`` returns the epilogue of a tile.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, schedule: WorkSchedule, epilogue: Any):
        self.config, self.stages, self.schedule, self.epilogue = config, stages, schedule, epilogue
        self.has_token_scales = config.has_token_scales

    @cute.jit
    def await_tile(self, number, stage, parity, lane, work, smem):
        """Wait for the first stage of an output tile. Return the tile's first row, number of rows, first column and
        expert.

        Without split-K, this method reads these four values from the stage's record, because a search for the tile
        takes some 1,000 clocks. Under split-K, a CTA may multiply no k tile of the output tile. It then has no stage
        and no record, so it searches for the tile.
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
        """Under split-K, wait until all CTAs of the cluster have initialised their barriers, because the CTAs send each
        other partial sums."""
        if self.config.split_k > 1:
            cute.arch.cluster_wait()

    def finish(self, column, expert, consumer: Consumer, work):
        """Return the functions that apply the epilogue to a thread's accumulators of a swapped tile.

        The result consists of one function for each of the thread's two columns, or, with split-K, of a single function
        for all columns in ``thread_columns``.
        """
        c, epilogue = self.config, self.epilogue.of_tile(expert, column, work)
        if c.split_k > 1:
            return epilogue(*thread_columns(c.sum_tile, GROUPS * WARPGROUP, consumer.tid, column))
        return tuple(epilogue(column + consumer.row + 8 * r, 1) for r in range(2))

    def swapped_scales(self, row, rows, consumer: Consumer, work) -> list | None:
        """Load the per-token scales of this lane's rows of ``a`` in a swapped tile, or return None if scales are per
        block."""
        if not self.has_token_scales:
            return None
        first = consumer.token + consumer.quad * 2
        places = [first + 8 * i + e for i in range(self.config.mma_n // 8) for e in range(2)]
        return load_token_scales(row, rows, places, work)

    def scale_swapped(self, acc, scales: list | None) -> None:
        """Multiply a swapped tile's accumulators by the per-token scales of their rows of ``a``. Do nothing if
        ``scales`` is None."""
        if scales is not None:
            for i in range(self.config.mma_n // 2):
                acc[i] = ptx.mul_rn(acc[i], scales[i // 4 * 2 + i % 2])

    def store_pending(self, acc, pending: Pending, consumer: Consumer, work) -> None:
        """Store the accumulators of the pending tile, and set them to zero."""
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
            self.epilogue.of_tile(pending.expert, pending.column, work),
        )
        acc.fill(0.0)

    @cute.jit
    def add_up(self, acc, finish, row, rows, column, turn, is_last, consumer, work, smem):
        """Add up a swapped tile's partial sums over the CTAs of the cluster, in the order of K, apply the epilogue, and
        store the results.

        The CTAs send each other the partial sums of existing rows and columns. A CTA may end when it has received all
        partial sums of its last tile, because no other CTA accesses its shared memory after that.

        Args:
            turn: number of tiles that this CTA has computed before, modulo 2.
            is_last: True for the CTA's last tile.
        """
        c, threads = self.config, GROUPS * WARPGROUP
        # Wait until all CTAs have read the previous tile's partial sums. (For the first tile, the wait returns at
        # once.)
        ptx.wait(smem.partial_sums.empty, turn ^ 1, scope="cluster")
        tokens, columns = cutlass.min(rows, Int32(c.tile_m)), cutlass.min(work.n - column, Int32(c.tile_n))
        own = reduced_rows(c.sum_tile, c.split_k, work.rank, tokens)
        if consumer.tid == 0:
            # The barrier also counts bytes of other CTAs' partial sums that arrive before this call.
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
        """Add up the partial sums of an output tile that two CTAs compute, with ``a`` on the M side.

        CTA i adds up the accumulators of consumer warpgroup i of both CTAs, if the warpgroup's rows exist (``exists``).
        It sends its accumulators of the other warpgroup to the other CTA. All warps arrive at the empty barrier, even
        if they have read nothing. Otherwise a late warp might find the barrier two phases ahead, and wait for the next
        phase. ``add_up`` describes ``turn`` and ``is_last``.
        """
        c, tid = self.config, consumer.tid % WARPGROUP
        ptx.wait(smem.partial_sums.empty, turn ^ 1, scope="cluster")
        if group == work.rank:
            if tid == 0:
                # The barrier also counts bytes of the other CTA's accumulators that arrive before this call.
                size = ptx.select(exists, Int32(c.received_bytes), Int32(0))
                cute.arch.mbarrier_arrive_and_expect_tx(smem.partial_sums.full, size)
            # Wait even if the other CTA sends nothing: a wait by parity must see every phase of the barrier.
            ptx.wait(smem.partial_sums.full, turn, scope="cluster")
            if exists:
                add_accumulators(acc, smem.received, tid)
        elif exists:
            send_accumulators(acc, smem.received, smem.partial_sums.full, work.rank ^ 1, tid)
        self._tell_read(is_last, consumer, smem)

    def _leave(self, acc, consumer: Consumer, smem: Smem) -> None:
        """Store the partial sums of a consumer's rows of ``a`` in this CTA's own shared memory, before they are
        sent."""
        c = self.config
        of_part = replace(c.sum_tile, tile_m=c.mma_n)
        base = smem.stores + cute.assume(consumer.token * (4 * of_part.pitch), divby=16)
        step = (consumer.row ^ 1) - consumer.row if c.pairs_rows else 8
        store_partial_sums(of_part, acc, base, consumer.row, consumer.quad, step)

    @cute.jit
    def _tell_read(self, is_last, consumer, smem):
        """Signal to all CTAs of the cluster that this warp has read the received partial sums. Skip this after the last
        tile."""
        if not is_last:
            # Fence, because the next tile's partial sums arrive through the async proxy and overwrite the data just
            # read.
            fence_async()
            cute.arch.sync_warp()
            shares = Uint32(consumer.lane < self.config.split_k)
            ptx.arrive_at_if(smem.partial_sums.empty, consumer.lane, shares, releases="shared")
