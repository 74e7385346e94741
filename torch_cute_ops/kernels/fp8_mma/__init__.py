"""GEMMs of FP8 matrices with block scales by mma.sync, plain or grouped by expert, through an epilogue. For every GPU:
``out[m, n] = Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n, k])``.

Four or eight warps share a tile of 16 or 64 rows of ``a`` and 128 rows of ``b``. CTAs are persistent and take tiles in
the order that ``kernels.common.experts.tiles`` describes. Each thread copies parts of the next blocks of k, 128
elements or in the end 64, into a ring of stages, while the warps multiply the present one by mma.sync with e4m3
operands. A block's sums are taken out, multiplied by both scales, and added to the totals in fp32. The epilogue
finishes the totals, which are stored in whole lines, only in rows that the expert has.

A lane reads 16 bytes of a row at once and uses its four words in four k32 steps: which elements of a block meet in a
step does not matter as long as both operands agree.

Bytes moved: ``b`` of experts that have rows, once for each tile of rows; ``a`` once for each tile of columns, mostly
from L2; the result once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_mma.config import COLUMNS, TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_mma.kernel import FP8MmaKernel

__all__ = ["COLUMNS", "KERNEL", "TILES", "Arguments", "Config", "FP8MmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8MmaKernel"
__getattr__ = on_demand(__name__, "FP8MmaKernel")
