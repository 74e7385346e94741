"""GEMMs of few rows of FP8 activations with block scales and an NVFP4 weight by wgmma, plain or grouped by expert. For
Hopper: ``reference.mm_fp8_fp4``.

All is as in ``kernels.fp8_fp4_wgmma`` in tiles that have the weight on the M side, units of rows included, but for who
decodes:

1. A stage has two K blocks, so that copies of codes are whole lines. Consumers are two pairs of warpgroups, each with a
   K block of every stage; behind the last one the sums of the second pair are added to those of the first. So each
   scheduler has four warps that multiply, one of which can decode while another waits.
2. Consumers look the codes up and keep the results in registers, as the A operand. The four lanes that share rows of an
   MMA each have a quarter of a row's K block, 16 bytes of codes: two blocks. So a lane makes tables of its own blocks
   only.
3. The k of an MMA is eight elements of each lane's quarter, then. Two teams of helpers take stages in turn, and arrange
   the activations alike, words of four elements. Each of a team's two warps has a K block.

Bytes moved: as ``fp8_wgmma``, with half of the weight, and its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_nvfp4_wgmma.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_nvfp4_wgmma.kernel import FP8NVFP4WgmmaKernel

__all__ = ["KERNEL", "TILES", "Arguments", "Config", "FP8NVFP4WgmmaKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8NVFP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP8NVFP4WgmmaKernel")
