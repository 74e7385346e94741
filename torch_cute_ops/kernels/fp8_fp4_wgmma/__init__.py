"""GEMMs of FP8 activations with block scales and an FP4 weight by wgmma, plain or grouped by expert. For Hopper:
``out[m, n] = Σ_j a_scale[j, m] · 2^t[n, j] · (Σ_{k of block j} a[m, k] · w8[n, k])``, where ``w8`` is the weight in
e4m3 (``reference.mm_fp8_fp4``), through an epilogue.

All is as in ``kernels.fp8_wgmma``, whose consumers, tiles, ring and clusters these are, but for the weight:

1. The producer copies its codes, 64 bytes a row and K block; the scale warps load its block scales.
2. A third warpgroup decodes. Each thread has a row: it finds t, makes a table of eight bytes for each block scale,
   looks up four codes by one PRMT, and stores the e4m3 numbers where the MMAs read them. So a stage is full when it has
   arrived and has been decoded.
3. With the weight on the M side, consumers multiply a K block's sums by ``2^t`` of a lane's two rows. With ``a`` there,
   that would be a factor for each column: totals are in units of powers of two instead, one for each column, which
   decoding threads choose. As long as a row's numbers of a K block are the same in the unit as over ``2^t``, but for
   the power, they are decoded in it, and consumers add as those of ``fp8_wgmma`` do. Otherwise, and in the last K block
   of a tile, which leads back to the unit 1, they multiply totals and sums by powers that the decoding threads leave.
4. Of tiles of few rows of ``a`` two CTAs share an SM.

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
