"""GEMMs of FP8 matrices with block scales by wgmma, plain or grouped by expert, through an epilogue. For Hopper:
``out[m, n] = Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n, k])``.

Roles. A CTA has a producer warp and three scale warps, which are a warpgroup together, and two consumer warpgroups.
CTAs are persistent and take tiles in the order that ``kernels.common.experts.tiles`` describes; the copies of
the next tile start while the one before is multiplied.

1. The producer keeps a ring of stages filled. A stage is a block, 128 elements of k, of the tile's rows of ``a`` and
   ``b``, copied in boxes with the 128-byte swizzle, with its scales and a barrier that counts bytes. The last block may
   have 64 elements; TMA fills the rest with zeros. The producer also finds the tiles, and records in each stage which
   one it belongs to. The scale warps take the K blocks in turn; each loads the scales of several blocks at once and
   stores those of each in its stage: rows of ``a_scale`` begin anywhere, which bulk copies cannot do. (With one scale
   warp, all others waited for its loads.) In tiles of few rows without experts, the producer starts to copy a static
   weight before the kernel before this one has ended.
2. A consumer multiplies 64 rows of the M side by all of the N side, four k32 steps, into registers. Tensor cores add up
   e4m3 products with less than fp32's precision. So each block's sums are taken out, multiplied by both scales, and
   added to the totals in fp32. The MMAs of two blocks are started together: the first block's sums are added while the
   second's MMAs run, and the second's while those of the other consumer run. In the largest tiles a pass of the loop is
   a whole round of the ring, so that addresses are constants. (Where power limits the clock, every instruction that is
   left out saves time.)
3. A consumer whose rows of the M side do not exist only frees the stages.
4. The epilogue finishes the totals. They are stored in whole lines, only in rows that the expert has, and, with rows of
   ``a`` on the M side, while the first MMAs of the next tile run (0.7 % faster with sixteen K blocks,
   32,768 x 7,168 x 2,048 on an H200).
5. Where tiles are few, the CTAs of a cluster share one, each with a part of k (``splits``), and a share of its rows of
   ``a``. They send each other their totals of these rows (``st.async``), which a barrier of each CTA (``sent``) counts,
   add up and store what they have received, in the order of the CTAs, and arrive at a second barrier (``read``) before
   the next tile's totals are sent there. In swapped tiles a CTA has every ``splits``-th row. In those of 128 rows,
   which only kernels with an FP4 weight share, each of two CTAs has the rows of one consumer; threads of the other
   CTA send their accumulators to theirs.

In tiles of 128 rows of ``a`` these are the M side. In tiles of fewer, the swapped ones, rows of ``b`` are: a weight is
then streamed once, and the MMAs have hardly any rows that do not exist. With 64 rows of ``b`` in place of 128 each
consumer has all of them, and half of the rows of ``a``. An element's sum is in the order of k in
either, within a part of k; which rows are computed together changes nothing.

Bytes moved: ``b`` of experts that have rows, once for each tile of rows; ``a`` once for each tile of columns, mostly
from L2; the result once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_wgmma.config import MANY, TILES, Arguments, Config, plan, with_most_stages

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel

__all__ = ["KERNEL", "MANY", "TILES", "Arguments", "Config", "FP8WgmmaKernel", "plan", "with_most_stages"]

KERNEL = f"{__name__}.kernel.FP8WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8WgmmaKernel")
