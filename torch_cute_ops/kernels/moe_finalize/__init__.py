"""Gather each token's rows from the experts' order, weight them and add them up, in one pass over memory.

Roles and data path. A CTA has one token and one *slice* of its columns. There are as many slices as it takes to fill
the device, and at most one for each *portion*, the columns that a CTA's threads process at once. A thread processes 16
bytes of columns: with the token's ``topk`` indices and weights in registers, it issues its loads from the residual and
from all ``topk`` rows before it uses the first, and stores 16 bytes of the sum. No shared memory is used; the order of
the sum is that of the experts.

CTAs are not persistent: the hardware schedules one whenever another ends, so the last wave costs the time of one token,
not of a round of the grid; and a CTA with a whole token reads its indices once.

While each CTA has one portion, the number of CTAs on the busiest SM matters. Larger CTAs are launched where they leave
that SM less work (64 tokens of 7,168, bfloat16: 2 · 224 threads instead of 4 · 128; 3.8 µs instead of 4.2 on an H200).
And with few tokens rows bypass L1 (8 tokens: 1.8 µs instead of 2.0; but 4,096 tokens: 143 instead of 139).

Bytes moved for each token: ``topk`` rows and the residual's row read, one row written, 8 · ``topk`` bytes of indices
and weights.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_finalize.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_finalize.kernel import MoeFinalizeKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoeFinalizeKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeFinalizeKernel"
__getattr__ = on_demand(__name__, "MoeFinalizeKernel")
