"""GEMM of two FP4 operands with block-scaled ``tcgen05.mma``, for data-center Blackwell.

``out[m, n] = epilogue(Σ_k a[m, k] · b[n, k])``. Nothing is decoded. The weight is on the M side of the MMAs: each of
its 128 rows in a tile corresponds to a lane of tensor memory. The activations are on the N side, which can be as narrow
as 8 rows, so few tokens do not waste tensor-core time. A k tile spans 256 elements: 128 bytes of codes per row, and
four MMAs.

A CTA computes tiles of 128 rows of ``b`` by ``tile_m`` rows of ``a``. CTAs are persistent. Roles:

1. The producer warp fills stages. The warp copies codes of both operands by TMA with the 128-byte swizzle, and tiled
   scales (128 rows x 4 blocks per tile) by bulk copies.
2. With linear scales, four scale-loader warps copy the scales. Each warp handles every fourth k tile: it loads the k
   tile's scales, writes them to the stage in the 128x4 layout, and fences the writes for the async proxy.
3. One thread of the MMA warp copies a k tile's scales to tensor memory (``tcgen05.cp``) and issues the k tile's MMAs.
   One commit releases the stage, and another commit releases the tensor-memory columns of the scales. K tiles alternate
   between two sets of these columns, because PTX does not make a copy wait for an earlier MMA that still reads the
   scales. The last commit of a tile signals that its accumulator is complete.
4. Four epilogue warps, each with 32 lanes of tensor memory, load the accumulator. A thread handles a row of the weight,
   which is a column of the result. The warps apply the epilogue and store the results while the next tile is multiplied
   into the other accumulator. If ``tile_m`` is 256, the two accumulators share some columns. The epilogue loads the
   shared columns first.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | operands of a k tile | producer, scale loaders | MMA thread | 1 + stage.has_scale_loaders | 1 | stages |
| peer_full | second CTA's stage | its MMA thread | first CTA's MMA thread | 1 | - | stages * (cta_group - 1) |
| scales_empty | scales in tensor memory | MMA thread | MMA thread | - | 1 | 2 |
| acc_pipeline.full | accumulator | MMA thread | epilogue warps | 1 | - | accumulators |
| acc_pipeline.empty | accumulator | MMA thread | epilogue warps | - | 4 * cta_group | acc_empty_barriers |

Pairs: if ``cta_group`` is 2, each MMA uses two CTAs, and computes 256 rows of ``b`` by 256 rows of ``a``. Each CTA
copies the codes of half of the rows of each operand, the scales of half of ``b``, and all scales of ``a``. When a stage
of the second CTA is full, the second CTA signals the first CTA. The first CTA issues all MMAs, and its commits arrive
at barriers of both CTAs.

Split-K: a cluster of ``split_k`` CTAs computes one tile, and each CTA multiplies an equal part of the tile's k tiles.
The CTAs store their partial sums in shared memory, and add up the partial sums in the order of k. A row of the result
depends on the tactic, not on M.

Rows outside of ``b`` or ``a`` are copied as zeros. The scales of these rows may be arbitrary, since each scale affects
only its own row or column of the accumulator. If k ends inside a k tile, the MMAs beyond the end of k are skipped.

Bytes moved: ``b`` and its scales are read once per m tile (from L2 for m tiles that run at the same time). ``a`` is
read from L2 once per n tile.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_tcgen05.config import SPLIT_K, TILES_M, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_tcgen05.kernel import FP4Tcgen05Kernel

__all__ = ["KERNEL", "SPLIT_K", "TILES_M", "Arguments", "Config", "FP4Tcgen05Kernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4Tcgen05Kernel"
__getattr__ = on_demand(__name__, "FP4Tcgen05Kernel")
