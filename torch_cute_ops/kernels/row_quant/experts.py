"""Dense numbering of the experts' rows in a buffer with padding.

Expert ``e`` owns ``counts[e]`` rows from row ``offsets[e]`` on. Without ``offsets``, all experts own equally many rows
of the buffer. The experts' rows are numbered consecutively, without the padding; this is a row's *dense number*. Per
expert, a table in shared memory contains the dense number of the first row, and the difference between the index of a
row in the buffer and the row's dense number.
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
    """Table of experts' rows.

    Attributes:
        starts: dense number of each expert's first row; ``BEYOND`` after the last expert.
        shifts: per expert, difference between the index of a row in the buffer and the row's dense number.
        total: number of rows, one element.
        partial_sums: scratch memory of ``fill_table``.
    """

    starts: cute.Tensor
    shifts: cute.Tensor
    total: cute.Tensor
    partial_sums: cute.Tensor


def table_at(memory: cute.Pointer, sizes: tuple[int, ...]) -> ExpertRows:
    """Return the table at ``memory`` (shared memory). ``sizes`` are the numbers of words of its tensors, as
    ``RowQuantSpec.table_words`` returns them."""
    words = cute.recast_ptr(memory, dtype=Int32)
    starts = (sum(sizes[:i]) for i in range(len(sizes)))
    return ExpertRows(*(cute.make_tensor(words + at, cute.make_layout(n)) for at, n in zip(starts, sizes, strict=True)))


@cute.jit
def fill_table(table: ExpertRows, offsets, counts, rows, tid, threads: int):
    """Fill the table. ``offsets`` may be None. ``rows`` is the size of the buffer.

    All ``threads`` of the CTA call this, and need a barrier before they read the table.
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
            # Wrong offsets give a wrong result, but no access out of bounds.
            begin = cutlass.max(_load(offsets, expert, exists), Int32(0))
        size = _load(counts, expert, exists)
        # Clip to the expert's range, or to the buffer.
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
        table.total[0] = end


def _load(tensor: cute.Tensor, at, exists) -> Int32:
    return Int32(ptx.load_if(tensor.iterator + at, exists, 1)[0])


def row_of(table: ExpertRows, number, lane, is_of_warp: bool) -> Int32:
    """Return the row of the buffer with this dense number; arbitrary for a number after the last row.

    ``is_of_warp``: True if the number is the same for all lanes, and all lanes call this function together.
    """
    if is_of_warp:
        expert = expert_by_votes(table.starts, number, lane, cute.size(table.starts))
    else:
        expert = expert_by_bisection(table.starts, number, cute.size(table.starts))
    return number + table.shifts[expert]
