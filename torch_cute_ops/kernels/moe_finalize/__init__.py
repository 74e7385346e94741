"""A token's rows out of the experts' order: gathered, weighted and added up, in one pass over memory.

Roles and data path. A CTA has one token and one *slice* of its columns. There are as many slices as fill the device,
and at most one for each *portion*, which is what a CTA's threads take at once. A thread takes 16 bytes of columns: it
has the token's ``topk`` indices and weights in registers, starts its loads from the residual and all ``topk`` rows
before it uses the first, and stores 16 bytes of the sum. Nothing is shared; sums are in the order of ``j``.

CTAs are not persistent: the hardware deals them out as others end, so a last round costs a token's time, not a round
of the grid's; and a CTA with a whole token reads its indices once.

While CTAs have one portion each it counts how many of them the busiest multiprocessor gets: where CTAs of more threads
leave it less to do, they are taken (64 tokens of 7,168, bfloat16: two times 224 threads, not four times 128; 3.8 in
place of 4.2 µs on an H200). And rows of few tokens are read past L1 (8 tokens: 1.8 in place of 2.0 µs; but 4,096 would
take 143 in place of 139).

Bytes moved a token: ``topk`` rows read, and the residual's; one row written; 8 · ``topk`` bytes of indices and weights.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_finalize.config import Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_finalize.kernel import MoeFinalizeKernel

__all__ = ["KERNEL", "Config", "MoeFinalizeKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeFinalizeKernel"
__getattr__ = on_demand(__name__, "MoeFinalizeKernel")
