"""The experts of each token, and where each token's rows lie in the experts' buffer.

Roles and data path. A warp takes a token: each lane has up to 16 experts next to each other, so that a group of experts
is whole lanes, as keys: 32-bit integers in the order of the choice. (Where the number of groups is no power of two, a
lane has up to 30, and keys are spilled to local memory: up to 2 KB a thread.) ``topk`` times the warp takes the largest
key, and of equal ones the first, by two warp-wide reductions.

A row's place is how many tokens before it chose the same expert. A CTA has a run of tokens, and takes ``CHUNK`` of them
at a time: the warps set a bit for each choice in a bitmap (experts by tokens) in shared memory; a pair's rank is then
a count of bits. No order of events changes a result.

- Few tokens: one CTA does it all, in one launch.
- More: a CTA of the first kernel has one run, leaves each pair's rank in its run in ``expanded``, and how many tokens
  of the run are for each expert in a workspace. A CTA of the second kernel has the same run, adds up the counts of the
  runs before it, and of all, and gives each pair its row.

Each expert's rows begin behind a running sum over the experts' counts, rounded up; or, masked, at equal distances. The
CTAs share out the rows without a pair, which become -1.

Bytes moved: the logits read; 8 bytes written a pair, 4 for its place, 4 for each row; a word a pair and a word for each
CTA and expert written and read again.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_route.config import Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_route.kernel import MoeRouteKernel

__all__ = ["KERNEL", "Config", "MoeRouteKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeRouteKernel"
__getattr__ = on_demand(__name__, "MoeRouteKernel")
