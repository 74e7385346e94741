"""Quantise each token to FP8 once, and store the result in the rows of all its experts.

``y[row] = e4m3(input[m] / scale)``, with one scale per 128 elements, for each row of token m.

Roles and data path. A thread holds 16 elements of a token, and the indices of the token's rows. The thread issues all
loads at once. Together with seven neighbouring threads, the thread computes the scale of a block of 128 elements. The
thread stores its 16 codes in every row of the token. A warp stores whole cache lines. If the last block of a token
holds 64 elements, four of its eight threads are idle. No shared memory is used. CTAs are not persistent, because
persistent CTAs, and bulk stores from shared memory, take 3 % longer.

Scales are stored in column-major order, and a token's rows are far apart, so each scale is a separate L2 request. The
scales take 1/32 as many bytes as the codes, but 1/4 as many requests. To save requests, the number of launches depends
on the number of tokens:

- Few tokens: one kernel stores codes and scales.
- More tokens: the first kernel stores each token's scales once, in a workspace. In a second kernel, one thread per row
  of the buffer copies the scales of the row's token. A warp then stores the scales of 32 rows, a column at a time.

Bytes moved: tokens and indices are read once, and codes and scales are written for each row. With the second kernel,
each token's scales are also written once to the workspace, and read once per row together with the indices, mostly from
L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_permute.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_permute.kernel import MoePermuteKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoePermuteKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoePermuteKernel"
__getattr__ = on_demand(__name__, "MoePermuteKernel")
