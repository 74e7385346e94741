"""MXFP8 GEMMs for Hopper, with wgmma, plain or grouped by expert.

``out[m, n] = epilogue(Σ_j a_scale[j, m] · 2^t[n, j] · (Σ_{k of group j} a[m, k] · w[n, k]))``, with groups of 128
elements. Hopper's MMAs apply no scales, and scaling the results of each 32 elements in fp32 takes longer than the MMAs.
So both operands are *folded*: the four scales of each group become one (``kernels.mxfp8_fold``). ``mxfp8_fold`` folds
``a`` before this kernel. Decoder warps fold the weight, ``w``, in shared memory.

Roles. A CTA consists of two consumer warpgroups, one producer warp, three scale-loader warps, and two to four groups of
decoder warps. Consumers, tiles and clusters are as in ``kernels.fp8_wgmma``.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copies | ``a``, weight codes, scales, record | producer, scale loader | decoders | 2 | - | stages |
| stages | ``a``, folded weight, scales | decoders | consumer warps | decoded_arrivals | consumer_warps | stages |
| partial sums | ``received`` | consumers of all CTAs | consumer warps | 1 | 8 * split_k | 1 if split_k > 1 else 0 |

1. The producer copies a k tile (128 elements) of ``a`` and of the weight to a stage. A scale loader loads the scales of
   the rows of ``a``, and a word of four scale bytes for each weight row. It stores the largest of the four scales, as
   fp32, and the differences of the exponents.
2. The decoder groups take turns at the stages. A thread folds a weight row in place: it multiplies each block of 32
   elements by a power of two and rounds the products to e4m3.
3. A consumer multiplies the results of a k tile by the weight rows' scales, and releases the stage. It then multiplies
   them by the scales of the rows of ``a``, and adds them to accumulators in fp32.

Bytes moved: The same bytes as in ``fp8_wgmma``, and a byte per 32 elements of the weight instead of its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.common.fp8.layouts import MANY
from torch_cute_ops.kernels.mxfp8_wgmma.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.mxfp8_wgmma.kernel import MXFP8WgmmaKernel

__all__ = ["KERNEL", "MANY", "TILES", "Arguments", "Config", "MXFP8WgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.MXFP8WgmmaKernel"
__getattr__ = on_demand(__name__, "MXFP8WgmmaKernel")
