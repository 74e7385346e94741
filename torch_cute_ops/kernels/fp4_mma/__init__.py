"""GEMM with an FP4 weight, with mma.sync, for every GPU: ``out[m, n] = epilogue(Σ_k a[m, k] · b[n, k])``.

The kernel is made for few rows of ``a``, when reading ``b`` limits the speed. The weight is on the M side of the MMAs
(16 rows of ``b`` per MMA), and the activations are on the N side (8 rows of ``a`` per MMA). Nothing is repacked in
memory.

Roles and data path. A CTA consists of 8 warps. It computes 128 rows of ``b`` by ``tile_m`` rows of ``a``. The
``split_k`` CTAs of a cluster divide k into contiguous ranges of k tiles of 256 elements.

1. All threads copy k tiles to shared memory by ``cp.async``, with ``stages`` k tiles in flight. A k tile consists of
   128 x 128 bytes of codes, the scales of their 128 x 16 (NVFP4) or 128 x 8 (MXFP4) blocks, and the activations. The
   layouts in shared memory are the same as in global memory. Elements beyond a matrix become zeros. The kernel uses
   barriers of the CTA and no mbarriers.
2. A warp multiplies 16 rows of ``b``. Four lanes share a row. In each 128 elements of k, each of these lanes reads 32
   contiguous elements, 16 bytes of codes, which eight MMAs with K = 16 multiply: each MMA uses four of a lane's
   elements. This changes the order of k, which does not matter as long as both operands have the same order. ``decode``
   converts codes to 16-bit numbers and multiplies them by the scales.
3. Each thread rearranges the activations that it copied into the same order, in place, one k tile before they are
   multiplied.
4. Each CTA stores its partial sums in shared memory. The CTAs of the cluster divide the rows of ``a`` among them. Each
   CTA adds up the partial sums of its rows in the order of k, and applies the epilogue. A row of the result thus
   depends only on ``split_k``, not on M or on other rows.

If both operands are FP4 and the GPU has block-scaled MMAs, ``native.py`` replaces steps 2 and 3: nothing is decoded or
rearranged. A warp multiplies codes of 64 elements of k at once, and the MMA applies both operands' scales.

Bytes moved: ``b`` and its scales are read once per m tile. ``a`` is read from L2 once per 128 rows of ``b``.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_mma.config import K_TILE, TILE_N, TILES_M, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_mma.kernel import FP4MmaKernel

__all__ = ["KERNEL", "K_TILE", "TILES_M", "TILE_N", "Arguments", "Config", "FP4MmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4MmaKernel"
__getattr__ = on_demand(__name__, "FP4MmaKernel")
