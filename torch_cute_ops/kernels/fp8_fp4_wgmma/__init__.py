"""GEMMs of FP8 activations with block scales and an FP4 weight by wgmma. For Hopper."""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import COLUMNS, PAIRED_TOKENS, TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_wgmma.kernel import FP8FP4WgmmaKernel

__all__ = ["COLUMNS", "KERNEL", "TILES", "Arguments", "Config", "FP8FP4WgmmaKernel", "PAIRED_TOKENS", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8FP4WgmmaKernel")
