"""Give each pair of a token and an expert a row in the order of the experts.

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
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.experts.layouts import ALONE_ROWS, ROWS, THREADS, WARP, ExpertPlacement
from torch_cute_ops.kernels.common.experts.tiles import running_sum_of_cta
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class Thread(NamedTuple):
    """A thread's place in the grid, and the run of slots of its CTA, from ``first`` up to ``last``."""

    tid: Int32
    lane: Int32
    warp: Int32
    cta: Int32
    ctas: Int32
    first: Int32
    last: Int32


class Shared(NamedTuple):
    """Tensors in shared memory; see ``SmemOffsets``."""

    bits: cute.Tensor
    chosen: cute.Tensor
    before: cute.Tensor
    begins: cute.Tensor
    sizes: cute.Tensor
    sums: cute.Tensor
    warps: cute.Tensor


class Rows(NamedTuple):
    """The outputs ``permuted_to_expanded``, ``offsets`` and ``counts`` in global memory."""

    permuted: cute.Tensor
    offsets: cute.Tensor
    counts: cute.Tensor


class ExpertPlacer:
    """Base of the kernels that give pairs their rows; a subclass provides the expert of each pair.

    In all methods ``t`` is a ``Thread`` and ``s`` the ``Shared`` memory.

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

    def take_chunk(self, chunk, inputs, t: Thread, s: Shared):
        """Set the bits of the slots from ``chunk`` on and, after a barrier, rank the thread's pair of the chunk.

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
    def launch(self, slots, inputs, expanded, rows: Rows, workspace, unit, sms, written, read, stream):
        """Launch one kernel, or two.

        Args:
            slots: number of slots.
            inputs: what the kernels pass on to ``take_chunk`` and ``expert_of``.
            expanded: (M, topk) int32, the row of each pair.
            rows: the other outputs.
            workspace: ``ExpertPlacement.workspace_words`` int32; unused where that is 0.
            unit: rows of each expert if masked; otherwise what each expert's first row is a multiple of.
            sms: multiprocessors of the device.
            written, read: all tensors of the call except the workspace, for ``ctas_unless_overlapping``.
            stream: the stream.
        """
        p = self.placement
        # As in ``ExpertPlacement.workspace_words``
        wanted = cutlass.max(cute.ceil_div(slots, p.run), cute.ceil_div(rows.permuted.shape[0], ROWS))
        ctas = cutlass.max(cutlass.min(sms, wanted), 1)
        if (slots <= p.alone) & (rows.permuted.shape[0] <= ALONE_ROWS):
            alone = ctas_unless_overlapping(1, written, read)
            self.place_alone(slots, inputs, expanded, rows, unit).launch(
                grid=[alone, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=self.pdl
            )
        else:
            ctas = ctas_unless_overlapping(ctas, (*written, workspace), read)
            self.rank_runs(slots, inputs, expanded, workspace).launch(
                grid=[ctas, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=self.pdl
            )
            self.place_runs(slots, inputs, expanded, rows, workspace, unit).launch(
                grid=[ctas, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=self.pdl
            )

    @cute.kernel
    def place_alone(self, slots: Int32, inputs, expanded, rows, unit: Int32):
        """Everything, by one CTA, for a single chunk."""
        t, s = self._begin(slots), self._allocate()
        self._clear(t, s)
        expert, rank = self.take_chunk(t.first, inputs, t, s)
        self._divide(self._count(t, s), rows, unit, t, s)
        if t.tid < (t.last - t.first) * self.placement.slot_pairs:
            self._put(t.tid, expert, rank, expanded, rows, unit, s)
        self._fill(rows, t, s)

    @cute.kernel
    def rank_runs(self, slots: Int32, inputs, expanded, workspace):
        """Store the rank of each pair in its run, and each expert's count in the run."""
        p = self.placement
        t, s = self._begin(slots), self._allocate()
        ranks = self.flat(expanded)
        self._clear(t, s)
        for chunk in range(t.first, t.last, p.chunk):
            _, rank = self.take_chunk(chunk, inputs, t, s)
            if self.has_pair(chunk, t):
                ranks[chunk * p.slot_pairs + t.tid] = rank
            cute.arch.sync_threads()
            self._add_chunk(t, s)
        if t.tid < p.experts:
            workspace[t.cta * p.experts + t.tid] = s.before[t.tid]

    @cute.kernel
    def place_runs(self, slots: Int32, inputs, expanded, rows, workspace, unit: Int32):
        """Store the row of each pair of a run."""
        p = self.placement
        t, s = self._begin(slots), self._allocate()
        expert, part = t.tid % (THREADS // p.parts), t.tid // (THREADS // p.parts)
        before, total = Int32(0), Int32(0)
        if expert < p.experts:
            for run in range(part, t.ctas, p.parts, unroll=8):
                count = workspace[run * p.experts + expert]
                total = total + count
                before = before + ptx.select(run < t.cta, count, Int32(0))
        total = self._sum_parts(before, total, t, s)
        self._divide(total, rows, unit, t, s)
        ranks = self.flat(expanded)
        for pair in range(t.first * p.slot_pairs + t.tid, t.last * p.slot_pairs, THREADS):
            self._put(pair, self.expert_of(pair, inputs), ranks[pair], expanded, rows, unit, s)
        self._fill(rows, t, s)

    # What subclasses use

    def flat(self, pairs: cute.Tensor) -> cute.Tensor:
        """A contiguous (M, topk) tensor as one dimension of pairs."""
        return cute.make_tensor(pairs.iterator, cute.make_layout((pairs.shape[0] * pairs.shape[1],)))

    def has_pair(self, chunk, t: Thread):
        """Whether the thread has a pair of the chunk."""
        p = self.placement
        return t.tid < cutlass.min(t.last - chunk, p.chunk) * p.slot_pairs

    def mark(self, expert, slot, s: Shared) -> None:
        """Set the bit of an expert for a slot of the chunk."""
        at = s.bits.iterator + (expert * self.placement.words + slot // 32)
        cute.arch.atomic_or(at, Uint32(1) << Uint32(slot % 32), scope="cta")

    def rank_of(self, expert, slot, s: Shared) -> Int32:
        """How many pairs of the run, before this slot of the chunk, have this expert."""
        rank = s.before[expert]
        for i in range(self.placement.words):
            # All bits of the words before the slot's own word, and the bits below the slot in that.
            below = cutlass.min(cutlass.max(slot - 32 * i, 0), 32)
            mask = ptx.select(below < 32, (Uint32(1) << Uint32(below % 32)) - 1, Uint32(0xFFFFFFFF))
            rank = rank + Int32(cute.arch.popc(s.bits[expert * self.placement.words + i] & mask))
        return rank

    # Steps

    @cute.jit
    def _begin(self, slots):
        """The thread's place and its CTA's run; waits for the kernels before this one."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        run = cute.ceil_div(slots, ctas)
        pdl_start(self.pdl)
        first = cutlass.min(cta * run, slots)
        last = cutlass.min(first + run, slots)
        return Thread(tid, tid % WARP, cute.arch.make_warp_uniform(tid // WARP), cta, ctas, first, last)

    def _allocate(self) -> Shared:
        base = SmemAllocator().allocate(self.placement.smem_bytes, 128)
        at = self.placement.smem_offsets._asdict()
        tensors = {}
        for name, after in itertools.pairwise(at):
            dtype = Uint32 if name == "bits" else Int32
            words = cute.recast_ptr(base + 4 * at[name], dtype=dtype)
            tensors[name] = cute.make_tensor(words, cute.make_layout(at[after] - at[name]))
        return Shared(**tensors)

    @cute.jit
    def _clear(self, t, s):
        """Clear the bits, and the counts of what came before."""
        before, bits = s.before, s.bits
        words = self.placement.words
        if t.tid < self.placement.experts:
            before[t.tid] = Int32(0)
            for i in range_constexpr(words):
                bits[t.tid * words + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _count(self, t, s):
        """How many pairs of the chunk have the expert that this thread counts."""
        count = Int32(0)
        words = self.placement.words
        if t.tid < self.placement.experts:
            for i in range_constexpr(words):
                count = count + Int32(cute.arch.popc(s.bits[t.tid * words + i]))
        return count

    @cute.jit
    def _add_chunk(self, t, s):
        """Add the chunk's counts to what came before, and clear the bits for the next chunk."""
        count = self._count(t, s)
        before, bits = s.before, s.bits
        words = self.placement.words
        if t.tid < self.placement.experts:
            before[t.tid] = before[t.tid] + count
            for i in range_constexpr(words):
                bits[t.tid * words + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _sum_parts(self, before, total, t, s):
        """Add up the parts of each expert's count: of all runs, and, in shared memory, of those before."""
        p = self.placement
        sums, befores = s.sums, s.before
        sums[t.tid] = before
        sums[THREADS + t.tid] = total
        cute.arch.sync_threads()
        total = Int32(0)
        if t.tid < p.experts:
            before = Int32(0)
            for i in range_constexpr(p.parts):
                before = before + sums[t.tid + i * (THREADS // p.parts)]
                total = total + sums[THREADS + t.tid + i * (THREADS // p.parts)]
            befores[t.tid] = before
        return total

    @cute.jit
    def _divide(self, total, rows, unit, t, s):
        """Divide the buffer among the experts; thread e knows the number of pairs of expert e, ``total``."""
        p = self.placement
        offsets, counts = rows.offsets, rows.counts
        size, space = total, unit
        if const_expr(p.is_masked):
            size = cutlass.min(total, unit)
        else:
            space = cute.ceil_div(total, unit) * unit
        space = ptx.select(t.tid < p.experts, space, Int32(0))
        end = running_sum_of_cta(space, s.warps, t.tid, -(-p.experts // WARP))
        begins, sizes = s.begins, s.sizes
        if t.tid < p.experts:
            begins[t.tid] = end - space
            sizes[t.tid] = size
            if t.tid == p.experts - 1:
                begins[p.experts] = end
            if t.cta == 0:
                offsets[t.tid] = end - space
                counts[t.tid] = size
                if t.tid == p.experts - 1:
                    offsets[p.experts] = end
        cute.arch.sync_threads()

    @cute.jit
    def _put(self, pair, expert, rank, expanded, rows, unit, s):
        """Store the row of a pair, -1 if it has no expert or there is no room, and the pair of the row."""
        permuted = rows.permuted
        known = expert
        if const_expr(self.may_lack_experts):
            known = cutlass.max(expert, 0)
        rank = rank + s.before[known]
        row = s.begins[known] + rank
        if const_expr(self.placement.is_masked):
            row = ptx.select(rank < unit, row, Int32(-1))
        if const_expr(self.may_lack_experts):
            row = ptx.select(expert >= 0, row, Int32(-1))
        places = self.flat(expanded)
        places[pair] = row
        if row >= 0:
            permuted[row] = pair

    @cute.jit
    def _fill(self, rows, t, s):
        """Store -1 for rows without a pair: behind each expert's pairs, a warp for each expert; and at the end."""
        experts, permuted = self.placement.experts, rows.permuted
        warps = THREADS // WARP
        for expert in range(t.cta * warps + t.warp, experts, t.ctas * warps):
            for row in range(s.begins[expert] + s.sizes[expert] + t.lane, s.begins[expert + 1], WARP):
                permuted[row] = Int32(-1)
        for row in range(s.begins[experts] + t.cta * THREADS + t.tid, permuted.shape[0], t.ctas * THREADS):
            permuted[row] = Int32(-1)
