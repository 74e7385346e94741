"""Dense numbering of the experts' rows, for a buffer with padding between experts.

Expert ``e`` owns ``counts[e]`` rows, starting at row ``offsets[e]``. Without ``offsets``, all experts own the same
number of rows of the buffer. The *dense number* of a row counts all experts' rows before it, without the padding. A
table in shared memory contains, for each expert, the dense number of its first row, and the difference between a row's
index in the buffer and its dense number.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.experts.search import expert_by_bisection, expert_by_votes, running_sum_of_cta
from torch_cute_ops.kernels.row_quant.config import WARP

BEYOND = 2**31 - 1


class ExpertRows(NamedTuple):
    """Table of experts' rows, in shared memory.

    Attributes:
        starts: dense number of each expert's first row, and ``BEYOND`` after the last expert.
        shifts: for each expert, difference between a row's index in the buffer and its dense number.
        total: one element, the number of rows of all experts.
        partial_sums: scratch memory of ``fill_table``.
    """

    starts: cute.Tensor
    shifts: cute.Tensor
    total: cute.Tensor
    partial_sums: cute.Tensor


def table_at(memory: cute.Pointer, sizes: tuple[int, ...]) -> ExpertRows:
    """Return the table that begins at ``memory`` in shared memory. ``sizes`` contains the numbers of words of its
    tensors (``RowQuantSpec.table_words``)."""
    words = cute.recast_ptr(memory, dtype=Int32)
    starts = (sum(sizes[:i]) for i in range(len(sizes)))
    return ExpertRows(*(cute.make_tensor(words + at, cute.make_layout(n)) for at, n in zip(starts, sizes, strict=True)))


@cute.jit
def fill_table(table: ExpertRows, offsets, counts, rows, tid, threads: int):
    """Fill the table of experts' rows. ``offsets`` may be None. ``rows`` is the number of rows of the buffer.

    All ``threads`` threads of the CTA call this function. The threads must synchronise before they read the table.
    """
    experts = counts.shape[0]
    rows_per_expert = rows // experts
    room = cute.size(table.starts)
    each = -(-room // threads)
    begins, sizes = [], []
    own = Int32(0)
    for i in range_constexpr(each):
        expert = tid * each + i
        exists = expert < experts
        begin = expert * rows_per_expert
        if const_expr(offsets is not None):
            # Clamp offsets and counts, so that wrong values cause a wrong result but no access out of bounds.
            begin = cutlass.max(_load(offsets, expert, exists), Int32(0))
        size = _load(counts, expert, exists)
        # Limit the number of an expert's rows: they must end inside the expert's part of the buffer, and inside the
        # buffer.
        size = cutlass.max(
            cutlass.min(size, rows_per_expert if const_expr(offsets is None) else rows - begin), Int32(0)
        )
        begins.append(begin)
        sizes.append(size)
        own = own + size
    end = running_sum_of_cta(own, table.partial_sums, tid, threads // WARP)
    start = end - own
    for i in range_constexpr(each):
        expert = tid * each + i
        if expert < room:
            table.starts[expert] = ptx.select(expert < experts, start, Int32(BEYOND))
            table.shifts[expert] = begins[i] - start
        start = start + sizes[i]
    if tid == threads - 1:
        # If offsets and counts are wrong, several experts may own the same rows, so that the sum exceeds the buffer, or
        # even int32.
        table.total[0] = cutlass.max(cutlass.min(end, rows), Int32(0))


def _load(tensor: cute.Tensor, at, exists) -> Int32:
    return Int32(ptx.load_if(tensor.iterator + at, exists, 1)[0])


def row_of(table: ExpertRows, number, lane, is_of_warp: bool) -> Int32:
    """Return the row of the buffer whose dense number is ``number``. The result is arbitrary if ``number`` is too
    large.

    ``is_of_warp`` is True if all lanes of the warp call this function together, with the same number.
    """
    if is_of_warp:
        expert = expert_by_votes(table.starts, number, lane, cute.size(table.starts))
    else:
        expert = expert_by_bisection(table.starts, number, cute.size(table.starts))
    return number + table.shifts[expert]
