"""MXFP8 GEMMs for data-center Blackwell, with ``tcgen05.mma`` of ``kind::mxf8f6f4``: the MMAs apply all scales.

``out[m, n] = epilogue(Σ_j (Σ_{k of block j} a[m, k] · 2^s[m, j] · b[n, k] · 2^t[n, j]))``, with blocks of 32 elements.
The scales of both operands are bytes in the 128x4 layout, in which the MMAs read them.

Tiles, CTAs, accumulators, pairs of CTAs, the epilogue and split-K are as in ``kernels.fp8_tcgen05`` with per-token
scales (``common.blackwell.fp8_gemm``): 128 rows of the weight on the M side of the MMAs by ``tile_m`` tokens on the N
side, and sums over all of K in tensor memory. Roles:

1. The producer warp copies a k tile of both operands to a stage by TMA. It also copies two tiles of scales, each for
   128 rows and four blocks: the tokens' and the weight's.
2. The MMA thread copies a k tile's scales from the stage to tensor memory, and issues the k tile's four MMAs. The
   tensor cores multiply each 32 products by both scales. Each stage uses separate columns of tensor memory for scales,
   which are overwritten only when the stage's MMAs have ended.
3. Four epilogue warps load accumulators, apply the epilogue and store the results while the next tile is multiplied.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | operands and scales of a k tile | producer | MMA thread | 1 | 1 | stages |
| peer_full | second CTA's stage | its MMA thread | first CTA's MMA thread | 1 | - | stages * (cta_group - 1) |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 * cta_group | accumulators |

In a pair of CTAs (``cta_group`` is 2), each CTA copies the scales of its own 128 weight rows, and the scales of all
tokens of the tile.

Bytes moved: The same bytes as in ``kernels.fp8_tcgen05``, and a byte per 32 elements. A tile of fewer than 128 tokens
copies the scales of 128 tokens.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.mxfp8_tcgen05.config import SPLIT_K, TILED, TILES_M, Arguments, Config, plan, splits

if TYPE_CHECKING:
    from torch_cute_ops.kernels.mxfp8_tcgen05.kernel import MXFP8Tcgen05Kernel

__all__ = ["KERNEL", "SPLIT_K", "TILED", "TILES_M", "Arguments", "Config", "MXFP8Tcgen05Kernel", "plan", "splits"]

KERNEL = f"{__name__}.kernel.MXFP8Tcgen05Kernel"
__getattr__ = on_demand(__name__, "MXFP8Tcgen05Kernel")
