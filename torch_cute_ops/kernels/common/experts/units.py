"""Units of work of GEMMs that compute routed pairs of token and expert: an expert and up to ``group`` of its tokens.

A CTA lists the experts that any token of its tile is routed to in shared memory, in their order, and where the units of
each begin.
"""

import itertools
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr, range_constexpr

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.experts.factors import factor_counts
from torch_cute_ops.kernels.common.experts.layouts import LIST_BYTES, SCANNED
from torch_cute_ops.kernels.common.experts.tiles import running_sum

WARP = 32


class UnitLists(NamedTuple):
    """The touched experts, in order: their numbers; where their units begin, and after the last one the number of
    units; their numbers of tokens. And the number of units, in all and of the first part."""

    experts: cute.Tensor
    begins: cute.Tensor
    counts: cute.Tensor
    total: cute.Tensor
    first: cute.Tensor


class ExpertUnits:
    """How a CTA finds the units of a tile of ``tokens``. Where ``classes`` is more than one, an expert's class is its
    number modulo that, and a CTA has two parts of the units: those of some classes, and then those of others."""

    def __init__(self, tokens: int, group: int, classes: int = 1):
        self.tokens, self.group, self.classes = tokens, group, classes

    def lists(self, at: cute.Pointer) -> tuple[UnitLists, cute.Pointer]:
        """The lists from ``at`` on in shared memory, and where they end: after ``unit_lists.LIST_BYTES``."""
        at = cute.recast_ptr(at, dtype=Int32)
        sizes = UnitLists(experts=MAX_EXPERTS, begins=MAX_EXPERTS + 4, counts=MAX_EXPERTS, total=1, first=1)
        starts = (0, *itertools.accumulate(sizes[:-1]))
        places = zip(starts, sizes, strict=True)
        lists = UnitLists(*(cute.make_tensor(at + start, cute.make_layout(size)) for start, size in places))
        return lists, at + LIST_BYTES // 4

    @cute.jit
    def gather(
        self, factors, counts, tile, m, tid, warp, finder: Constexpr[int], threads: Constexpr[int], parts, lists
    ):
        """The threads of a CTA make the lists of their tile.

        Args:
            factors: of tokens and experts: what is routed.
            counts, tile, m: how many tokens of each tile each expert has, where the CTA does not scan the
                factors itself; the tile; and tokens in all.
            warp, finder: the thread's warp, and the one that calls ``find``, with ``parts``: begins and ends.
        """
        experts = factors.shape[1]
        for expert in range(tid, experts, threads):
            if const_expr(self.tokens <= SCANNED):
                lists.counts[expert] = self.count(factors, expert, tile * self.tokens, m)
            else:
                lists.counts[expert] = counts[tile * experts + expert]
        cute.arch.sync_threads()
        if warp == finder:
            self.find(tid % WARP, experts, *parts, lists)
        cute.arch.sync_threads()

    @cute.jit
    def count(self, factors, expert, first_token, m):
        """How many of the tile's tokens are routed to an expert."""
        values = cute.make_rmem_tensor((self.tokens,), Float32)
        for i in range_constexpr(self.tokens):
            values[i] = Float32(0.0)
            if first_token + i < m:
                values[i] = factors[first_token + i, expert]
        count = Int32(0)
        for i in range_constexpr(self.tokens):
            count = count + Int32(factor_counts(values[i]))
        return count

    @cute.jit
    def find(self, lane, experts, begins, ends, lists):
        """A warp turns the number of tokens of every expert, in ``lists.counts``, into the lists of the touched ones:
        of the classes from ``begins[0]`` to ``ends[0]``, then of those from ``begins[1]`` to ``ends[1]``; of all, if
        there is one class."""
        each = MAX_EXPERTS // WARP
        first = lane * each
        counts = cute.make_rmem_tensor((each,), Int32)
        for i in range_constexpr(each):
            counts[i] = Int32(0)
            if first + i < experts:
                counts[i] = lists.counts[first + i]
        # All lanes have read what the lists overwrite.
        cute.arch.sync_warp()
        before_units, before_touched = Int32(0), Int32(0)
        for part in range_constexpr(2 if self.classes > 1 else 1):
            mine = cute.make_rmem_tensor((each,), Int32)
            units, touched = Int32(0), Int32(0)
            for i in range_constexpr(each):
                is_mine = Int32(1)
                if const_expr(self.classes > 1):
                    class_ = (first + i) % self.classes
                    is_mine = Int32((class_ >= begins[part]) & (class_ < ends[part]))
                mine[i] = is_mine * ((counts[i] + (self.group - 1)) // self.group)
                units = units + mine[i]
                touched = touched + Int32(mine[i] > 0)
            own_units, own_touched = units, touched
            units, touched = running_sum(units, lane), running_sum(touched, lane)
            begin, index = before_units + units - own_units, before_touched + touched - own_touched
            for i in range_constexpr(each):
                if mine[i] > 0:
                    lists.experts[index] = first + i
                    lists.begins[index] = begin
                    lists.counts[index] = counts[i]
                    index = index + 1
                begin = begin + mine[i]
            before_units = before_units + cute.arch.shuffle_sync(units, WARP - 1)
            before_touched = before_touched + cute.arch.shuffle_sync(touched, WARP - 1)
            if const_expr(part == 0):
                if lane == 0:
                    lists.first[0] = before_units
        if lane == 0:
            lists.begins[before_touched] = before_units
            lists.total[0] = before_units

    @cute.jit
    def index_of(self, unit, index, lists):
        """The place in the lists of a unit's expert, from that of a unit before it."""
        while lists.begins[index + 1] <= unit:
            index += 1
        return index
