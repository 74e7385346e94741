"""A product with FP4 weights by warp-level tensor-core instructions: ``out[m, n] = alpha · Σ_k a[m, k] · b[n, k]``.

For few rows of ``a``, where the bytes of ``b`` take the time. The weights are the instruction's M side (16 rows of
``b`` each), the activations its N side (8 rows of ``a``); nothing is repacked, in memory or in advance.

Roles and data path. A CTA has 8 warps and owns 128 rows of ``b`` and one tile of rows of ``a``; the k dimension is
dealt out to the CTAs of a cluster (``splits``) in contiguous portions of whole chunks of 256.

1. All threads copy chunks to shared memory with ``cp.async``, ``stages`` of them under way: 128 x 128 bytes of codes,
   the scales of the same 128 x 16 (or 8) blocks, and the activations, all as they lie in memory. What is beyond a
   matrix becomes zeros.
2. A warp has 16 rows of ``b``. Within 128 elements of k, each of the four lanes that share a row takes 32 in a row, 16
   bytes of codes; k is in any order as long as both operands agree, so the lane's eight steps of k take four of its
   elements each. Codes become 16-bit numbers by moving bits, times the block's scale (see ``decode``).
3. Activations are put into the same order one chunk ahead, by the thread that copied them, where they lie.
4. Each CTA leaves its sums in shared memory; the CTAs of the cluster share out the rows of ``a``, and add up the parts
   in the order of k. So a row of the result depends on ``splits`` alone, not on M or on what else is computed.

Bytes moved: ``b`` and its scales once for each tile of rows of ``a``; ``a`` once for each 128 rows of ``b``, from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_mma.config import CHUNK, ROWS, TOKEN_TILES, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_mma.kernel import FP4MmaKernel

__all__ = ["CHUNK", "KERNEL", "ROWS", "TOKEN_TILES", "Config", "FP4MmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4MmaKernel"
__getattr__ = on_demand(__name__, "FP4MmaKernel")
