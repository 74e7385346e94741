"""FP8 GEMMs for every GPU, by mma.sync, plain or grouped by expert.

With block scales, ``out[m, n] = epilogue(Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n,
k]))``, or with ``b_scale[n, j]`` if ``Config.scales_by_row``. With per-token scales, ``out[m, n] = epilogue(a_scale[m]
· Σ_k a[m, k] · b[n, k])``, where the weight's scales are the epilogue's alpha. With MXFP8, the sum of each 32 elements
is multiplied by ``a_scale[m, k / 32] · b_scale[n, k / 32]``.

Roles. Four or eight warps share a tile of 16 or 64 rows of ``a`` (MXFP8: 16, 32 or 64; scales of weight rows: 16 or 32)
and 128 rows of ``b``. CTAs are persistent and compute tiles in the order of ``common.fp8.tiles``. A k tile spans 128
elements; the last k tile may span 64. While the warps multiply the current k tile, each thread copies parts of the next
k tiles into the stages by ``cp.async``. The results of a k tile are multiplied by both scales, unless the scales are
per token, and added to accumulators in fp32. With MXFP8, the result of each MMA is multiplied and added. A lane first
loads one word, of four scales, for each of its rows and columns. Per-token scales multiply the accumulators at the end.
The epilogue is applied to the accumulators. The results are stored in whole cache lines, only in rows that the expert
owns. The kernel uses no mbarriers.

With split-K, the ``split_k`` CTAs of a cluster share a tile, and each computes an equal range of its k tiles. All CTAs
except rank 0 store their accumulators in their stages. Between two barriers of the cluster, rank 0 adds them in the
order of the ranks, and then stores the results.

A lane reads 16 bytes (four words) of a row at once, and uses each word in a different MMA with K = 32. The order in
which the elements of a k tile are multiplied thus differs from their order in memory. The order of multiplication is
the same for both operands. With MXFP8, a lane reads 8 bytes at once, and each MMA multiplies 32 neighbouring elements.

On GPUs whose ``mma.sync`` takes block scales, these MMAs apply the scales of MXFP8 and add to the accumulators, and
nothing is promoted. Each thread loads one or two words of scales, one k tile ahead, and stores them in one of two slots
in shared memory. A lane reads one word for each 32 rows or columns of its warp from the slot, and ``ldmatrix`` reads
the operands.

Bytes moved: The weight of each expert that owns rows is read once per row tile. ``a`` is read once per column tile,
mostly from L2. The result is written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_mma.config import (
    MX_TILES,
    SCALED_TILES,
    SPLIT_K,
    TILE_N,
    TILES,
    Arguments,
    Config,
    mx_tiles,
    plan,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_mma.kernel import FP8MmaKernel

__all__ = [
    "KERNEL",
    "MX_TILES",
    "SCALED_TILES",
    "SPLIT_K",
    "TILES",
    "TILE_N",
    "Arguments",
    "Config",
    "FP8MmaKernel",
    "mx_tiles",
    "plan",
]

KERNEL = f"{__name__}.kernel.FP8MmaKernel"
__getattr__ = on_demand(__name__, "FP8MmaKernel")
