"""A GEMM with an FP4 weight by mma.sync, for every GPU: ``out[m, n] = Σ_k a[m, k] · b[n, k]``, through an epilogue.

For few rows of ``a``, where reading ``b`` takes the time. The weight is on the M side of the MMAs (16 rows of ``b``
each), the activations on the N side (8 rows of ``a``); nothing is repacked, in memory or in advance.

Roles and data path. A CTA has 8 warps, 128 rows of ``b`` and one tile of rows of ``a``. The CTAs of a cluster
(``splits``) divide k into contiguous ranges of whole chunks of 256.

1. All threads copy chunks to shared memory by ``cp.async``, ``stages`` of them in flight: 128 x 128 bytes of codes, the
   scales of the same 128 x 16 (or 8) blocks, and the activations, each in its layout in memory. What lies beyond a
   matrix becomes zeros.
2. A warp has 16 rows of ``b``. Of each 128 elements of k, each of the four lanes that share a row has 32 contiguous
   ones, 16 bytes of codes. The order of k does not matter as long as both operands agree on it: each of the lane's
   eight k16 steps takes four of its elements. ``decode`` turns codes into 16-bit numbers, scale included.
3. The thread that has copied activations rearranges them in place into the same order, one chunk ahead.
4. Each CTA leaves its sums in shared memory. The CTAs of the cluster divide the rows of ``a`` among them, add up the
   parts in the order of k, and apply the epilogue. So a row of the result depends on ``splits`` alone, not on M or on
   what else is computed.

Where both operands are FP4 and the GPU has block-scaled MMAs, ``native.py`` replaces steps 2 and 3: nothing is decoded
or rearranged. A warp multiplies codes of 64 elements of k at once, and the MMA applies both operands' scales.

Bytes moved: ``b`` and its scales once for each tile of rows of ``a``; ``a`` once for each 128 rows of ``b``, from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_mma.config import CHUNK, ROWS, TOKEN_TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_mma.kernel import FP4MmaKernel

__all__ = ["CHUNK", "KERNEL", "ROWS", "TOKEN_TILES", "Arguments", "Config", "FP4MmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4MmaKernel"
__getattr__ = on_demand(__name__, "FP4MmaKernel")
