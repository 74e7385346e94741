"""FP8 x FP4 GEMMs for every GPU, with mma.sync, plain or grouped by expert. The weight is decoded in registers.

``w8`` is the weight in e4m3 (``reference.mm_fp8_fp4``). With block scales of ``a``, ``out[m, n] = epilogue(Σ_j
a_scale[j, m] · 2^t[n, j] · (Σ_{k of block j} a[m, k] · w8[n, k]))``. With per-token scales, the weight's scales are
prepared (``formats.prepared_scales``), and ``out[m, n] = epilogue(a_scale[m] · 2^u[n] · Σ_k a[m, k] · w8[n, k])``.

The kernel shares its tiles, pipeline, MMAs, promotion and epilogue with ``kernels.fp8_mma`` (``common.fp8.warp_gemm``).
Roles:

1. Eight warps share a tile of 16 or 64 rows of ``a`` and 128 rows of the weight. Each warp multiplies all rows of ``a``
   by 16 weight rows, so that each weight row is decoded once. All threads copy activations (128 bytes per row of ``a``
   and k tile) and codes (64 bytes per weight row) into the stages by ``cp.async``.
2. Each of the first 128 threads loads the scales of one weight row, one k tile ahead. Before the k tile is multiplied,
   the thread stores each scale in one of two slots in shared memory, in float16 and divided by the row's unit. The unit
   is ``2^t``, or the prepared unit ``2^u``. With block scales, the thread also stores ``2^t``.
3. Of the four lanes that share a weight row, each decodes a quarter of the row's k tile: 16 bytes of codes, that is,
   one MXFP4 block or two NVFP4 blocks. The lane computes a table of eight e4m3 bytes for each block, and looks up four
   codes by one PRMT.
4. With per-token scales, each k tile's MMA results are added to accumulators in fp32. With block scales, the results
   are first multiplied by the scales of the rows of ``a`` and by the weight rows' ``2^t``.

Activations may be interleaved along k (``formats.interleave``) with per-token scales. A k tile then consists of every
second run of 32 elements, in the order in which ``ldmatrix`` distributes words among lanes.

Bytes moved: The codes and scales of each expert that owns rows are read once per row tile. ``a`` is read once per
column tile, mostly from L2. The result is written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_mma.config import TILE_N, TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_mma.kernel import FP8FP4MmaKernel

__all__ = ["KERNEL", "TILES", "TILE_N", "Arguments", "Config", "FP8FP4MmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4MmaKernel"
__getattr__ = on_demand(__name__, "FP8FP4MmaKernel")
