"""Device code that chooses the experts of tokens, assigns (token, expert) pairs to rows, and loads a token's words.

``ExpertChooser``: a warp chooses the experts of one token. Scores are converted to keys: 32-bit integers that sort in
the same order. Each lane holds the keys of up to 32 consecutive experts, so that a group of experts occupies whole
lanes. If the number of groups is not a power of two, this would take up to 60 keys in a lane. Therefore a separate pass
then scores the groups, and groups need not occupy whole lanes. The warp repeats one step ``topk`` times: it finds the
largest key by two warp-wide reductions, and takes the first of equal keys. This loop is unrolled if a lane holds at
most 16 keys.

``ExpertPlacer``: the row of a pair is the first row of its expert plus its *rank*, the number of earlier pairs with the
same expert. A CTA processes its slots (tokens, or single pairs) in batches. For each pair, a thread sets a bit in a
bitmap (experts x slots) in shared memory. The rank is a population count of this bitmap, so it does not depend on the
order in which threads run.

- Few slots: one CTA does all the work, in one launch.
- Many slots: in a first kernel, each CTA stores the ranks of its pairs in ``expanded``, and its number of pairs per
  expert in a workspace. In a second kernel, each CTA processes the same slots. The CTA adds up the counts of all CTAs
  before it, and the counts of all CTAs, and stores the row of each pair.

The number of rows of each expert is rounded up, and experts' rows follow each other. In the masked layout, all experts
own the same number of rows. Entries of rows without a pair are set to -1. All CTAs share this work.
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
"""Key of NaN. It is below the key of any number. Key 0 stands for "no expert", and for experts of groups that were not
chosen."""
LARGEST = torch.finfo(torch.float32).max
TINY = 1e-20
"""Term that is added to a sum of sigmoids before the division by it, because the sum may be 0. DeepSeek-V3's reference
does the same."""


class ExpertChooser:
    """Device code that chooses experts as an ``ExpertChoice`` describes."""

    def __init__(self, choice: ExpertChoice):
        self.choice = choice

    @cute.jit
    def choose(self, token, logits, bias, factor, lane):
        """Return the ``lane``-th best expert of a token, and the expert's weight times ``factor``.

        All lanes of a warp call this method with the same token. Lanes ``topk`` and higher get expert 0.
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
                            # Keys that stand for no expert have the value minus infinity, so they add zero.
                            total = total + _exp(_value_of(key) - largest)
                first = Int32(c.experts)
                for expert, key in zip(reversed(experts), reversed(keys), strict=True):
                    first = ptx.select(key == best, expert, first)
                first = cute.arch.warp_redux_sync(first, "min")
                keys = [ptx.select(e == first, Uint32(0), key) for e, key in zip(experts, keys, strict=True)]
                own = ptx.select(lane == j, first, own)
        value = self._logit(logits, token, own)
        if const_expr(c.computes_softmax_first and c.renormalize):
            # Subtract the largest chosen logit, not the largest of all logits. The expert with the largest logit may
            # not be chosen. Relative to this logit, the weights of all chosen experts could round to zero.
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
        """Return the logit of an expert in fp32. If ``is_finite``, replace NaN and infinities."""
        value = Float32(logits[token, expert])
        if const_expr(self.choice.is_finite):
            # Comparisons with NaN are false, so NaN becomes -LARGEST.
            value = ptx.select(value > Float32(-LARGEST), value, Float32(-LARGEST))
            value = ptx.select(value < Float32(LARGEST), value, Float32(LARGEST))
        return value

    def _score(self, value, bias, expert, largest, total) -> Float32:
        """Return the score by which an expert is chosen. For a softmax without bias, this is the logit, because softmax
        preserves the order of logits."""
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
        """Return the expert to which the lane's i-th key belongs, and True if this expert exists."""
        c = self.choice
        if c.are_keys_interleaved:
            expert = i * WARP + lane
            is_known = isinstance(i, int) and (i + 1) * WARP <= c.experts
            return expert, True if is_known else expert < c.experts
        return self._expert_in_group(lane, i)

    def _expert_in_group(self, lane, i):
        """Return the lane's i-th expert if groups occupy whole lanes, and True if this expert exists."""
        c = self.choice
        group, in_group = lane // c.group_lanes, lane % c.group_lanes * c.lane_group_experts + i
        return group * c.group_size + in_group, (group < c.num_groups) & (in_group < c.group_size)

    @cute.jit
    def _softmax_terms(self, token, logits, lane):
        """Return the largest logit, and the sum of ``exp(logit - largest)`` over all experts."""
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
        """Return the ``lane``-th best expert, and the largest key, with a loop that is not unrolled.

        The loop identifies a key by its position in the lane, so that it needs no register per expert.
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
        """Return a word of flags. Bit i is set if the expert of the lane's i-th key belongs to one of the best
        groups."""
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
        """Return the keys, with 0 for experts that do not belong to one of the best groups."""
        best, second = keys[0], Uint32(0)
        for key in keys[1:]:
            second = _larger(second, _smaller(best, key))
            best = _larger(best, key)
        is_best = self._is_best_group(best, second, lane)
        return [ptx.select(is_best, key, Uint32(0)) for key in keys]

    def _is_best_group(self, best, second, lane) -> Boolean:
        """Return True if the lane's group is one of the best groups. ``best`` and ``second`` are the largest keys of
        the lane's experts."""
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
    """Return an unsigned key. Keys sort in the order of the numbers that they encode. Both zeros have the same key, and
    NaN has ``NAN_KEY``."""
    bits = ptx.bits_of(ptx.select(value == Float32(0.0), Float32(0.0), value))
    negative = bits >> 31 != Uint32(0)
    key = ptx.select(negative, ~bits, bits | Uint32(0x80000000))
    return ptx.select(value != value, Uint32(NAN_KEY), key)


def _value_of(key: Uint32) -> Float32:
    """Return the number that a key encodes, or minus infinity for NaN and for a key that stands for no expert."""
    bits = ptx.select(key >> 31 != Uint32(0), key & Uint32(0x7FFFFFFF), ~key)
    return ptx.select(key > Uint32(NAN_KEY), ptx.float_of(bits), Float32(-math.inf))


def _select(condition, a, b):
    """Return ``a if condition else b``, by ``ptx.select`` unless ``condition`` is known while the kernel is traced."""
    if isinstance(condition, bool):
        return a if condition else b
    return ptx.select(condition, a, b)


def _larger(a: Uint32, b: Uint32) -> Uint32:
    # Do not use ``cutlass.max``: it may compare unsigned integers as signed (DSL 4.8.1).
    return ptx.select(a > b, a, b)


def _smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx.select(a > b, b, a)


def _exp(value: Float32) -> Float32:
    """Return ``exp(value)``, accurate to a few ulps, or to about |value| ulps if ``value`` is large."""
    return ptx.ex2_approx(ptx.mul_rn(value, Float32(math.log2(math.e))))


def _sigmoid(value: Float32) -> Float32:
    """Return ``1 / (1 + exp(-value))``."""
    return ptx.div_rn(Float32(1.0), _exp(-value) + Float32(1.0))


# Rows of pairs


class Thread(NamedTuple):
    """Index of a thread and of its CTA, and the range of the CTA's slots: ``first`` to ``last`` (exclusive)."""

    tid: Int32
    lane: Int32
    warp: Int32
    cta: Int32
    ctas: Int32
    first: Int32
    last: Int32


class Smem(NamedTuple):
    """Tables in shared memory. ``SmemOffsets`` describes them."""

    bits: cute.Tensor
    chosen: cute.Tensor
    before: cute.Tensor
    begins: cute.Tensor
    sizes: cute.Tensor
    partial_sums: cute.Tensor
    warps: cute.Tensor


class RowOutputs(NamedTuple):
    """Output tensors ``permuted_to_expanded``, ``offsets`` and ``counts`` in global memory."""

    permuted: cute.Tensor
    offsets: cute.Tensor
    counts: cute.Tensor


class ExpertPlacer:
    """Base class of the kernels that assign pairs to rows. A subclass provides the expert of each pair.

    In all methods, ``thread`` is a ``Thread`` and ``smem`` is an ``Smem``.

    Attributes:
        may_lack_experts: True if pairs may name no expert. The row of a pair without an expert is -1.
    """

    may_lack_experts = False

    def __init__(self, placement: ExpertPlacement, pdl: bool):
        self.placement, self.pdl = placement, pdl

    def order_arguments(self, pairs: TensorArg) -> dict[str, TensorArg | ScalarArg]:
        """Return descriptions of the arguments that hold the order of rows. ``pairs`` describes an (M, topk) int32
        tensor."""

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
        """Set the bitmap's bits for a batch of slots, synchronise the CTA, and compute the rank of this thread's pair.

        All threads of the CTA call this method. ``batch`` is the first slot of the batch. ``inputs`` are the values
        that the subclass passed to ``launch``.

        Returns:
            Expert of the pair (negative for none), and rank of the pair in the CTA. Both are arbitrary if the thread
            has no pair.
        """
        raise NotImplementedError

    def expert_of(self, pair, inputs) -> Int32:
        """Return the expert of a pair, or a negative number if the pair has no expert. The second kernel calls this to
        load experts again."""
        raise NotImplementedError

    # Launches

    @cute.jit
    def launch(self, slots, inputs, expanded, rows: RowOutputs, workspace, row_multiple, sms, written, read, stream):
        """Launch one kernel if there are few slots and rows, otherwise two kernels.

        Args:
            slots: number of slots.
            inputs: values that the kernels pass on to ``take_batch`` and ``expert_of``.
            expanded: (M, topk) int32, written: the row of each pair.
            rows: the other outputs.
            workspace: ``ExpertPlacement.workspace_words`` int32; not accessed if this number is 0.
            row_multiple: in the masked layout, the number of rows of each expert. In other layouts, the alignment of
                each expert's first row.
            sms: number of SMs of the device.
            written, read: tensors that the call writes, and tensors that the call only reads, both without the
                workspace. Both are passed to ``ctas_unless_overlapping``.
            stream: CUDA stream.
        """
        placement = self.placement
        # ``ExpertPlacement.workspace_words`` computes the same number of CTAs.
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
        """Assign all pairs of a single batch to rows, with one CTA."""
        thread, smem = self._begin(slots), self._allocate()
        self._clear(thread, smem)
        expert, rank = self.take_batch(thread.first, inputs, thread, smem)
        self._divide_rows(self._count(thread, smem), rows, row_multiple, thread, smem)
        if thread.tid < (thread.last - thread.first) * self.placement.slot_pairs:
            self._store_row(thread.tid, expert, rank, expanded, rows, row_multiple, smem)
        self._fill_padding(rows, thread, smem)

    @cute.kernel
    def rank_pairs(self, slots: Int32, inputs, expanded, workspace):
        """Store each pair's rank among the pairs of the CTA, and the CTA's number of pairs per expert."""
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
        """Store the row of each of the CTA's pairs."""
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
        """View a contiguous (M, topk) tensor as a vector of pairs."""
        return cute.make_tensor(pairs.iterator, cute.make_layout((pairs.shape[0] * pairs.shape[1],)))

    def has_pair(self, batch, thread: Thread):
        """Return True if a pair of the batch belongs to this thread."""
        placement = self.placement
        return thread.tid < cutlass.min(thread.last - batch, placement.batch) * placement.slot_pairs

    def mark(self, expert, slot, smem: Smem) -> None:
        """Set the bit of an expert for a slot of the batch."""
        at = smem.bits.iterator + (expert * self.placement.words + slot // 32)
        cute.arch.atomic_or(at, Uint32(1) << Uint32(slot % 32), scope="cta")

    def rank_of(self, expert, slot, smem: Smem) -> Int32:
        """Return the number of pairs with this expert among the CTA's slots before ``slot``, an index in the batch."""
        rank = smem.before[expert]
        for i in range(self.placement.words):
            # Count all bits in the words before the slot's word, and the bits below the slot's bit in its word.
            below = cutlass.min(cutlass.max(slot - 32 * i, 0), 32)
            mask = ptx.select(below < 32, (Uint32(1) << Uint32(below % 32)) - 1, Uint32(0xFFFFFFFF))
            rank = rank + Int32(cute.arch.popc(smem.bits[expert * self.placement.words + i] & mask))
        return rank

    # Steps

    @cute.jit
    def _begin(self, slots):
        """Wait for the previous kernels. Return the index of this thread and the range of its CTA's slots."""
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
        """Clear the bits of the bitmap, and the counts of earlier batches."""
        before, bits = smem.before, smem.bits
        words = self.placement.words
        if thread.tid < self.placement.experts:
            before[thread.tid] = Int32(0)
            for i in range_constexpr(words):
                bits[thread.tid * words + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _count(self, thread, smem):
        """Return the number of pairs in the batch for one expert. Thread e counts the pairs of expert e."""
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
        """Return the sum of an expert's counts over all CTAs. Store the sum over the CTAs before this one in
        ``smem.before``."""
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
        """Compute the first row and the number of rows of each expert. Thread e passes ``total``, the number of pairs
        of expert e."""
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
        """Store the row of a pair, and the pair of this row. The row is -1 if the pair names no expert or the expert
        has no free row."""
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
        """Store -1 in rows without a pair: after the pairs of each expert (one warp per expert), and at the end of the
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
    """Base class of kernels that load tokens as 32-bit words. ``config.dtype`` is the dtype of the tokens."""

    def __init__(self, config: Any):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]


def _words_at_once(topk: int) -> int:
    return 4 if topk % 4 == 0 else 1


def alignment(topk: int) -> int:
    """Return the alignment in bytes that ``words_of_token`` needs for a tensor with ``topk`` words per token."""
    return 4 * _words_at_once(topk)


def words_of_token(tensor: cute.Tensor, token, topk: int, exists=True) -> list:
    """Load the ``topk`` words of a token, or return zeros if not ``exists``."""
    count = _words_at_once(topk)
    start = tensor.iterator + cute.assume(Int64(token) * topk, divby=count)
    return [word for j in range(0, topk, count) for word in ptx.load_if(start, exists, count, 4 * j)]


def row_below(word, rows) -> Int32:
    """Return a word as a row index, or -1 if it is ``rows`` or more.

    Callers skip negative indices. Wrong indices therefore cause no access out of bounds.
    """
    row = Int32(word)
    return ptx.select(row < rows, row, Int32(-1))
