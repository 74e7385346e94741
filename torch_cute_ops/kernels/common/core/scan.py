"""Running sums over the lanes of a warp, and over the threads of a CTA."""

import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx

WARP = 32


def running_sum(value: Int32, lane: Int32) -> Int32:
    """The sum of ``value`` over this lane and those below it; all lanes take part."""
    for i in range(5):
        above = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = value + ptx.select(lane >= (1 << i), above, Int32(0))
    return value


@cute.jit
def running_sum_of_cta(value: Int32, sums: cute.Tensor, tid, warps: int):
    """The sum of ``value`` over this thread and those below it, of whole ``warps``; all threads come here.

    ``sums`` is shared memory for one number a warp, which threads may read until the CTA has met again.
    """
    lane, warp = tid % WARP, tid // WARP
    value = running_sum(value, lane)
    if lane == WARP - 1:
        sums[warp] = value
    cute.arch.sync_threads()
    for i in range_constexpr(warps - 1):
        value = value + ptx.select(warp > i, sums[i], Int32(0))
    return value
