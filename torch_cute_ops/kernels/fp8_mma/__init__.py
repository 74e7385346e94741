"""Products of FP8 matrices with block scales by warps, one for each expert, for every GPU:
``out[m, n] = Σ_j a_scale[j, m] · b_scale[n / 128, j] · (Σ_{k of block j} a[m, k] · b[n, k])``.

Four or eight warps share a tile of 16 or 64 rows of ``a`` and 128 rows of ``b``; CTAs take tiles in the order that
``kernels.common.expert_tiles`` tells. Each thread copies parts of the next blocks of k into a ring of stages, while
warps multiply the present one by ``mma.sync`` with e4m3 operands. A block's sums are taken out, multiplied by both
scales, and added to the totals in fp32. Totals are rounded and stored in lines, only the rows that the expert has.

A lane reads 16 bytes of a row at once, and takes its words as those of four k32 steps: which elements of a block meet
in a step does not matter, if both operands agree.

Bytes moved: ``b`` of experts that have rows, once for each tile of rows; ``a`` once for each tile of columns, mostly
from L2; the result once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_mma.config import COLUMNS, TILES, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_mma.kernel import FP8MmaKernel

__all__ = ["COLUMNS", "KERNEL", "TILES", "Config", "FP8MmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8MmaKernel"
__getattr__ = on_demand(__name__, "FP8MmaKernel")
