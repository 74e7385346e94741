"""FP8 GEMMs with block scales for Hopper, with wgmma, plain or grouped by expert.

``out[m, n] = epilogue(Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n, k]))``

``Config.weight_scales`` replaces ``b_scale[n / 128, j]`` by ``b_scale[n, j]`` (``"rows"``), or by 1 (``"alpha"``). The
epilogue's alpha then contains a scale for each weight row.

Roles. A CTA consists of three warpgroups: two of consumers, and one of a producer warp and three scale-loader warps.
CTAs are persistent and compute tiles in the order of ``common.fp8.tiles``. The copies of the next tile start while the
current tile is multiplied.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| stages | ``a``, ``b``, scales, record | producer, scale loader | consumer warps | 2 | consumer_warps | stages |
| partial sums | ``received`` | consumers of all CTAs | consumer warps | 1 | 8 * split_k | 1 if split_k > 1 else 0 |

1. The producer fills the stages. A stage holds a k tile (128 elements of each of the tile's rows of ``a`` and ``b``)
   and its scales. TMA copies the k tile in boxes with the 128-byte swizzle. The stage's full barrier counts the bytes.
   The last k tile may have 64 elements; TMA then fills the other 64 elements of the stage with zeros. The producer also
   finds the CTA's tiles, and records in each stage which tile the stage belongs to. The scale loaders take turns at the
   k tiles: each loads the scales of several k tiles at once and stores them in the k tiles' stages. Bulk copies cannot
   load the scales, since rows of ``a_scale`` are not aligned to 16 bytes. (A single scale loader was too slow: all
   other warps waited for its loads.) If tiles have few rows and there are no experts, the producer starts to copy a
   static weight before the previous kernel has ended.
2. For each k tile, a consumer starts four MMAs of 32 elements of K. They multiply 64 rows of the M side by all of the N
   side, and leave the results in registers. Tensor cores add up e4m3 products with less than fp32's precision.
   Therefore the results of each k tile are multiplied by both scales and added to accumulators in fp32 (promotion). The
   MMAs of two k tiles are started together. The results of the first k tile are promoted while the MMAs of the second k
   tile run. The results of the second k tile are promoted while the other consumer's MMAs run. In the largest tiles,
   one iteration of the loop multiplies all stages of the pipeline once, so that addresses are constants. (If the power
   limit lowers the clock, every saved instruction saves time.)
3. If a consumer's rows of the M side do not exist, the consumer only releases the stages.
4. The epilogue is applied to the accumulators. The results are stored in whole cache lines, only in rows that the
   expert owns. With ``a`` on the M side, the results are stored while the first MMAs of the next tile run. On an H200,
   this makes the GEMM with M x N x K = 32,768 x 7,168 x 2,048 (sixteen k tiles) 0.7 % faster.
5. If there are few tiles, the CTAs of a cluster share a tile. Each CTA multiplies a range of K (``split_k``), and
   reduces and stores some of the rows of ``a``. The CTAs send each other their partial sums of these rows
   (``st.async``). Each CTA's full barrier counts the bytes. Each CTA adds up the partial sums in the order of the CTAs,
   stores the results, and then arrives at the empty barriers, so that the next tile's partial sums may be sent. In
   swapped tiles (see below), a CTA reduces and stores every ``split_k``-th row. Tiles of 128 rows are shared only in
   kernels with an FP4 weight: each of two CTAs reduces and stores the rows of one consumer warpgroup, and receives the
   accumulators of these rows from the other CTA.

In tiles of 128 rows of ``a``, the rows of ``a`` are the M side of the MMAs. In smaller, *swapped*, tiles, the rows of
``b`` are the M side. The weight is then read once, and the MMAs multiply only a few padding rows. If a swapped tile has
64 instead of 128 rows of ``b``, each consumer multiplies all 64 rows by half of the rows of ``a``. In all tiles, an
element is summed in the order of K within a CTA's range of K, so the result does not depend on the tile's number of
rows.

Bytes moved: The weight of each expert that owns rows is read once per row tile. ``a`` is read once per column tile,
mostly from L2. The result is written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.common.fp8.layouts import MANY, with_most_stages
from torch_cute_ops.kernels.fp8_wgmma.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel

__all__ = ["KERNEL", "MANY", "TILES", "Arguments", "Config", "FP8WgmmaKernel", "plan", "with_most_stages"]

KERNEL = f"{__name__}.kernel.FP8WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8WgmmaKernel")
