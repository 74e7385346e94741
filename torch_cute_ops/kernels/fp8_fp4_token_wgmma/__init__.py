"""FP8 x FP4 GEMMs for Hopper, using wgmma, with one scale per row of ``a`` (token). The weight is decoded to registers.

The GEMM is plain or grouped by expert. Each weight row is re-encoded with one power of two as its unit:
``out[m, n] = a_scale[m] · 2^u[n] · (Σ_k a[m, k] · e4m3(weight[n, k] · 2^-u[n]))``. ``torch_cute_ops.prepare_scales``
computes the units, and converts block scales to indices of decoding tables. ``torch_cute_ops.interleave_k`` arranges
``a``.

Roles. A CTA consists of two consumer warpgroups (or four, in two *K groups*), one producer warp and three scale-loader
warps. The weight is on the M side of the MMAs, and ``a`` on the N side.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| stages | codes, indices, record, ``a`` | producer, scale loader | consumer warps | 2 | consumer_warps | stages |
| slots | ``a`` in large tiles | producer | consumer warps | 1 | consumer_warps | a_slots |
| partial sums | ``received`` | consumers of all CTAs | first K group | 1 | 8 * split_k | 1 if split_k > 1 else 0 |
| K groups | accumulators | second K group | first K group | 8 | 8 | 1 if k_groups > 1 else 0 |

1. A stage holds 256 elements of K (two k tiles), so that codes are copied in whole cache lines of 128 bytes. In tiles
   of 256 rows of ``a``, the k tiles of ``a`` have a separate pipeline, and are copied and released one by one.
   Consumers without K groups multiply both k tiles. With two K groups, each group multiplies one k tile of every stage,
   so that one warp of a scheduler can decode while another waits. After the last stage, the accumulators of the second
   group are added to the accumulators of the first.
2. Each of the four lanes that share the rows of an MMA decodes a quarter of a row's k tile: 16 bytes of codes, that is,
   one MXFP4 block or two NVFP4 blocks. A block's index selects one of 256 tables of eight e4m3 bytes in shared memory,
   which consumers compute at the start of the kernel. ``a`` is interleaved along k, so that the K of an MMA consists of
   eight elements from each lane's quarter.
3. While the MMAs of a k tile run, a consumer decodes the next k tile into a second set of registers. At the end of an
   iteration of the mainloop, when it waits for its MMAs, the next k tile is thus already decoded.
4. A lane's two weight rows are neighbours, so its two columns of the result are neighbours too. Eight lanes store 16
   columns of a row: a whole sector of L2.
5. With split-K and up to 64 rows of ``a``, each CTA adds up every ``split_k``-th row of the result. With more rows, K
   is split over two CTAs, and each CTA adds up both CTAs' accumulators of one consumer warpgroup.
6. Scales are applied once, after the sum over K. ``kernels.fp8_token_wgmma`` describes ``Config.fast_accum``.

Bytes moved: The codes of each expert that owns rows, and one index per block, are read once per row tile. ``a`` is read
once per column tile, mostly from L2. The result is written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_token_wgmma.config import FAST_TILE_M, SPAN_K, TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_token_wgmma.kernel import FP8FP4TokenWgmmaKernel

__all__ = ["FAST_TILE_M", "KERNEL", "SPAN_K", "TILES", "Arguments", "Config", "FP8FP4TokenWgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4TokenWgmmaKernel"
__getattr__ = on_demand(__name__, "FP8FP4TokenWgmmaKernel")
