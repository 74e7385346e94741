"""GEMMs of 16-bit activations and an FP4 weight for data-center Blackwell, with ``tcgen05.mma`` of ``kind::f16``.

``out[m, n] = epilogue(Σ_k a[m, k] · b[n, k])``. Decoder warps decode the weight into tensor memory, from which the MMAs
read it. Decoded numbers are bf16 or, with NVFP4 and fp16 activations, fp16. Every decoded number is exact, except
products of MXFP4 whose exponents bf16 cannot represent.

The kernel shares its tiles, CTAs, accumulators, epilogue and split-K in a cluster with ``kernels.fp8_tcgen05`` with
per-token scales (``common.blackwell.fp8_gemm``). A tile is 128 rows of the weight, on the M side of the MMAs, by
``tile_m`` tokens, on the N side. Accumulators in tensor memory sum over all of K. A k tile has 128 elements along K.
Roles:

1. The producer warp copies a k tile to a stage by TMA: the activations, two lines of 128 bytes per token, and the FP4
   codes, 64 bytes per weight row.
2. Groups of four decoder warps take turns at the k tiles. A thread decodes one weight row of a k tile, which becomes a
   lane of tensor memory. It loads the row's scales from memory while its group decodes the previous k tile. It decodes
   with ``common.fp4.codes.decode``, as all backends do, puts the numbers in the order of k, and stores them to the
   stage's 64 columns of tensor memory.
3. The MMA thread issues a k tile's eight MMAs, each for 16 elements of k, when the group has decoded the k tile. The
   weight comes from tensor memory, and the activations come from shared memory.
4. Four epilogue warps load accumulators, apply the epilogue and store the results while the next tile is multiplied. In
   tiles of 256 tokens, tensor memory has room for only one accumulator, so no MMA runs while results are stored.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copied | activations and codes of a k tile | producer | decoders | 1 | - | stages |
| pipeline | decoded weight, and activations | decoders | MMA thread | 4 | 5 | stages |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 | accumulators |

A stage consists of shared memory, for the activations and the codes, and of columns of tensor memory, for the decoded
weight. The stage is empty when its MMAs have ended and the four decoder warps have read the codes.

With stream-K (``stream_k``), the numbers of k tiles of two CTAs differ by at most one, so all SMs are busy even if the
number of tiles is not a multiple of the number of SMs. A CTA's range of k tiles may begin in the middle of its first n
tile, and end in the middle of its last n tile. The CTA stores partial sums of these n tiles in the workspace. A second
kernel adds up the partial sums in the order of k, applies the epilogue and stores the results.

Modules: ``kernel`` contains both kernels, and ``stream_k`` divides the k tiles.

Bytes moved: Each m tile reads the weight and its scales (from L2 if m tiles run at the same time). ``a`` is read from
L2 once per 128 rows of the weight. With stream-K, each CTA writes partial sums of at most two n tiles, 512 bytes for
each n tile and row of ``a``. The second kernel reads each partial sum once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_weight_tcgen05.config import (
    K_TILE,
    STREAM_K,
    TILES_M,
    Arguments,
    Config,
    plan,
    split_ks,
    teams,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_weight_tcgen05.kernel import FP4WeightTcgen05Kernel

__all__ = [
    "KERNEL",
    "K_TILE",
    "STREAM_K",
    "TILES_M",
    "Arguments",
    "Config",
    "FP4WeightTcgen05Kernel",
    "plan",
    "split_ks",
    "teams",
]

KERNEL = f"{__name__}.kernel.FP4WeightTcgen05Kernel"
__getattr__ = on_demand(__name__, "FP4WeightTcgen05Kernel")
