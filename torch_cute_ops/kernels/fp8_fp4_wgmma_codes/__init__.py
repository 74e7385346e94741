"""GEMMs of few rows of FP8 activations with block scales and codes of an MXFP4 weight by wgmma, plain or grouped by
expert. For Hopper: ``out[m, n] = Σ_j a_scale[j, m] · (Σ_b 2^s[n, b] · (Σ_{k of b} a[m, k] · code[n, k]))`` through an
epilogue, with the scale blocks ``b`` of 32 elements of a k tile ``j``. That is ``reference.mm_fp8_fp4``, by whose
definition a code may have to be rounded.

Roles. A CTA consists of two consumer warpgroups, one producer warp, three scale-loader warps, and two teams of two
decoder warps. Tiles (with the weight on the M side) and clusters are as in ``kernels.fp8_wgmma``.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copies | ``a``, codes, scales, record | producer, scale loader | decoders | 2 | - | stages |
| stages | rearranged ``a``, rounded codes | decoders | consumer warps | decoded_arrivals | consumer_warps | stages |
| partial sums | ``received`` | consumers of all CTAs | consumer warps | 1 | 8 * split_k | 1 if split_k > 1 else 0 |

1. The producer copies ``a`` and the weight's codes, 128 bytes a row and stage, which is two k tiles. The scale loaders
   load the block scales and store them as fp32 factors.
2. Two teams of decoders take the stages in turn. Each of a team's two warps takes a k tile, in which it moves the even
   elements of each 32 of ``a`` before the odd ones: the codes of a word are extracted in that order.
3. Consumers turn codes into e4m3 numbers by shifts and masks, without their scale: e2m1 is e4m3 with other fields of
   exponent and mantissa, in units of 2^-6. The numbers are the A operand, in registers. The K of an MMA is a scale
   block. Each block uses separate accumulators, which are added up with the factors.
4. By definition, numbers are over ``2^t`` of their k tile in e4m3, which rounds codes of blocks whose scale is more
   than 2^14 below the largest. In such a k tile decoders round these codes, to codes of a larger scale.

With few rows of ``a`` a block has few accumulators: scaling them takes less time than scaling codes, or making tables
for look-ups, as ``kernels.fp8_fp4_wgmma_ss`` does. With NVFP4 almost every code of 1.5, 3 or 6 would be rounded.

Bytes moved: as in ``fp8_wgmma``, with half of the weight, and its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_wgmma_codes.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_wgmma_codes.kernel import FP8FP4WgmmaCodesKernel

__all__ = ["KERNEL", "TILES", "Arguments", "Config", "FP8FP4WgmmaCodesKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4WgmmaCodesKernel"
__getattr__ = on_demand(__name__, "FP8FP4WgmmaCodesKernel")
