"""FP8 x MXFP4 GEMMs for data-center Blackwell, with ``tcgen05.mma`` of ``kind::mxf8f6f4``: the weight is not decoded.

The GEMM is plain or grouped by expert. ``K`` is a multiple of 128. With block scales of ``a``, ``out[m, n] =
epilogue(Σ_j a_scale[j, m] · (Σ_{k of block j} a[m, k] · b_scale[n, k / 32] · b[n, k]))``. With per-token scales, the
weight's scales are prepared (``formats.prepared_scales``): they are divided by ``2^u[n]``, and ``out[m, n] =
epilogue(a_scale[m] · 2^u[n] · Σ_k a[m, k] · b_scale[n, k / 32] · b[n, k])``.

The kernel shares its tiles, CTAs, accumulators, epilogue, promotion and split-K with ``kernels.fp8_tcgen05``
(``common.blackwell.fp8_gemm``). A tile is 128 rows of the weight, on the M side of the MMAs, by ``tile_m`` tokens, on
the N side. Roles:

1. The producer warp copies a k tile's activations and codes to a stage by TMA. TMA spreads the codes: 16 codes take 8
   bytes in memory and 16 bytes in shared memory, as the MMAs read them.
2. Two scale-loader warps take turns at the k tiles. A warp stores the weight's scales to the stage, in the 128x4
   layout. With block scales, the warp also writes the tokens' scales to one of ``factor_slots`` slots in shared memory.
3. The MMA thread copies a k tile's scales to tensor memory, and issues the k tile's four MMAs. The tensor cores
   multiply the products of each block of 32 elements by the weight's scale. The MMAs also need scales of the
   activations. These scales are 1, and the thread copies them to tensor memory once. Each stage has its own columns of
   tensor memory for scales, which are overwritten only when the stage's MMAs have ended.
4. Four epilogue warps load accumulators, and multiply them by the tokens' scales. With block scales, they add the
   products of all k tiles in fp32 (promotion).

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | operands of a k tile, and the weight's scales | producer, scale loader | MMA thread | 2 | 1 | stages |
| factor_pipeline | tokens' scales of a k tile | scale loader | epilogue warps | 1 | 4 | factor_slots |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 | accumulators |

Bytes moved: The kernel moves the same bytes as ``kernels.fp8_tcgen05``, except that the weight takes half the bytes,
plus its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_mxfp4_tcgen05.config import (
    ALIGN,
    MULTIPLE,
    SPLIT_K,
    TILES_M,
    Arguments,
    Config,
    plan,
    splits,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_mxfp4_tcgen05.kernel import FP8MXFP4Tcgen05Kernel

__all__ = [
    "ALIGN",
    "KERNEL",
    "MULTIPLE",
    "SPLIT_K",
    "TILES_M",
    "Arguments",
    "Config",
    "FP8MXFP4Tcgen05Kernel",
    "plan",
    "splits",
]

KERNEL = f"{__name__}.kernel.FP8MXFP4Tcgen05Kernel"
__getattr__ = on_demand(__name__, "FP8MXFP4Tcgen05Kernel")
