"""Choose experts for tokens, give pairs of a token and an expert their rows, and load what belongs to a token.

Scores become keys: 32-bit integers in the same order. Each lane holds the keys of up to 16 consecutive experts, so that
a group of experts is a whole number of lanes. (Where the number of groups is not a power of two a lane has up to 30,
and keys are spilled to local memory, up to 2 KB for each thread.) ``topk`` times the warp picks the largest key, and
among equal ones the first, by two warp-wide reductions.

Give each pair of a token and an expert a row in the order of the experts.

The row of a pair is the first row of its expert plus its *rank*, the number of pairs before it with the same expert. A
CTA has a run of slots (tokens, or single pairs), which it processes a chunk at a time: each pair sets a bit in a bitmap
(experts by slots) in shared memory, and a rank is a population count. So no result depends on the order of events.

- Few slots: one CTA does everything, in one launch.
- More: each CTA of a first kernel has a run. It stores the rank of each pair within the run in ``expanded``, and the
  number of pairs of each expert in a workspace. Each CTA of a second kernel has the same run. It adds up the counts of
  all runs before it, and of all runs, and gives each pair its row.

Each expert's rows begin at the running sum of the experts' counts, each rounded up; or, masked, at equal distances. The
CTAs divide the rows without a pair among themselves and set them to -1.
"""

import itertools
import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.experts.layouts import (
    ROWS_PER_CTA,
    SINGLE_CTA_ROWS,
    THREADS,
    WARP,
    ExpertChoice,
    ExpertPlacement,
)
from torch_cute_ops.kernels.common.experts.tiles import running_sum_of_cta
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

NAN_KEY = 1
"""Key of NaN, below that of any number; 0 is for no expert, and for experts of groups that were not chosen."""
TINY = 1e-20
"""Added to a sum of sigmoids, which may be 0, before dividing by it; as in DeepSeek-V3's reference."""


class ExpertChooser:
    """The device code of one ``ExpertChoice``."""

    def __init__(self, choice: ExpertChoice):
        self.choice = choice

    @cute.jit
    def choose(self, token, logits, bias, factor, lane):
        """The ``lane``-th best expert of a token and its weight times ``factor``; expert 0 for lanes from ``topk`` on.

        All lanes of a warp come here with the same token.
        """
        c = self.choice
        experts, keys = [], []
        is_nan = Boolean(False)
        for i in range_constexpr(c.lane_experts):
            expert, exists = self._expert_in_lane(lane, i)
            value = Float32(logits[token, ptx.select(exists, expert, Int32(0))])
            score = value
            if const_expr(c.is_sigmoid):
                score = _sigmoid(value)
            if const_expr(c.has_bias):
                score = score + bias[ptx.select(exists, expert, Int32(0))]
            keys.append(ptx.select(exists, _key_of(score), Uint32(0)))
            experts.append(expert)
            is_nan = is_nan | (exists & (value != value))
        if const_expr(c.num_groups > 1):
            keys = self._keep_best_groups(keys, lane)
        largest = Float32(0.0)
        total = Float32(0.0)
        own = Int32(0)
        for j in range_constexpr(c.topk):
            best = keys[0]
            for key in keys[1:]:
                best = _larger(best, key)
            best = cute.arch.warp_redux_sync(best, "max")
            if const_expr(j == 0 and not c.is_sigmoid):
                largest = _value_of(best)
                if const_expr(not c.renormalize):
                    for key in keys:
                        # Zero for the keys of no expert.
                        total = total + _exp(_value_of(key) - largest)
            first = Int32(c.experts)
            for expert, key in zip(reversed(experts), reversed(keys), strict=True):
                first = ptx.select(key == best, expert, first)
            first = cute.arch.warp_redux_sync(first, "min")
            keys = [ptx.select(e == first, Uint32(0), key) for e, key in zip(experts, keys, strict=True)]
            own = ptx.select(lane == j, first, own)
        # Lane j has the j-th expert.
        value = Float32(logits[token, own])
        weight = _sigmoid(value) if c.is_sigmoid else _exp(value - largest)
        weight = ptx.select(lane < c.topk, weight, Float32(0.0))
        if const_expr(c.renormalize):
            total = weight
        if const_expr(c.renormalize or not c.is_sigmoid):
            total = cute.arch.warp_reduction(total, lambda a, b: a + b)
            weight = ptx.div_rn(weight, total + Float32(TINY) if c.is_sigmoid else total)
        if const_expr(not c.is_sigmoid):
            # As in any softmax, one NaN makes all weights NaN.
            weight = ptx.select(cute.arch.vote_any_sync(is_nan), Float32(math.nan), weight)
        return own, ptx.mul_rn(weight, factor)

    def _expert_in_lane(self, lane, i: int):
        """The lane's i-th expert, and whether there is one."""
        c = self.choice
        group, in_group = lane // c.group_lanes, lane % c.group_lanes * c.lane_experts + i
        return group * c.group_size + in_group, (group < c.num_groups) & (in_group < c.group_size)

    def _keep_best_groups(self, keys: list, lane) -> list:
        """The keys, 0 except in the groups with the largest sums of their two best scores."""
        c = self.choice
        best, second = keys[0], Uint32(0)
        for key in keys[1:]:
            second = _larger(second, _smaller(best, key))
            best = _larger(best, key)
        step = 1
        while step < c.group_lanes:
            others = [cute.arch.shuffle_sync_bfly(key, step) for key in (best, second)]
            second = _larger(_smaller(best, others[0]), _larger(second, others[1]))
            best = _larger(best, others[0])
            step *= 2
        score = _value_of(best)
        if c.group_size > 1:
            score = score + _value_of(second)
        group = lane // c.group_lanes
        own = _key_of(score)
        better = Int32(0)
        for other in range(c.num_groups):
            key = cute.arch.shuffle_sync(own, other * c.group_lanes)
            better = better + Int32((key > own) | ((key == own) & (group > other)))
        return [ptx.select(better < c.topk_groups, key, Uint32(0)) for key in keys]


def _key_of(value: Float32) -> Uint32:
    """An integer that is ordered like the number; both zeros have the same, and NaN has ``NAN_KEY``."""
    bits = ptx.bits_of(ptx.select(value == Float32(0.0), Float32(0.0), value))
    negative = bits >> 31 != Uint32(0)
    key = ptx.select(negative, ~bits, bits | Uint32(0x80000000))
    return ptx.select(value != value, Uint32(NAN_KEY), key)


def _value_of(key: Uint32) -> Float32:
    """The number of a key; minus infinity for NaN, and for no expert."""
    bits = ptx.select(key >> 31 != Uint32(0), key & Uint32(0x7FFFFFFF), ~key)
    return ptx.select(key > Uint32(NAN_KEY), ptx.float_of(bits), Float32(-math.inf))


def _larger(a: Uint32, b: Uint32) -> Uint32:
    # ``cutlass.max`` may compare them as signed (DSL 4.8.1).
    return ptx.select(a > b, a, b)


def _smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx.select(a > b, b, a)


def _exp(value: Float32) -> Float32:
    """``exp(value)``, accurate to some ulps, or for large values to about |value| ulps."""
    return ptx.ex2_approx(ptx.mul_rn(value, Float32(math.log2(math.e))))


def _sigmoid(value: Float32) -> Float32:
    """``1 / (1 + exp(-value))``."""
    return ptx.div_rn(Float32(1.0), _exp(-value) + Float32(1.0))


# Rows of pairs


class Thread(NamedTuple):
    """A thread's place in the grid, and the run of slots of its CTA, from ``first`` up to ``last``."""

    tid: Int32
    lane: Int32
    warp: Int32
    cta: Int32
    ctas: Int32
    first: Int32
    last: Int32


class Smem(NamedTuple):
    """Tensors in shared memory; see ``SmemOffsets``."""

    bits: cute.Tensor
    chosen: cute.Tensor
    before: cute.Tensor
    begins: cute.Tensor
    sizes: cute.Tensor
    partial_sums: cute.Tensor
    warps: cute.Tensor


class RowOutputs(NamedTuple):
    """The outputs ``permuted_to_expanded``, ``offsets`` and ``counts`` in global memory."""

    permuted: cute.Tensor
    offsets: cute.Tensor
    counts: cute.Tensor


class ExpertPlacer:
    """Base of the kernels that give pairs their rows; a subclass provides the expert of each pair.

    In all methods ``thread`` is a ``Thread`` and ``smem`` the ``Smem`` memory.

    Attributes:
        may_lack_experts: whether a pair may have no expert, and so no row, which is -1.
    """

    may_lack_experts = False

    def __init__(self, placement: ExpertPlacement, pdl: bool):
        self.placement, self.pdl = placement, pdl

    def order_arguments(self, pairs: TensorArg) -> dict[str, TensorArg | ScalarArg]:
        """The arguments that describe the order, of kernels for tokens and experts as in ``pairs``, (M, topk) int32."""

        def integers(count: Dim | int) -> TensorArg:
            return TensorArg("Int32", (count,), (1,), align=4)

        return {
            "expanded_to_permuted": pairs,
            "permuted_to_expanded": integers(Dim("rows")),
            "offsets": integers(self.placement.experts + 1),
            "counts": integers(self.placement.experts),
            "workspace": integers(Dim("workspace_words")),
            "unit": ScalarArg("Int32"),
            "sms": ScalarArg("Int32"),
        }

    def take_batch(self, batch, inputs, thread: Thread, smem: Smem):
        """Set the bits of the slots from ``batch`` on and, after a barrier, rank the thread's pair of the chunk.

        All threads of the CTA come here. ``inputs`` are what the subclass passed to ``launch``.

        Returns:
            The pair's expert, negative for none, and its rank in the run; arbitrary if the thread has no pair.
        """
        raise NotImplementedError

    def expert_of(self, pair, inputs) -> Int32:
        """The expert of a pair, read from global memory by the second kernel; negative for none."""
        raise NotImplementedError

    # The launches

    @cute.jit
    def launch(self, slots, inputs, expanded, rows: RowOutputs, workspace, row_multiple, sms, written, read, stream):
        """Launch one kernel, or two.

        Args:
            slots: number of slots.
            inputs: what the kernels pass on to ``take_batch`` and ``expert_of``.
            expanded: (M, topk) int32, the row of each pair.
            rows: the other outputs.
            workspace: ``ExpertPlacement.workspace_words`` int32; unused where that is 0.
            row_multiple: rows of each expert if masked; otherwise what each expert's first row is a multiple of.
            sms: multiprocessors of the device.
            written, read: all tensors of the call except the workspace, for ``ctas_unless_overlapping``.
            stream: the stream.
        """
        placement = self.placement
        # As in ``ExpertPlacement.workspace_words``
        wanted = cutlass.max(
            cute.ceil_div(slots, placement.slots_per_cta), cute.ceil_div(rows.permuted.shape[0], ROWS_PER_CTA)
        )
        ctas = cutlass.max(cutlass.min(sms, wanted), 1)
        if (slots <= placement.single_cta_slots) & (rows.permuted.shape[0] <= SINGLE_CTA_ROWS):
            one_cta = ctas_unless_overlapping(1, written, read)
            self.place_in_single_cta(slots, inputs, expanded, rows, row_multiple).launch(
                grid=[one_cta, 1, 1],
                block=[THREADS, 1, 1],
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=self.pdl,
            )
        else:
            ctas = ctas_unless_overlapping(ctas, (*written, workspace), read)
            self.rank_pairs(slots, inputs, expanded, workspace).launch(
                grid=[ctas, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=self.pdl
            )
            self.place_pairs(slots, inputs, expanded, rows, workspace, row_multiple).launch(
                grid=[ctas, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=self.pdl
            )

    @cute.kernel
    def place_in_single_cta(self, slots: Int32, inputs, expanded, rows, row_multiple: Int32):
        """Everything, by one CTA, for a single chunk."""
        thread, smem = self._begin(slots), self._allocate()
        self._clear(thread, smem)
        expert, rank = self.take_batch(thread.first, inputs, thread, smem)
        self._divide_rows(self._count(thread, smem), rows, row_multiple, thread, smem)
        if thread.tid < (thread.last - thread.first) * self.placement.slot_pairs:
            self._store_row(thread.tid, expert, rank, expanded, rows, row_multiple, smem)
        self._fill_padding(rows, thread, smem)

    @cute.kernel
    def rank_pairs(self, slots: Int32, inputs, expanded, workspace):
        """Store the rank of each pair in its run, and each expert's count in the run."""
        placement = self.placement
        thread, smem = self._begin(slots), self._allocate()
        ranks = self.flat(expanded)
        self._clear(thread, smem)
        for batch in range(thread.first, thread.last, placement.batch):
            _, rank = self.take_batch(batch, inputs, thread, smem)
            if self.has_pair(batch, thread):
                ranks[batch * placement.slot_pairs + thread.tid] = rank
            cute.arch.sync_threads()
            self._add_batch(thread, smem)
        if thread.tid < placement.experts:
            workspace[thread.cta * placement.experts + thread.tid] = smem.before[thread.tid]

    @cute.kernel
    def place_pairs(self, slots: Int32, inputs, expanded, rows, workspace, row_multiple: Int32):
        """Store the row of each pair of a run."""
        placement = self.placement
        thread, smem = self._begin(slots), self._allocate()
        expert, part = (
            thread.tid % (THREADS // placement.threads_per_expert),
            thread.tid // (THREADS // placement.threads_per_expert),
        )
        before, total = Int32(0), Int32(0)
        if expert < placement.experts:
            for cta in range(part, thread.ctas, placement.threads_per_expert, unroll=8):
                count = workspace[cta * placement.experts + expert]
                total = total + count
                before = before + ptx.select(cta < thread.cta, count, Int32(0))
        total = self._sum_counts(before, total, thread, smem)
        self._divide_rows(total, rows, row_multiple, thread, smem)
        ranks = self.flat(expanded)
        for pair in range(
            thread.first * placement.slot_pairs + thread.tid, thread.last * placement.slot_pairs, THREADS
        ):
            self._store_row(pair, self.expert_of(pair, inputs), ranks[pair], expanded, rows, row_multiple, smem)
        self._fill_padding(rows, thread, smem)

    # What subclasses use

    def flat(self, pairs: cute.Tensor) -> cute.Tensor:
        """A contiguous (M, topk) tensor as one dimension of pairs."""
        return cute.make_tensor(pairs.iterator, cute.make_layout((pairs.shape[0] * pairs.shape[1],)))

    def has_pair(self, batch, thread: Thread):
        """Whether the thread has a pair of the chunk."""
        placement = self.placement
        return thread.tid < cutlass.min(thread.last - batch, placement.batch) * placement.slot_pairs

    def mark(self, expert, slot, smem: Smem) -> None:
        """Set the bit of an expert for a slot of the chunk."""
        at = smem.bits.iterator + (expert * self.placement.words + slot // 32)
        cute.arch.atomic_or(at, Uint32(1) << Uint32(slot % 32), scope="cta")

    def rank_of(self, expert, slot, smem: Smem) -> Int32:
        """How many pairs of the run, before this slot of the chunk, have this expert."""
        rank = smem.before[expert]
        for i in range(self.placement.words):
            # All bits of the words before the slot's own word, and the bits below the slot in that.
            below = cutlass.min(cutlass.max(slot - 32 * i, 0), 32)
            mask = ptx.select(below < 32, (Uint32(1) << Uint32(below % 32)) - 1, Uint32(0xFFFFFFFF))
            rank = rank + Int32(cute.arch.popc(smem.bits[expert * self.placement.words + i] & mask))
        return rank

    # Steps

    @cute.jit
    def _begin(self, slots):
        """The thread's place and its CTA's run; waits for the kernels before this one."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        slots_per_cta = cute.ceil_div(slots, ctas)
        pdl_start(self.pdl)
        first = cutlass.min(cta * slots_per_cta, slots)
        last = cutlass.min(first + slots_per_cta, slots)
        return Thread(tid, tid % WARP, cute.arch.make_warp_uniform(tid // WARP), cta, ctas, first, last)

    def _allocate(self) -> Smem:
        base = SmemAllocator().allocate(self.placement.smem_bytes, 128)
        at = self.placement.smem_offsets._asdict()
        tensors = {}
        for name, after in itertools.pairwise(at):
            dtype = Uint32 if name == "bits" else Int32
            words = cute.recast_ptr(base + 4 * at[name], dtype=dtype)
            tensors[name] = cute.make_tensor(words, cute.make_layout(at[after] - at[name]))
        return Smem(**tensors)

    @cute.jit
    def _clear(self, thread, smem):
        """Clear the bits, and the counts of what came before."""
        before, bits = smem.before, smem.bits
        words = self.placement.words
        if thread.tid < self.placement.experts:
            before[thread.tid] = Int32(0)
            for i in range_constexpr(words):
                bits[thread.tid * words + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _count(self, thread, smem):
        """How many pairs of the chunk have the expert that this thread counts."""
        count = Int32(0)
        words = self.placement.words
        if thread.tid < self.placement.experts:
            for i in range_constexpr(words):
                count = count + Int32(cute.arch.popc(smem.bits[thread.tid * words + i]))
        return count

    @cute.jit
    def _add_batch(self, thread, smem):
        """Add the chunk's counts to what came before, and clear the bits for the next chunk."""
        count = self._count(thread, smem)
        before, bits = smem.before, smem.bits
        words = self.placement.words
        if thread.tid < self.placement.experts:
            before[thread.tid] = before[thread.tid] + count
            for i in range_constexpr(words):
                bits[thread.tid * words + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _sum_counts(self, before, total, thread, smem):
        """Add up the parts of each expert's count: of all runs, and, in shared memory, of those before."""
        placement = self.placement
        partial_sums, befores = smem.partial_sums, smem.before
        partial_sums[thread.tid] = before
        partial_sums[THREADS + thread.tid] = total
        cute.arch.sync_threads()
        total = Int32(0)
        if thread.tid < placement.experts:
            before = Int32(0)
            for i in range_constexpr(placement.threads_per_expert):
                before = before + partial_sums[thread.tid + i * (THREADS // placement.threads_per_expert)]
                total = total + partial_sums[THREADS + thread.tid + i * (THREADS // placement.threads_per_expert)]
            befores[thread.tid] = before
        return total

    @cute.jit
    def _divide_rows(self, total, rows, row_multiple, thread, smem):
        """Divide the buffer among the experts; thread e knows the number of pairs of expert e, ``total``."""
        placement = self.placement
        offsets, counts = rows.offsets, rows.counts
        size, space = total, row_multiple
        if const_expr(placement.is_masked):
            size = cutlass.min(total, row_multiple)
        else:
            space = cute.ceil_div(total, row_multiple) * row_multiple
        space = ptx.select(thread.tid < placement.experts, space, Int32(0))
        end = running_sum_of_cta(space, smem.warps, thread.tid, -(-placement.experts // WARP))
        begins, sizes = smem.begins, smem.sizes
        if thread.tid < placement.experts:
            begins[thread.tid] = end - space
            sizes[thread.tid] = size
            if thread.tid == placement.experts - 1:
                begins[placement.experts] = end
            if thread.cta == 0:
                offsets[thread.tid] = end - space
                counts[thread.tid] = size
                if thread.tid == placement.experts - 1:
                    offsets[placement.experts] = end
        cute.arch.sync_threads()

    @cute.jit
    def _store_row(self, pair, expert, rank, expanded, rows, row_multiple, smem):
        """Store the row of a pair, -1 if it has no expert or there is no room, and the pair of the row."""
        permuted = rows.permuted
        known = expert
        if const_expr(self.may_lack_experts):
            known = cutlass.max(expert, 0)
        rank = rank + smem.before[known]
        row = smem.begins[known] + rank
        if const_expr(self.placement.is_masked):
            row = ptx.select(rank < row_multiple, row, Int32(-1))
        if const_expr(self.may_lack_experts):
            row = ptx.select(expert >= 0, row, Int32(-1))
        places = self.flat(expanded)
        places[pair] = row
        if row >= 0:
            permuted[row] = pair

    @cute.jit
    def _fill_padding(self, rows, thread, smem):
        """Store -1 for rows without a pair: behind each expert's pairs, a warp for each expert; and at the end."""
        experts, permuted = self.placement.experts, rows.permuted
        warps = THREADS // WARP
        for expert in range(thread.cta * warps + thread.warp, experts, thread.ctas * warps):
            for row in range(smem.begins[expert] + smem.sizes[expert] + thread.lane, smem.begins[expert + 1], WARP):
                permuted[row] = Int32(-1)
        for row in range(
            smem.begins[experts] + thread.cta * THREADS + thread.tid, permuted.shape[0], thread.ctas * THREADS
        ):
            permuted[row] = Int32(-1)


# Words of a token


class TokenKernel:
    """A kernel of one ``Config``, for tokens of ``config.dtype``."""

    def __init__(self, config: Any):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]


def _words_at_once(topk: int) -> int:
    return 4 if topk % 4 == 0 else 1


def alignment(topk: int) -> int:
    """The alignment in bytes that the tensor needs."""
    return 4 * _words_at_once(topk)


def words_of_token(tensor: cute.Tensor, token, topk: int, exists=True) -> list:
    """The ``topk`` words of a token; zeros unless it ``exists``."""
    count = _words_at_once(topk)
    start = tensor.iterator + cute.assume(Int64(token) * topk, divby=count)
    return [word for j in range(0, topk, count) for word in ptx.load_if(start, exists, count, 4 * j)]
