"""Search for the expert that owns an index (for example, of a row), and running sums over the threads of a warp or a
CTA.

A table in shared memory contains the first index of each expert. An expert owns the indices from its first index up to,
but not including, the next expert's first index. A table has room for ``layouts.table_experts`` experts.
"""

import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx

WARP = 32


def running_sum(value: Int32, lane: Int32) -> Int32:
    """Return the sum of ``value`` over this lane and all lower lanes. All lanes of the warp must call this function."""
    for i in range(5):
        above = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = value + ptx.select(lane >= (1 << i), above, Int32(0))
    return value


@cute.jit
def running_sum_of_cta(value: Int32, sums: cute.Tensor, tid, warps: int):
    """Return the sum of ``value`` over this thread and all threads with a lower index, in a CTA of ``warps`` warps.

    All threads of the CTA call this function. ``sums`` is shared memory with one word per warp. The caller must
    synchronise the CTA before it overwrites ``sums``.
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
    """Return the last expert whose first index is at or before ``number``, by votes of a warp. ``number`` must be equal
    in all lanes.

    The search takes two loads. ``max_experts`` is the capacity of the table ``starts``.
    """
    span_experts = max_experts // WARP
    votes = cute.arch.vote_ballot_sync(starts[lane * span_experts] <= number)
    span = (Int32(cute.arch.popc(votes)) - 1) * span_experts
    within = starts[span + lane % span_experts] <= number
    votes = cute.arch.vote_ballot_sync(within & (lane < span_experts))
    return span + Int32(cute.arch.popc(votes)) - 1


def expert_by_bisection(starts: cute.Tensor, number, max_experts: int) -> Int32:
    """Return the last expert whose first index is at or before ``number``, by bisection. ``number`` may differ between
    threads.

    The search takes nine or ten dependent loads. ``max_experts`` is the capacity of the table ``starts``.
    """
    expert = Int32(0)
    step = max_experts // 2
    while step:
        expert = ptx.select(starts[expert + step] <= number, expert + step, expert)
        step //= 2
    return expert
