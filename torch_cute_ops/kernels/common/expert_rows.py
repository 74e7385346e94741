"""The rows that experts have in a buffer with padding, as one dense range: rows of padding have no number in it.

Each expert has ``counts[e]`` rows from ``offsets[e]`` on; without ``counts``, all up to the next offset; without
``offsets``, from ``e`` times an equal share of the buffer on. A table in shared memory says where in the dense range
each expert's rows begin, and how far from there in the buffer. One warp makes it, sixteen experts a lane, and a row is
looked up by bisection: nine loads from shared memory, whatever the number of experts is.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.scan import running_sum

WARP = 32
BEYOND = 2**31 - 1


class ExpertRows(NamedTuple):
    """The table.

    Attributes:
        starts: where each expert's rows begin in the dense range; nowhere, for experts that there are not.
        shifts: what is added to a number in the dense range for the row of the buffer.
        total: how many rows there are, one element.
    """

    starts: cute.Tensor
    shifts: cute.Tensor
    total: cute.Tensor


def table_at(memory: cute.Pointer) -> ExpertRows:
    """The table that lies in ``TABLE_BYTES`` of shared memory."""
    words = cute.recast_ptr(memory, dtype=Int32)
    each = cute.make_layout(MAX_EXPERTS)
    total = cute.make_tensor(words + 2 * MAX_EXPERTS, cute.make_layout(1))
    return ExpertRows(cute.make_tensor(words, each), cute.make_tensor(words + MAX_EXPERTS, each), total)


@cute.jit
def fill_table(table: ExpertRows, offsets, counts, rows, lane):
    """One warp fills the table; ``offsets`` or ``counts`` may be ``None``, and the buffer has ``rows`` rows.

    A barrier has to follow.
    """
    experts = offsets.shape[0] - 1 if const_expr(counts is None) else counts.shape[0]
    share = rows // experts
    each = MAX_EXPERTS // WARP
    begins, sizes = [], []
    total = Int32(0)
    for i in range_constexpr(each):
        expert = lane * each + i
        exists = expert < experts
        begin = expert * share
        if const_expr(offsets is not None):
            begin = _load(offsets, expert, exists)
        if const_expr(counts is None):
            size = _load(offsets, expert + 1, exists) - begin
        else:
            size = _load(counts, expert, exists)
        begins.append(begin)
        sizes.append(size)
        total = total + size
    last = running_sum(total, lane)
    start = last - total
    for i in range_constexpr(each):
        expert = lane * each + i
        table.starts[expert] = ptx.select(expert < experts, start, Int32(BEYOND))
        table.shifts[expert] = begins[i] - start
        start = start + sizes[i]
    if lane == WARP - 1:
        table.total[0] = last


def _load(tensor: cute.Tensor, at, exists) -> Int32:
    return Int32(ptx.load_if(tensor.iterator + at, exists, 1)[0])


def row_of(table: ExpertRows, number) -> Int32:
    """The row of the buffer that has this number in the dense range; any, for a number beyond it."""
    expert = Int32(0)
    step = MAX_EXPERTS // 2
    while step:
        expert = ptx.select(table.starts[expert + step] <= number, expert + step, expert)
        step //= 2
    return number + table.shifts[expert]
