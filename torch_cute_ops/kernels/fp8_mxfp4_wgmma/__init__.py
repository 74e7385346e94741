"""GEMMs of few rows of FP8 activations with block scales and an MXFP4 weight by wgmma, plain or grouped by expert. For
Hopper: ``out[m, n] = Σ_j a_scale[j, m] · (Σ_b 2^s[n, b] · (Σ_{k of b} a[m, k] · code[n, k]))``, with the blocks ``b``
of 32 elements of a K block ``j``, through an epilogue. That is ``reference.mm_fp8_fp4``, by whose definition a code may
have to be rounded.

All is as in ``kernels.fp8_wgmma``, whose tiles with the weight on the M side, ring and clusters these are, but for the
weight:

1. The producer copies its codes, 64 bytes a row and K block. The scale warps load its block scales and leave them as
   fp32 factors.
2. Two teams of helpers take stages in turn. Each of a team's two warps has a K block, in which it moves the even
   elements of each 32 of the activations before the odd ones: the codes of a word are decoded in that order.
3. Consumers take codes to e4m3 by shifts and masks, without their scale: e2m1 is e4m3 with other fields of exponent and
   mantissa, in units of 2^-6. They are the A operand, in registers. The k of an MMA is a block, whose sums are
   accumulators of their own, and are added up with the factors.
4. By definition numbers are over ``2^t`` of their K block in e4m3, which rounds codes of blocks whose scale is more
   than 2^14 below its largest. In such a K block helpers round these codes, to codes of a larger scale.

With few rows a block has few sums: scaling them takes less than scaling codes, or making tables for look-ups, as
``kernels.fp8_fp4_wgmma`` does. With NVFP4 almost every code of 1.5, 3 or 6 would be rounded.

Bytes moved: as ``fp8_wgmma``, with half of the weight, and its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_mxfp4_wgmma.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_mxfp4_wgmma.kernel import FP8MXFP4WgmmaKernel

__all__ = ["KERNEL", "TILES", "Arguments", "Config", "FP8MXFP4WgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8MXFP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8MXFP4WgmmaKernel")
