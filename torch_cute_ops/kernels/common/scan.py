"""Running sums over the lanes of a warp."""

import cutlass.cute as cute
from cutlass import Int32

from torch_cute_ops.kernels.common import ptx


def running_sum(value: Int32, lane: Int32) -> Int32:
    """The sum of ``value`` over this lane and those below it; all lanes take part."""
    for i in range(5):
        above = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = value + ptx.select(lane >= (1 << i), above, Int32(0))
    return value
