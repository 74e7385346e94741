"""Products of FP8 matrices with block scales by warpgroup products, one for each expert, for sm_90a:
``out[m, n] = Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n, k])``.

Roles. A CTA has one warp that copies and three that have the scales, a warpgroup together, and two warpgroups that
multiply. CTAs stay, and take tiles in the order that ``kernels.common.expert_tiles`` tells; the copies of the next tile
start while the one before is multiplied.

1. The copying warp keeps a ring of stages filled: 128 elements of k of the tile's rows of ``a`` and of ``b``, in boxes
   with the 128-byte swizzle, with a barrier that counts bytes and the scales. It finds the tiles, and leaves in the
   stages where each lies. The scales' warps take the blocks of k by turns; each loads those of several blocks at once
   and stores each block's in its stage: rows of ``a_scale`` begin anywhere, which copies in bulk cannot. (With one
   warp, its loads were what all waited for.)
2. A warpgroup multiplies 64 rows of the M side by all of the N side, four k32 steps, into registers of their own.
   Tensor cores add up e4m3 products with less than fp32's precision, so each block's sums are taken out, multiplied by
   both scales, and added to the totals in fp32. Two blocks' products are started together; the first's sums are added
   while the second's run, and the second's while the other warpgroup's do. In the largest tiles a pass of the loop is
   a whole round of the ring: addresses are constants then. (Where power limits, what is left out saves time.)
3. Where the M side has no rows, a warpgroup only says that it has read.
4. The totals are rounded and stored: rows of whole lines, only those that the expert has, and while the first products
   of the next tile run (0.7 % faster with sixteen blocks of k, 32,768 x 7,168 x 2,048 on an H200).
5. With few tiles the CTAs of a cluster share one, each with a part of k (``splits``). They leave their totals in shared
   memory, a barrier of each (``left``) tells the others, each adds up and stores its share, in the order of the CTAs,
   and a second one (``read``) says when shared memory may be used again.

With 128 rows of ``a`` in a tile these are the M side. With fewer, rows of ``b`` are: a weight is then streamed once,
and hardly anything is multiplied that is not there. An element's sums are in the order of k by either, within a part of
k; which rows are computed together changes nothing.

Bytes moved: ``b`` of experts that have rows, once for each tile of rows; ``a`` once for each tile of columns, mostly
from L2; the result once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_wgmma.config import MANY, TILES, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel

__all__ = ["KERNEL", "MANY", "TILES", "Config", "FP8WgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8WgmmaKernel")
