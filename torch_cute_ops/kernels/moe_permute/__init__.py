"""Quantise each token to FP8 once, and store it in the row of each of its experts.

``y[row] = e4m3(input[m] / scale)``, with one scale per 128 elements, for each row of token m.

Roles and data path. A thread holds 16 elements of a token, and the token's rows. It issues all its loads at once,
computes with seven neighbours the scale of their 128 elements, and stores its 16 codes to every row. A warp stores
whole cache lines. If the last block of a token holds 64 elements, four of its eight threads are idle. No shared memory
is used, and CTAs are not persistent: persistent CTAs, and bulk stores from shared memory, take 3 % longer.

Scales are stored in column-major order, and a token's rows are far apart, so each scale is an L2 request. The scales
would take a quarter of the number of requests for the codes, for a thirtieth of the bytes. Hence:

- Few tokens: one kernel stores codes and scales.
- More tokens: the first kernel stores scales once per token, in a workspace. A second kernel runs a thread for
  each row of the buffer, which reads the scales of the row's token; a warp stores the scales of 32 rows, a column at a
  time.

Bytes moved: tokens and indices read once, codes and scales written per row. With the second kernel, the tokens'
scales are written once, and read with the indices for each row, mostly from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_permute.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_permute.kernel import MoePermuteKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoePermuteKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoePermuteKernel"
__getattr__ = on_demand(__name__, "MoePermuteKernel")
