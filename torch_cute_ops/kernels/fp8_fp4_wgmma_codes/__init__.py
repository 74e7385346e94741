"""FP8 x MXFP4 GEMMs of few rows for Hopper: wgmma multiplies the weight's codes, and the scales are applied to the
sums.

The GEMM is plain or grouped by expert. The activations have block scales. ``out[m, n] = epilogue(Σ_j a_scale[j, m] ·
(Σ_b 2^s[n, b] · (Σ_{k of b} a[m, k] · code[n, k])))``. ``j`` is a k tile, and ``b`` is one of its scale blocks of 32
elements. ``reference.mm_fp8_fp4`` defines the result. By this definition, some codes are rounded (see step 4 below).

Roles. A CTA consists of two consumer warpgroups, one producer warp, three scale-loader warps, and two groups of two
decoder warps. Tiles (with the weight on the M side) and clusters are as in ``kernels.fp8_wgmma``.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copies | ``a``, codes, scales, record | producer, scale loader | decoders | 2 | - | stages |
| stages | rearranged ``a``, rounded codes | decoders | consumer warps | decoded_arrivals | consumer_warps | stages |
| partial sums | ``received`` | consumers of all CTAs | consumer warps | 1 | 8 * split_k | 1 if split_k > 1 else 0 |

1. The producer copies ``a`` and the weight's codes. A stage holds two k tiles: 128 bytes of codes per weight row. The
   scale loaders load the block scales and store them as fp32 factors.
2. The two decoder groups take turns at the stages. Each of a group's two warps rearranges a k tile of ``a``: in each
   run of 32 elements, it moves the even elements before the odd elements, because consumers extract the codes of a word
   in that order.
3. Consumers convert codes to e4m3 numbers by shifts and masks, without applying scales: the bits of an e2m1 number,
   moved to the right place in an e4m3 number, represent the value times 2^-6. The e4m3 numbers are the A operand, in
   registers. The K of an MMA is a scale block. Each block uses separate accumulators, which are multiplied by the
   block's factors and added to the tile's accumulators.
4. By definition, the numbers of a k tile are rounded to e4m3 after division by the k tile's unit ``2^t``. The rounding
   changes a number only if its block's scale is less than 2^-14 times the largest scale of the k tile. Decoders replace
   the codes of such a block by rounded codes with a larger scale.

With few rows of ``a``, a block has few accumulators, and scaling these accumulators takes less time than computing
look-up tables of scaled codes, as ``kernels.fp8_fp4_wgmma_ss`` does. NVFP4 weights are not supported: for five of the
eight significands of an e4m3 scale, the definition rounds the products with the codes 1.5, 3 and 6, and rounded
products cannot be computed from sums of codes.

Bytes moved: The kernel moves the same bytes as ``fp8_wgmma``, except that the weight takes half the bytes, plus its
block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_wgmma_codes.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_wgmma_codes.kernel import FP8FP4WgmmaCodesKernel

__all__ = ["KERNEL", "TILES", "Arguments", "Config", "FP8FP4WgmmaCodesKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4WgmmaCodesKernel"
__getattr__ = on_demand(__name__, "FP8FP4WgmmaCodesKernel")
