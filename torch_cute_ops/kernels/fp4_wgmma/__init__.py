"""GEMM with an FP4 weight, using wgmma, for Hopper: ``out[m, n] = epilogue(Σ_k a[m, k] · b[n, k])``.

With *experts over k*, each expert owns a range of k: ``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · b[n, k])``.

The weight is on the M side of the MMAs, decoded into registers (64 rows of ``b`` per warpgroup). The activations are on
the N side, in shared memory. The weight is not repacked in advance. The activations are rearranged at each call: by
``kernels.activation_tiles``, or, if ``tile_m`` is small, by the CTAs of the GEMM.

Roles
-----
A CTA consists of a producer warp and two to four consumer warpgroups. Its tile is ``tile_m`` rows of ``a`` by
``tile_n`` rows of ``b``, 64 per consumer warpgroup. A k tile spans 256 elements of k: 128 bytes of codes per row, which
fill a cache line. With few tokens, ``tile_n`` may be less than 256, so that the number of tiles suits the number of
SMs. With ``mma.sync``, each warp multiplies 16 rows of ``b`` independently. The number of groups of 16 rows may then
not be a multiple of the SM's four schedulers. In this case, four warps on different schedulers share the last group of
16 rows, or two warps share each of the last two groups. The warps that share a group take turns at the k tiles, so that
all schedulers do the same work.

If ``tile_m`` is at most 32 and clusters are used, decoder warps read the activations, decode FP4 activations, and write
the activations to the stages in the layout that the MMAs read. The GEMM then takes one launch and no workspace. With
tiles of up to 8 tokens, three decoder warps take turns at the k tiles. With 16 tokens, three pairs of warps take turns.
With 32 tokens, four warps divide each k tile. With 16-bit activations and tiles of up to eight tokens, all consumers
together rearrange the first k tiles. The decoder warps may also apply a gate to 16-bit activations: they read gate and
up, and write the rounded ``act(gate) · up``.

Pipelines
---------
| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| weight_pipeline | codes, scales | producer (TMA) | consumers | 1 | consumer_warps | stages |
| a_pipeline | activations | producer or decoders | consumers | a_full_arrivals | consumer_warps | a_stages |
| received_full | received partial sums | other CTAs | consumers | 1 | - | 1 if sends else 0 |

Data path
---------
1. The producer fills both pipelines. The codes of a k tile are one TMA box with the 128-byte swizzle. A stage of
   activations holds a k tile, or one or two of its four slices. If ``activation_tiles`` runs first, the producer starts
   to copy the weight before ``activation_tiles`` ends (programmatic dependent launch). This early copy is safe because
   ``activation_tiles`` waited for all kernels before it, so the weight is complete. Without ``activation_tiles``, the
   producer waits for the previous kernel, unless the weight is static. ``Config.ahead`` limits the number of k tiles
   that are copied before this wait. The limit is one k tile if decoding, not memory bandwidth, limits the speed of the
   GEMM. After its last copy, the producer may prefetch a matrix into L2, such as the weight of the next GEMM.
2. A lane multiplies two rows of ``b``. Each of the four lanes that share these rows loads a quarter of the k tile at
   once: 64 elements per row, with the scales. A lane decodes eight codes of each row (for two MMAs with K = 16) and
   starts the MMAs of these codes. While these MMAs run, the lane decodes the next eight codes, and then waits for the
   MMAs. A warp releases a stage of activations when the MMAs that read it are complete. The warp releases a stage of
   codes when all its loads from the stage are complete. A tile of one row uses special MMAs (``mma.RowMma``): each
   column of an MMA holds one scale block, so that scales multiply the sum of a block instead of each code. If the row
   is in FP4 and ``tile_n`` is a multiple of 64, FP8 MMAs of a warpgroup compute the tile (``mma.CodeMma``).
3. k is split in one of two ways, by stream-K or by clusters. With stream-K, ``num_ctas`` persistent CTAs share an m
   tile. An *iteration* is one k tile of one n tile. Each CTA computes an equal, contiguous range of the m tile's
   iterations. If a range ends inside an n tile, the CTA writes its partial sums to memory. The CTA with the n tile's
   last k tile adds up the partial sums of all CTAs in the order of k. A CTA first computes the partial sums that
   another CTA needs, so waits are rare and short. A CTA waits only for CTAs with lower indices, which started earlier.
   Every CTA must have at least one iteration, because another CTA may wait for its partial sums. With a cluster of
   ``split_k`` CTAs, each CTA computes an equal range of the k tiles of one n tile. The CTAs reduce partial sums through
   shared memory. Each CTA reduces every ``split_k``-th row: the other CTAs send their partial sums to it
   (``st.async``). If shared memory is too small for the received partial sums, the CTA instead reads the partial sums
   of the other CTAs between two barriers of the cluster. A row of the result depends only on the tactic (``tile_m``,
   ``tile_n``, and ``num_ctas`` or ``split_k``), not on M or on other rows.
4. With experts over k, all experts own the same number of elements of k, and a thread holds two sets of accumulators.
   At the end of an expert's range of k, or of the work tile, the accumulators are multiplied in fp32 by the tokens'
   factors for the expert. The products are added to the second set of accumulators, in the order of the experts. The
   factors are copied with the last activations of a k tile. Factors of zero add nothing. All pairs of a token and an
   expert are multiplied. (If few pairs are routed, ``kernels.fp4_experts`` computes only the routed pairs.)
5. The epilogue is applied to the accumulators, which are then transposed in registers, so that a store writes 16
   contiguous bytes.

Modules: ``kernel`` launches the GEMM and assigns the roles. ``load`` defines the CTA's work and fills the pipelines.
``mma`` contains the consumers and their MMAs. ``epilogue`` turns accumulators into results.

Bytes moved: ``b`` and its scales are read once per m tile (from L2 for m tiles that run at the same time). ``a`` is
read from L2 once per n tile. Each partial sum in memory costs 8 bytes.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_wgmma.config import (
    EXPERT_TILES_M,
    MAX_CLUSTER_M,
    MAX_QUANTISED_M,
    SPLIT_K,
    TILES_M,
    TILES_N,
    Arguments,
    Config,
    by_codes,
    mma_n,
    plan,
    rearranges,
    sends,
    tiles_n,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_wgmma.kernel import FP4WgmmaKernel

__all__ = [
    "EXPERT_TILES_M",
    "KERNEL",
    "MAX_CLUSTER_M",
    "MAX_QUANTISED_M",
    "SPLIT_K",
    "TILES_M",
    "TILES_N",
    "Arguments",
    "Config",
    "FP4WgmmaKernel",
    "by_codes",
    "mma_n",
    "plan",
    "rearranges",
    "sends",
    "tiles_n",
]

KERNEL = f"{__name__}.kernel.FP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP4WgmmaKernel")
