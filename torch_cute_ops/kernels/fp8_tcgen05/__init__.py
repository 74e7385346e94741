"""FP8 GEMMs for data-center Blackwell, with ``tcgen05.mma`` of ``kind::f8f6f4``, plain or grouped by expert.

With block scales, ``out[m, n] = epilogue(Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n,
k]))``. With per-token scales, ``out[m, n] = epilogue(a_scale[m] · Σ_k a[m, k] · b[n, k])``, and the epilogue's
``alpha`` contains the weight's scales. The weight is on the M side of the MMAs: its 128 rows in a tile are the lanes of
tensor memory. The tokens are on the N side, which needs only 16 rows, so that few tokens do not waste the tensor cores.
A k tile spans 128 elements: 128 bytes per row, and four MMAs. Within a k tile, the 128 weight rows of a CTA share a
block scale.

A CTA computes tiles of 128 rows of ``b`` by ``tile_m`` rows of ``a``, in the order of ``common.fp8.tiles``. CTAs are
persistent. Roles:

1. The producer warp fills stages. It copies both operands by TMA with the 128-byte swizzle. If the last k tile has 64
   elements, TMA fills the rest of the stage with zeros.
2. One thread of the MMA warp issues a k tile's MMAs. A commit releases the stage. With per-token scales, tensor memory
   adds up all of K in fp32, and the last commit of a tile signals that its accumulator is complete. With block scales,
   each k tile uses a different accumulator than the previous k tile, and a second commit signals that this accumulator
   is complete.
3. With block scales, two scale-loader warps take turns at the k tiles. A warp loads a k tile's scales, and writes the
   products of the tokens' scales and the weight's scale to one of ``factor_slots`` slots in shared memory.
4. Four epilogue warps, each with 32 lanes of tensor memory, load accumulators. A thread handles a row of the weight,
   which is a column of the result. With block scales, the warps multiply the accumulator of each k tile by the products
   of scales and add it to sums in fp32 registers (promotion), while the next k tile is multiplied. With per-token
   scales, the warps multiply by the tokens' scales, which they have loaded in advance. Then they apply the epilogue and
   store the results while the next tile is multiplied. Only rows that the expert owns are stored.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | operands of a k tile | producer | MMA thread | 1 | 1 | stages |
| peer_full | second CTA's stage | its MMA thread | first CTA's MMA thread | 1 | - | stages * (cta_group - 1) |
| factor_pipeline | products of a k tile's scales | scale loader | epilogue warps | 1 | 4 | factor_slots |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 * cta_group | accumulators |

Pairs: if ``cta_group`` is 2, each MMA uses two CTAs, for 256 rows of ``b`` by ``tile_m`` rows of ``a``. Each CTA copies
half of both operands. When a stage of the second CTA is full, the second CTA signals the first CTA. The first CTA
issues all MMAs, and its commits arrive at barriers of both CTAs.

Split-K, without experts: a cluster of ``split_k`` CTAs computes one tile, and each CTA multiplies a part of the tile's
k tiles. The CTAs multiply their partial sums by the scales, store them in shared memory, and add them up in the order
of k. A row of the result depends on the tactic, not on M.

Rows after an expert's last row are multiplied but never stored. Their scales are replaced by zeros.

Bytes moved: The weight of each expert that owns rows is read once per row tile (from L2 for tiles that run at the same
time). ``a`` is read from L2 once per column tile. The result is written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_tcgen05.config import SPLIT_K, TILES_M, Arguments, Config, plan, splits

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_tcgen05.kernel import FP8Tcgen05Kernel

__all__ = ["KERNEL", "SPLIT_K", "TILES_M", "Arguments", "Config", "FP8Tcgen05Kernel", "plan", "splits"]

KERNEL = f"{__name__}.kernel.FP8Tcgen05Kernel"
__getattr__ = on_demand(__name__, "FP8Tcgen05Kernel")
