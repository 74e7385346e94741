"""Search for the expert that owns an index, such as a row, and running sums, by the threads of a warp or a CTA.

A table in shared memory contains the start of each expert. An expert owns the indices from its start to before the next
expert's start. A table has room for ``layouts.table_experts`` experts.
"""

import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx

WARP = 32


def running_sum(value: Int32, lane: Int32) -> Int32:
    """Return the sum of ``value`` over this lane and the lanes below it. All lanes take part."""
    for i in range(5):
        above = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = value + ptx.select(lane >= (1 << i), above, Int32(0))
    return value


@cute.jit
def running_sum_of_cta(value: Int32, sums: cute.Tensor, tid, warps: int):
    """Return the sum of ``value`` over this thread and the threads below it, in ``warps`` whole warps.

    All threads call this. ``sums`` is shared memory with a word per warp. Threads may read ``sums`` until the CTA
    synchronises again.
    """
    lane, warp = tid % WARP, tid // WARP
    value = running_sum(value, lane)
    if lane == WARP - 1:
        sums[warp] = value
    cute.arch.sync_threads()
    for i in range_constexpr(warps - 1):
        value = value + ptx.select(warp > i, sums[i], Int32(0))
    return value


def expert_by_votes(starts: cute.Tensor, number, lane, max_experts: int) -> Int32:
    """Return the last expert that starts at or before ``number``, which is equal in all lanes of the warp. Takes two
    loads.

    ``max_experts``: number of experts for which the table has room.
    """
    span_experts = max_experts // WARP
    votes = cute.arch.vote_ballot_sync(starts[lane * span_experts] <= number)
    span = (Int32(cute.arch.popc(votes)) - 1) * span_experts
    within = starts[span + lane % span_experts] <= number
    votes = cute.arch.vote_ballot_sync(within & (lane < span_experts))
    return span + Int32(cute.arch.popc(votes)) - 1


def expert_by_bisection(starts: cute.Tensor, number, max_experts: int) -> Int32:
    """Return the last expert that starts at or before ``number``, which may differ between threads. Takes nine or ten
    dependent loads.

    ``max_experts``: number of experts for which the table has room.
    """
    expert = Int32(0)
    step = max_experts // 2
    while step:
        expert = ptx.select(starts[expert + step] <= number, expert + step, expert)
        step //= 2
    return expert
