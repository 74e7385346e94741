"""GEMMs of FP8 activations with block scales and an FP4 weight that ``fp4_to_fp8`` has written to memory in FP8, plain
or grouped by expert, by wgmma. For Hopper and many rows: there ``fp8_fp4_wgmma``, which decodes the weight for each
tile of rows, takes longer than to write it once.

Roles, tiles, ring and consumers are those of ``fp8_wgmma``, whose loop a tile takes if all its rows of the weight are
over their units: the epilogue multiplies totals by these. A tile in which some row has a power of its own in some K
block takes another loop, where scale warps load exponents and consumers bring a K block's sums to the units
(``fp8_fp4_wgmma.units``).

If ``fp4_to_fp8`` runs ``beside`` this kernel, the warps that copy the weight and its notes wait for a tile's rows, and
consumers for the end of that kernel before they release dependents. Strips are twice as wide as elsewhere, so that a
row of the weight has work for longer.

Bytes moved: as ``fp8_wgmma``, and four for each row of the weight and tile of rows.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_recoded.config import RASTER, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_recoded.kernel import FP8FP4RecodedKernel

__all__ = ["KERNEL", "RASTER", "Arguments", "Config", "FP8FP4RecodedKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4RecodedKernel"
__getattr__ = on_demand(__name__, "FP8FP4RecodedKernel")
