"""FP8 x FP4 GEMMs for Hopper, with wgmma: decoder warps decode the weight into shared memory.

The GEMM is plain or grouped by expert. The activations have block scales. ``out[m, n] = epilogue(Σ_j a_scale[j, m] ·
2^t[n, j] · (Σ_{k of block j} a[m, k] · w8[n, k]))``. ``w8`` is the weight in e4m3 (``reference.mm_fp8_fp4``).

Roles. A CTA consists of two consumer warpgroups, one producer warp, three scale-loader warps, and two to four groups of
decoder warps. Consumers, tiles and clusters are as in ``kernels.fp8_wgmma``.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copies | ``a``, codes, scales, record | producer, scale loader | decoders | 2 | - | stages |
| stages | decoded weight | decoders | consumer warps | decoded_arrivals | consumer_warps * cluster_m | stages |
| partial sums | ``received`` | consumers of all CTAs | consumer warps | 1 | 8 * split_k | 1 if split_k > 1 else 0 |

1. The producer copies ``a`` and the weight's codes: 64 bytes per weight row of a k tile. The scale loaders load the
   block scales, and store the bytes from which the decoders compute their tables (``common.fp8.units``).
2. The accumulators of a weight row are divided by its *unit*, a power of two that is computed from the scales of the
   row's first k tile. A row's k tile is decoded with the row's unit if this gives the same values as decoding with the
   k tile's own unit ``2^t``. If the values differ for any row of a group of 32 rows, the whole group is decoded with
   ``2^t``. Consumers then multiply the results of that k tile by powers of two, which the scale loaders have stored in
   the stage. After the last k tile, consumers multiply all accumulators by the units of their rows.
3. The decoder groups take turns at the stages. A thread decodes a row, or half of a row. For each block scale, the
   thread computes a table of eight bytes, looks up four codes by one PRMT, and stores the e4m3 numbers where the MMAs
   read them. A thread's instructions depend on each other, so several groups are needed to hide the latency.
4. If a tile has 64 instead of 128 weight rows, a decoder group consists of two warps, and each consumer warpgroup
   multiplies half of the rows of ``a``.
5. A tile of 256 rows of ``a`` belongs to two CTAs of a cluster, 128 rows each. Each CTA copies and decodes half of the
   weight rows, and sends the decoded rows to the other CTA's shared memory by bulk copies.
6. If there are few tiles of 128 rows, two CTAs share a tile, and each CTA multiplies half of K. Each CTA stores the
   rows of one consumer warpgroup. A thread of this warpgroup receives the accumulators of the thread with the same
   index in the other CTA, adds these accumulators to its own, and applies the epilogue.

Bytes moved: The kernel moves the same bytes as ``fp8_wgmma``, except that the weight takes half the bytes, plus its
block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.common.fp8.layouts import WIDE
from torch_cute_ops.kernels.fp8_fp4_wgmma_ss.config import PAIR, TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_wgmma_ss.kernel import FP8FP4WgmmaSSKernel

__all__ = ["KERNEL", "PAIR", "TILES", "WIDE", "Arguments", "Config", "FP8FP4WgmmaSSKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4WgmmaSSKernel"
__getattr__ = on_demand(__name__, "FP8FP4WgmmaSSKernel")
