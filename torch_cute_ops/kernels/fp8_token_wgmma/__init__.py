"""FP8 GEMMs for Hopper, using wgmma, with one scale per row of ``a`` (token) and one per row of the weight (channel).

The GEMM is plain or grouped by expert: ``out[m, n] = a_scale[m] · b_scale[n] · (Σ_k a[m, k] · b[n, k]) + bias[n]``.

The kernel shares its structure, roles and tiles with ``fp8_wgmma``, but has no scale loaders. Scales are applied once,
after the sum over K, so the MMAs of several k tiles run without an interruption. ``b_scale`` is the epilogue's alpha.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| stages | ``a``, ``b``, record | producer | consumer warps | 1 | consumer_warps | stages |
| partial sums | ``received`` | consumers of all CTAs | consumer warps | 1 | 8 * split_k | 1 if split_k > 1 else 0 |

Tensor cores add up e4m3 products with less than fp32's precision. If all products have the same sign, their sum is too
small: by 5.7 % with K = 4,096 (measured on an H200). ``Config.fast_accum`` decides when sums leave the tensor cores:

- False: MMAs add up 512 elements of K, and these sums are added to accumulators in fp32. A sum of 512 products of the
  same sign is too small by 0.2 %.
- True: MMAs add up all of K. The registers that fp32 sums would take hold the previous tile's accumulators until these
  are stored.

Bytes moved: The weight of each expert that owns rows is read once per row tile. ``a`` is read once per column tile,
mostly from L2. The result is written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.common.fp8.layouts import MANY
from torch_cute_ops.kernels.fp8_token_wgmma.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_token_wgmma.kernel import FP8TokenWgmmaKernel

__all__ = ["KERNEL", "MANY", "TILES", "Arguments", "Config", "FP8TokenWgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8TokenWgmmaKernel"
__getattr__ = on_demand(__name__, "FP8TokenWgmmaKernel")
