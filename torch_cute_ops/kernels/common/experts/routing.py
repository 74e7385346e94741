"""Choice of the experts of tokens, assignment of pairs of a token and an expert to rows, and loads of a token's words.

``ExpertChooser``: a warp chooses the experts of one token. Scores are converted to keys: 32-bit integers in the same
order. Each lane holds the keys of up to 32 consecutive experts, so that a group of experts occupies whole lanes. If the
number of groups is not a power of two, a lane may need up to 60 keys. Then a separate pass scores the groups, and all
lanes hold the same number of keys. ``topk`` times, the warp finds the largest key by two warp-wide reductions; of equal
keys it takes the first. With more than 16 keys per lane, this loop is not unrolled.

``ExpertPlacer``: the row of a pair is the first row of its expert plus its *rank*, the number of earlier pairs with the
same expert. A CTA processes its slots (tokens, or single pairs) in batches. Each pair sets a bit of a bitmap (experts x
slots) in shared memory, and a rank is a population count. Therefore no result depends on the order in which threads
run.

- Few slots: one CTA does all the work, in one launch.
- Many slots: each CTA of a first kernel stores the ranks of its pairs in ``expanded``, and the number of its pairs per
    expert in a workspace. Each CTA of a second kernel takes the same slots, adds up the counts of all earlier CTAs and
    the counts of all CTAs, and gives each pair its row.

Each expert's rows begin at the running sum of the rounded-up counts of earlier experts, or in the masked layout at
equal distances. The CTAs divide the rows without a pair among themselves and set them to -1.
"""

import itertools
import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
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
from torch_cute_ops.kernels.common.experts.search import running_sum_of_cta
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

NAN_KEY = 1
"""Key of NaN, below the key of any number. Key 0 stands for no expert, and for experts of groups that were not chosen.
"""
LARGEST = torch.finfo(torch.float32).max
TINY = 1e-20
"""Term added to a sum of sigmoids, which may be 0, before the division; as in DeepSeek-V3's reference."""


class ExpertChooser:
    """Device code that chooses experts as an ``ExpertChoice`` describes."""

    def __init__(self, choice: ExpertChoice):
        self.choice = choice

    @cute.jit
    def choose(self, token, logits, bias, factor, lane):
        """Return the ``lane``-th best expert of a token, and its weight times ``factor``.

        All lanes of a warp call this method with the same token. Lanes from ``topk`` on get expert 0.
        """
        c = self.choice
        if const_expr(c.is_short_of_registers):
            lane = ptx.opaque(lane)
        largest = Float32(0.0)
        total = Float32(0.0)
        is_nan = Boolean(False)
        if const_expr(c.computes_softmax_first):
            largest, total = self._softmax_terms(token, logits, lane)
            is_nan = total != total
        is_candidate = Uint32(0)
        if const_expr(c.scores_groups_first):
            is_candidate = self._keys_of_best_groups(token, logits, bias, largest, total, lane)
        experts, keys = [], []
        for i in range_constexpr(c.lane_keys):
            expert, exists = self._expert_in_lane(lane, i)
            value = self._logit(logits, token, _select(exists, expert, Int32(0)))
            score = self._score(value, bias, _select(exists, expert, Int32(0)), largest, total)
            keys.append(_select(exists, _key_of(score), Uint32(0)))
            experts.append(expert)
            if const_expr(not c.is_finite and not c.computes_softmax_first):
                is_nan = is_nan | (exists & (value != value))
            if const_expr(c.scores_groups_first):
                keys[i] = ptx.select(is_candidate & Uint32(1 << i) != Uint32(0), keys[i], Uint32(0))
        if const_expr(c.num_groups > 1 and not c.scores_groups_first):
            keys = self._keep_best_groups(keys, lane)
        own = Int32(0)
        if const_expr(c.is_choice_looped):
            own, best = self._take_best_of_many(keys, lane)
            if const_expr(not c.is_sigmoid and not c.computes_softmax_first):
                largest = _value_of(best)
                if const_expr(not c.renormalize):
                    for key in keys:
                        total = total + _exp(_value_of(key) - largest)
        else:
            for j in range_constexpr(c.topk):
                best = keys[0]
                for key in keys[1:]:
                    best = _larger(best, key)
                best = cute.arch.warp_redux_sync(best, "max")
                if const_expr(j == 0 and not c.is_sigmoid and not c.computes_softmax_first):
                    largest = _value_of(best)
                    if const_expr(not c.renormalize):
                        for key in keys:
                            # Keys that stand for no expert add zero.
                            total = total + _exp(_value_of(key) - largest)
                first = Int32(c.experts)
                for expert, key in zip(reversed(experts), reversed(keys), strict=True):
                    first = ptx.select(key == best, expert, first)
                first = cute.arch.warp_redux_sync(first, "min")
                keys = [ptx.select(e == first, Uint32(0), key) for e, key in zip(experts, keys, strict=True)]
                own = ptx.select(lane == j, first, own)
        value = self._logit(logits, token, own)
        if const_expr(c.computes_softmax_first and c.renormalize):
            # Subtract the largest chosen logit: the largest of all logits may not be chosen, and relative to it all
            # chosen weights could round to zero.
            largest = _value_of(cute.arch.warp_redux_sync(ptx.select(lane < c.topk, _key_of(value), Uint32(0)), "max"))
        weight = _sigmoid(value) if c.is_sigmoid else _exp(value - largest)
        weight = ptx.select(lane < c.topk, weight, Float32(0.0))
        if const_expr(c.renormalize):
            total = weight
        if const_expr(c.renormalize or not (c.is_sigmoid or c.computes_softmax_first)):
            total = cute.arch.warp_reduction(total, lambda a, b: a + b)
        if const_expr(c.renormalize or not c.is_sigmoid):
            weight = ptx.div_rn(weight, total + Float32(TINY) if c.is_sigmoid else total)
        if const_expr(not c.is_sigmoid and not c.is_finite):
            weight = ptx.select(cute.arch.vote_any_sync(is_nan), Float32(math.nan), weight)
        return own, ptx.mul_rn(weight, factor)

    def _logit(self, logits, token, expert) -> Float32:
        """Return a logit in fp32."""
        value = Float32(logits[token, expert])
        if const_expr(self.choice.is_finite):
            # NaN is not greater than any number.
            value = ptx.select(value > Float32(-LARGEST), value, Float32(-LARGEST))
            value = ptx.select(value < Float32(LARGEST), value, Float32(LARGEST))
        return value

    def _score(self, value, bias, expert, largest, total) -> Float32:
        """Return the score by which an expert is chosen. For a softmax without bias, this is the logit, which has the
        same order as the softmax."""
        c = self.choice
        score = value
        if const_expr(c.is_sigmoid):
            score = _sigmoid(value)
        elif const_expr(c.has_bias):
            score = ptx.div_rn(_exp(value - largest), total)
        if const_expr(c.has_bias):
            score = score + bias[expert]
        return score

    def _expert_in_lane(self, lane, i):
        """Return the expert of the lane's i-th key, and whether it exists."""
        c = self.choice
        if c.are_keys_interleaved:
            expert = i * WARP + lane
            is_known = isinstance(i, int) and (i + 1) * WARP <= c.experts
            return expert, True if is_known else expert < c.experts
        return self._expert_in_group(lane, i)

    def _expert_in_group(self, lane, i):
        """Return the lane's i-th expert if lanes hold whole groups, and whether it exists."""
        c = self.choice
        group, in_group = lane // c.group_lanes, lane % c.group_lanes * c.lane_group_experts + i
        return group * c.group_size + in_group, (group < c.num_groups) & (in_group < c.group_size)

    @cute.jit
    def _softmax_terms(self, token, logits, lane):
        """Return the largest logit, and the sum over all experts of ``exp(logit - largest)``."""
        c = self.choice
        each = -(-c.experts // WARP)
        largest = Uint32(0)
        for i in range(each, unroll=4):
            expert = i * WARP + lane
            exists = expert < c.experts
            key = _key_of(self._logit(logits, token, ptx.select(exists, expert, Int32(0))))
            largest = _larger(largest, ptx.select(exists, key, Uint32(0)))
        value = _value_of(cute.arch.warp_redux_sync(largest, "max"))
        total = Float32(0.0)
        for i in range(each, unroll=4):
            expert = i * WARP + lane
            exists = expert < c.experts
            term = _exp(self._logit(logits, token, ptx.select(exists, expert, Int32(0))) - value)
            total = total + ptx.select(exists, term, Float32(0.0))
        return value, cute.arch.warp_reduction(total, lambda a, b: a + b)

    @cute.jit
    def _take_best_of_many(self, keys, lane):
        """Return the ``lane``-th best expert, and the largest key, if there are too many keys for unrolled comparisons.

        Keys are compared by their positions in the lane, so no register per expert is needed.
        """
        c = self.choice
        remaining = cute.make_rmem_tensor((c.lane_keys,), Uint32)
        for i in range_constexpr(c.lane_keys):
            remaining[i] = keys[i]
        own, largest = Int32(0), Uint32(0)
        for j in range(c.topk, unroll=1):
            best = remaining[0]
            for i in range_constexpr(1, c.lane_keys):
                best = _larger(best, remaining[i])
            best = cute.arch.warp_redux_sync(best, "max")
            largest = _larger(largest, best)
            at = Int32(c.lane_keys)
            for i in range_constexpr(c.lane_keys - 1, -1, -1):
                at = ptx.select(remaining[i] == best, Int32(i), at)
            expert, _ = self._expert_in_lane(lane, at)
            expert = ptx.select(at < c.lane_keys, expert, Int32(c.experts))
            first = cute.arch.warp_redux_sync(expert, "min")
            at = ptx.select(expert == first, at, Int32(c.lane_keys))
            for i in range_constexpr(c.lane_keys):
                remaining[i] = ptx.select(at == i, Uint32(0), remaining[i])
            own = ptx.select(lane == j, first, own)
        return own, largest

    @cute.jit
    def _keys_of_best_groups(self, token, logits, bias, largest, total, lane) -> Uint32:
        """Return a word whose bit i is set if the group of the lane's i-th key is among the best groups."""
        c = self.choice
        best, second = Uint32(0), Uint32(0)
        for i in range(c.lane_group_experts, unroll=1):
            expert, exists = self._expert_in_group(lane, i)
            expert = ptx.select(exists, expert, Int32(0))
            score = self._score(self._logit(logits, token, expert), bias, expert, largest, total)
            key = ptx.select(exists, _key_of(score), Uint32(0))
            second = _larger(second, _smaller(best, key))
            best = _larger(best, key)
        lanes = Uint32(cute.arch.vote_ballot_sync(self._is_best_group(best, second, lane)))
        found = Uint32(0)
        for i in range(c.lane_keys, unroll=1):
            group = cutlass.min(i * WARP + lane, c.experts - 1) // c.group_size
            found = found | ((lanes >> Uint32(group * c.group_lanes)) & Uint32(1)) << Uint32(i)
        return found

    def _keep_best_groups(self, keys: list, lane) -> list:
        """Return the keys, with 0 except in the best groups."""
        best, second = keys[0], Uint32(0)
        for key in keys[1:]:
            second = _larger(second, _smaller(best, key))
            best = _larger(best, key)
        is_best = self._is_best_group(best, second, lane)
        return [ptx.select(is_best, key, Uint32(0)) for key in keys]

    def _is_best_group(self, best, second, lane) -> Boolean:
        """Return True if the lane's group is among the best, from the two largest keys of the lane's experts."""
        c = self.choice
        step = 1
        while step < c.group_lanes:
            others = [cute.arch.shuffle_sync_bfly(key, step) for key in (best, second)]
            second = _larger(_smaller(best, others[0]), _larger(second, others[1]))
            best = _larger(best, others[0])
            step *= 2
        score = _value_of(best)
        if c.adds_two_best:
            score = score + _value_of(second)
        group = lane // c.group_lanes
        own = _key_of(score)
        better = Int32(0)
        for other in range(c.num_groups):
            key = cute.arch.shuffle_sync(own, other * c.group_lanes)
            better = better + Int32((key > own) | ((key == own) & (group > other)))
        return better < c.topk_groups


def _key_of(value: Float32) -> Uint32:
    """Return an unsigned key; keys compare as their numbers do. Both zeros have the same key; NaN has ``NAN_KEY``."""
    bits = ptx.bits_of(ptx.select(value == Float32(0.0), Float32(0.0), value))
    negative = bits >> 31 != Uint32(0)
    key = ptx.select(negative, ~bits, bits | Uint32(0x80000000))
    return ptx.select(value != value, Uint32(NAN_KEY), key)


def _value_of(key: Uint32) -> Float32:
    """Return the number that a key stands for: minus infinity for NaN and for a key of no expert."""
    bits = ptx.select(key >> 31 != Uint32(0), key & Uint32(0x7FFFFFFF), ~key)
    return ptx.select(key > Uint32(NAN_KEY), ptx.float_of(bits), Float32(-math.inf))


def _select(condition, a, b):
    """Return ``a`` or ``b``, by ``ptx.select`` unless the condition is a constant of the trace."""
    if isinstance(condition, bool):
        return a if condition else b
    return ptx.select(condition, a, b)


def _larger(a: Uint32, b: Uint32) -> Uint32:
    # ``cutlass.max`` may compare unsigned integers as signed (DSL 4.8.1).
    return ptx.select(a > b, a, b)


def _smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx.select(a > b, b, a)


def _exp(value: Float32) -> Float32:
    """Return ``exp(value)``, accurate to a few ulps; for large values, to about |value| ulps."""
    return ptx.ex2_approx(ptx.mul_rn(value, Float32(math.log2(math.e))))


def _sigmoid(value: Float32) -> Float32:
    """Return ``1 / (1 + exp(-value))``."""
    return ptx.div_rn(Float32(1.0), _exp(-value) + Float32(1.0))


# Rows of pairs


class Thread(NamedTuple):
    """Index of a thread and of its CTA, and the range of the CTA's slots: from ``first`` to before ``last``."""

    tid: Int32
    lane: Int32
    warp: Int32
    cta: Int32
    ctas: Int32
    first: Int32
    last: Int32


class Smem(NamedTuple):
    """Tensors in shared memory, as in ``SmemOffsets``."""

    bits: cute.Tensor
    chosen: cute.Tensor
    before: cute.Tensor
    begins: cute.Tensor
    sizes: cute.Tensor
    partial_sums: cute.Tensor
    warps: cute.Tensor


class RowOutputs(NamedTuple):
    """Outputs ``permuted_to_expanded``, ``offsets`` and ``counts`` in global memory."""

    permuted: cute.Tensor
    offsets: cute.Tensor
    counts: cute.Tensor


class ExpertPlacer:
    """Base of the kernels that give pairs their rows. A subclass provides the expert of each pair.

    In all methods ``thread`` is a ``Thread`` and ``smem`` an ``Smem``.

    Attributes:
        may_lack_experts: True if a pair may have no expert; its row is -1.
    """

    may_lack_experts = False

    def __init__(self, placement: ExpertPlacement, pdl: bool):
        self.placement, self.pdl = placement, pdl

    def order_arguments(self, pairs: TensorArg) -> dict[str, TensorArg | ScalarArg]:
        """Return the arguments that describe the order of rows. ``pairs`` is the argument for (M, topk) int32."""

        def integers(count: Dim | int) -> TensorArg:
            return TensorArg("Int32", (count,), (1,), align=4)

        return {
            "expanded_to_permuted": pairs,
            "permuted_to_expanded": integers(Dim("rows")),
            "offsets": integers(self.placement.experts + 1),
            "counts": integers(self.placement.experts),
            "workspace": integers(Dim("workspace_words")),
            "row_multiple": ScalarArg("Int32"),
            "sms": ScalarArg("Int32"),
        }

    def take_batch(self, batch, inputs, thread: Thread, smem: Smem):
        """Set the bits of the batch that begins at slot ``batch``, synchronise, and compute the rank of the thread's
        pair.

        All threads of the CTA call it. ``inputs`` are the values that the subclass passed to ``launch``.

        Returns:
            Expert of the pair, negative for none, and its rank in the CTA; arbitrary for a thread without a pair.
        """
        raise NotImplementedError

    def expert_of(self, pair, inputs) -> Int32:
        """Return the expert of a pair, read from global memory by the second kernel; negative for none."""
        raise NotImplementedError

    # Launches

    @cute.jit
    def launch(self, slots, inputs, expanded, rows: RowOutputs, workspace, row_multiple, sms, written, read, stream):
        """Launch one kernel for few slots, or two kernels.

        Args:
            slots: number of slots.
            inputs: values that the kernels pass on to ``take_batch`` and ``expert_of``.
            expanded: (M, topk) int32, row of each pair, written.
            rows: other outputs.
            workspace: ``ExpertPlacement.workspace_words`` int32; unused for 0 words.
            row_multiple: number of rows of each expert if masked; otherwise the multiple at which each expert's rows
                begin.
            sms: number of SMs of the device.
            written, read: all tensors of the call except the workspace, for ``ctas_unless_overlapping``.
            stream: CUDA stream.
        """
        placement = self.placement
        # The number of CTAs matches ``ExpertPlacement.workspace_words``.
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
        """Give all pairs of a single batch their rows, with one CTA."""
        thread, smem = self._begin(slots), self._allocate()
        self._clear(thread, smem)
        expert, rank = self.take_batch(thread.first, inputs, thread, smem)
        self._divide_rows(self._count(thread, smem), rows, row_multiple, thread, smem)
        if thread.tid < (thread.last - thread.first) * self.placement.slot_pairs:
            self._store_row(thread.tid, expert, rank, expanded, rows, row_multiple, smem)
        self._fill_padding(rows, thread, smem)

    @cute.kernel
    def rank_pairs(self, slots: Int32, inputs, expanded, workspace):
        """Store each pair's rank among the CTA's pairs, and the CTA's number of pairs per expert."""
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
        """Store the row of each pair of the CTA."""
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

    # Methods for subclasses

    def flat(self, pairs: cute.Tensor) -> cute.Tensor:
        """Return a contiguous (M, topk) tensor as one dimension of pairs."""
        return cute.make_tensor(pairs.iterator, cute.make_layout((pairs.shape[0] * pairs.shape[1],)))

    def has_pair(self, batch, thread: Thread):
        """Return True if the thread has a pair of the batch."""
        placement = self.placement
        return thread.tid < cutlass.min(thread.last - batch, placement.batch) * placement.slot_pairs

    def mark(self, expert, slot, smem: Smem) -> None:
        """Set the bit of an expert for a slot of the batch."""
        at = smem.bits.iterator + (expert * self.placement.words + slot // 32)
        cute.arch.atomic_or(at, Uint32(1) << Uint32(slot % 32), scope="cta")

    def rank_of(self, expert, slot, smem: Smem) -> Int32:
        """Return the number of pairs with this expert in the CTA's slots before this slot of the batch."""
        rank = smem.before[expert]
        for i in range(self.placement.words):
            # Count all bits of the words before the slot's word, and the bits below the slot in that word.
            below = cutlass.min(cutlass.max(slot - 32 * i, 0), 32)
            mask = ptx.select(below < 32, (Uint32(1) << Uint32(below % 32)) - 1, Uint32(0xFFFFFFFF))
            rank = rank + Int32(cute.arch.popc(smem.bits[expert * self.placement.words + i] & mask))
        return rank

    # Steps

    @cute.jit
    def _begin(self, slots):
        """Wait for the previous kernels, and return the thread's place and its CTA's slots."""
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
        """Clear the bits, and the counts of earlier batches."""
        before, bits = smem.before, smem.bits
        words = self.placement.words
        if thread.tid < self.placement.experts:
            before[thread.tid] = Int32(0)
            for i in range_constexpr(words):
                bits[thread.tid * words + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _count(self, thread, smem):
        """Return the number of pairs of the batch with the expert that this thread counts."""
        count = Int32(0)
        words = self.placement.words
        if thread.tid < self.placement.experts:
            for i in range_constexpr(words):
                count = count + Int32(cute.arch.popc(smem.bits[thread.tid * words + i]))
        return count

    @cute.jit
    def _add_batch(self, thread, smem):
        """Add the batch's counts to the earlier counts, and clear the bits for the next batch."""
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
        """Return the sum of each expert's counts over all CTAs; store the sum over earlier CTAs in ``smem.before``."""
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
        """Divide the buffer among the experts. Thread e passes ``total``, the number of pairs of expert e."""
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
        """Store a pair's row, and the row's pair. If the pair has no expert or the expert has no free row, store -1 as
        the pair's row."""
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
        """Store -1 for rows without a pair: after the pairs of each expert (one warp per expert), and at the end of the
        buffer."""
        experts, permuted = self.placement.experts, rows.permuted
        warps = THREADS // WARP
        for expert in range(thread.cta * warps + thread.warp, experts, thread.ctas * warps):
            for row in range(smem.begins[expert] + smem.sizes[expert] + thread.lane, smem.begins[expert + 1], WARP):
                permuted[row] = Int32(-1)
        for row in range(
            smem.begins[experts] + thread.cta * THREADS + thread.tid, permuted.shape[0], thread.ctas * THREADS
        ):
            permuted[row] = Int32(-1)


# Loads of a token's 32-bit words


class TokenKernel:
    """Base of kernels of one ``Config`` for tokens of ``config.dtype``."""

    def __init__(self, config: Any):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]


def _words_at_once(topk: int) -> int:
    return 4 if topk % 4 == 0 else 1


def alignment(topk: int) -> int:
    """Return the alignment that the tensor needs, in bytes."""
    return 4 * _words_at_once(topk)


def words_of_token(tensor: cute.Tensor, token, topk: int, exists=True) -> list:
    """Return the ``topk`` words of a token; zeros unless it ``exists``."""
    count = _words_at_once(topk)
    start = tensor.iterator + cute.assume(Int64(token) * topk, divby=count)
    return [word for j in range(0, topk, count) for word in ptx.load_if(start, exists, count, 4 * j)]


def row_below(word, rows) -> Int32:
    """Return a word as the index of a row, or -1 for an index of ``rows`` or more.

    Callers skip negative indices, so that wrong indices read and write nothing out of bounds.
    """
    row = Int32(word)
    return ptx.select(row < rows, row, Int32(-1))
