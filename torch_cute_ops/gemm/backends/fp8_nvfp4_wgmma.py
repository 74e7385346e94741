"""Few rows of FP8 activations and an NVFP4 weight by Hopper's warpgroup MMA, plain or grouped by rows:
``kernels/fp8_nvfp4_wgmma``."""

from typing import Any, ClassVar

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma import FP8FP4Wgmma
from torch_cute_ops.gemm.decode import fp4_format
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_nvfp4_wgmma


class FP8NVFP4Wgmma(FP8FP4Wgmma):
    """Tactics are those of ``FP8FP4Wgmma`` that have few rows."""

    name = "registers"
    tiles: ClassVar = fp8_nvfp4_wgmma.TILES
    block_clocks: ClassVar = {8: 611.0, 16: 649.0}
    """Measured on an H200, as those of the base."""
    kernel: ClassVar = fp8_nvfp4_wgmma.KERNEL

    def plan(self, problem: GemmProblem, **given: Any) -> Any:
        return fp8_nvfp4_wgmma.plan(**given)

    def handles(self, problem: GemmProblem) -> bool:
        return super().handles(problem) and fp4_format(problem) == NVFP4
