"""GEMMs of FP8 activations with block scales and an FP4 weight by wgmma, plain or grouped by expert. For Hopper:
``out[m, n] = Σ_j a_scale[j, m] · 2^t[n, j] · (Σ_{k of block j} a[m, k] · w8[n, k])``, where ``w8`` is the weight in
e4m3 (``reference.mm_fp8_fp4``), through an epilogue.

All is as in ``kernels.fp8_wgmma``, whose consumers, tiles, ring and clusters these are, but for the weight:

1. The producer copies its codes, 64 bytes a row and K block. The scale warps load its block scales, and bring them to
   what tables follow from (``decode``).
2. Totals are in units of powers of two, one for each row of the weight, which follow from the scales of the first K
   block of a tile. As long as a row's numbers of a K block are the same over that unit as over ``2^t``, but for the
   power, they are decoded so, and consumers add as those of ``fp8_wgmma`` do. Where a row does not fit, its 32 rows are
   decoded over ``2^t`` of their own, and consumers multiply a K block's sums by powers of two that the scale warps
   leave; and after the last K block of a tile all totals, which leads back to the unit 1.
3. Teams of warps decode K blocks in turns. A thread has a row, or half of one: for each block scale it makes a table of
   eight bytes, looks up four codes by one PRMT, and stores the e4m3 numbers where the MMAs read them. So a stage is
   full when it has arrived and has been decoded. A thread's instructions depend on each other; teams hide that.
4. With 64 rows of the weight in a tile, in place of 128, a team has two warps, and each consumer half of the rows of
   ``a``.
5. A tile of 256 rows of ``a`` is that of two CTAs of a cluster with 128 each. Each copies and decodes half of the
   weight's rows, and sends them to the other by bulk copies between their shared memories.
6. Where tiles of 128 rows are few, two CTAs share one, each with half of k. A CTA finishes the rows of one consumer
   warpgroup, whose threads add what the same threads of the other CTA send them of their accumulators; its other
   warpgroup sends.

Bytes moved: as ``fp8_wgmma``, with half of the weight, and its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import COLUMNS, PAIR, TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_wgmma.kernel import FP8FP4WgmmaKernel

__all__ = ["COLUMNS", "KERNEL", "PAIR", "TILES", "Arguments", "Config", "FP8FP4WgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8FP4WgmmaKernel")
