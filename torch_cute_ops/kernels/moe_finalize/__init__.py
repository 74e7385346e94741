"""For each token, gather the rows that its experts computed, and add up the rows times their weights, in one pass.

``out[m] = residual[m] + Σ_j weights[m, j] · input[row of pair (m, j)]``.

Roles and data path. A CTA computes one *slice* of the columns of one token. The number of slices is chosen so that the
CTAs fill the GPU, with at least one *round* of columns per slice. A round consists of the columns that a CTA's threads
process at once. A thread processes 16 bytes of columns. The thread holds the token's ``topk`` indices and weights in
registers. It issues its loads from the residual and from up to 16 rows before it uses any loaded value, and stores 16
bytes of the sum. No shared memory is used. Rows are added in the order of the token's experts.

CTAs are not persistent: the hardware schedules a new CTA whenever a CTA ends. So, at the end of a launch, an SM is idle
for at most about the time of one CTA. If one CTA computes a whole token, the token's indices are read only once.

If each CTA runs one round, the busiest SM determines the time of the launch. The kernel uses larger CTAs if this
reduces the work of the busiest SM. On an H200, 64 tokens of 7,168 bfloat16 take 3.8 µs with CTAs of 224 threads (two on
the busiest SM), and 4.2 µs with CTAs of 128 threads (four on the busiest SM). With few tokens, loads of rows bypass L1:
on an H200, 8 tokens take 1.8 µs if loads bypass L1 and 2.0 µs if they do not, whereas 4,096 tokens would take 143 µs
and 139 µs.

Bytes moved per token: ``topk`` rows and the residual's row are read, one row is written, and 8 · ``topk`` bytes of
indices and weights are read.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_finalize.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_finalize.kernel import MoeFinalizeKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoeFinalizeKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeFinalizeKernel"
__getattr__ = on_demand(__name__, "MoeFinalizeKernel")
