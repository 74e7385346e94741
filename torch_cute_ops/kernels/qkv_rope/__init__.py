"""Normalise and rotate the heads of q and k, and write k and v to the slots of paged caches, in one launch.

A row of the input contains the heads of q, of k and of v. Each head of q and k is optionally RMS-normalised, and its
first elements are rotated in pairs. q is stored in a tensor, k and v in slots of the caches. All three are stored in 16
bits, in FP8 with a static scale, or (k and v) in NVFP4.

Roles and data path. A head is divided into vectors of 8 elements, and each lane holds one vector of a head. The number
of lanes per head is the smallest power of two that covers the head (16 lanes for 128 elements), so a warp holds one to
four heads at a time. All warps have the same role: a warp processes neighbouring heads of one kind (q, k or v) of one
row. It loads 16 bytes per lane, the row's position and slot, and the cosines and sines of the position. Each lane
stores 16 bytes of 16-bit elements, 8 bytes of FP8, or 4 bytes of NVFP4 codes. No shared memory is used: a warp adds
squares by shuffles, and a lane receives the other element of a rotated pair by a shuffle unless the pair is
interleaved.

The number of heads that a lane holds at once depends on the number of rows:

- Few rows: one head. The work is then spread over as many warps as possible, and the launch takes the time of three
  loads that depend on each other.
- More rows: up to four heads at once. The loads of these heads are issued together. The cosines, the sines and the
  weight of the RMSNorm are then loaded once for these heads.

CTAs are not persistent: the hardware schedules a new CTA whenever a CTA ends. The sum of squares is computed as a
balanced binary tree over the elements of a head, so its bits depend neither on the number of rows nor on the number of
heads that a lane holds at once.

Bytes moved per row: the heads of q, k and v are read once and written once, in their dtypes; one row of cosines and
sines, the position and the slot are read.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.qkv_rope.config import Arguments, Config, QkvRopeSpec, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.qkv_rope.kernel import QkvRopeKernel

__all__ = ["KERNEL", "Arguments", "Config", "QkvRopeKernel", "QkvRopeSpec", "plan"]

KERNEL = f"{__name__}.kernel.QkvRopeKernel"
__getattr__ = on_demand(__name__, "QkvRopeKernel")
