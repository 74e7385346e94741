"""Tokens in the experts' order, in FP8: each read and quantised once, and stored in as many places as it has experts.

A thread takes 16 elements of a token, and the token's places: it starts all its loads at once, finds with seven
neighbours the scale of their 128 elements, and stores its 16 codes in every place, whole lines with its warp. Nothing
is shared, and CTAs end with their elements: CTAs that stay, or store in bulk from shared memory, take 3 % longer.

Scales lie by columns, and a token's places are far apart: stored as they are computed, each is a request of its own to
L2, a quarter as many as there are of codes, for a thirtieth of the bytes. So:

- Few tokens: so all the same, since it is one launch.
- More: scales are stored once for each token, in a workspace; then threads for each row of the buffer read its token's
  scales, and a warp stores 32 rows' scales of a column at a time.

Bytes moved: tokens and indices read once, codes and scales written for each place; more than few tokens: the tokens'
scales written, and these and indices read for each place, mostly from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_permute.config import Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_permute.kernel import MoePermuteKernel

__all__ = ["KERNEL", "Config", "MoePermuteKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoePermuteKernel"
__getattr__ = on_demand(__name__, "MoePermuteKernel")
