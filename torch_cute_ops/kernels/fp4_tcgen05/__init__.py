"""A GEMM of two FP4 operands by block-scaled ``tcgen05.mma``: ``out[m, n] = Σ_k a[m, k] · b[n, k]``, through an
epilogue. For data-center Blackwell. Nothing is decoded.

The weight is on the M side of the MMAs (128 rows of ``b``, the lanes of tensor memory), the activations on the N side:
from 8 rows on, so that few of them do not waste the tensor cores. k is processed in chunks of 256: 128 bytes of codes a
row, four MMAs.

Roles. A CTA has a ring of stages in shared memory; it takes tiles of 128 rows of ``b`` by ``tile_m`` rows of ``a``, one
after the other (persistent).

1. The copying warp fills stages: codes of both operands by tensor map with the 128-byte swizzle, and scales, in tiles
   of 128 rows x 4 blocks, by bulk copies. Its mbarrier counts the bytes.
2. With linear scales, four more warps, each for every fourth chunk, load those of the chunk's rows, write them to the
   stage in the order of tiles, and fence them for the async proxy.
3. One thread of the multiplying warp copies a chunk's scales to tensor memory (``tcgen05.cp``) and issues its MMAs. A
   commit frees the stage, another the scales' columns, of which there are two sets: PTX orders a copy before an MMA
   that is issued after it, but not an MMA before a copy. The tile's last commit says that its sums are complete.
4. Four storing warps, each with 32 lanes of tensor memory, load the sums. A thread has a row of the weight, that is a
   column of the result. They finish the sums and store them while the next tile is multiplied: there are two
   accumulators. Those of 256 rows of ``a`` share some columns, which are loaded first.

Pairs. With ``cta_group`` 2 the MMAs are those of two CTAs: 256 rows of ``b`` by 256 of ``a``. Each CTA copies the codes
of its half of both, its own scales of ``b``, and all of ``a``. The second one tells the first when its stage is full;
the first one issues all MMAs, and its commits arrive in both.

Split k. A cluster of ``split_k`` CTAs has one tile, each an equal part of its chunks. They leave their sums in shared
memory and add them up in the order of k. A row of the result depends on the tactic alone, not on M.

Rows beyond ``b`` or ``a`` are copied as zeros; their scales may be anything, since a row or column of the accumulator
has its own. Where k ends inside of a chunk, the MMAs beyond are left out.

Bytes moved: ``b`` and its scales once for each tile of tokens (tiles that run together read it from L2); ``a`` once for
each tile of rows, from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_tcgen05.config import SPLIT_K, TILES_M, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_tcgen05.kernel import FP4Tcgen05Kernel

__all__ = ["KERNEL", "SPLIT_K", "TILES_M", "Arguments", "Config", "FP4Tcgen05Kernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4Tcgen05Kernel"
__getattr__ = on_demand(__name__, "FP4Tcgen05Kernel")
