"""Few rows of FP8 activations and an FP4 weight by Hopper's warpgroup MMA, plain or grouped by rows: a kernel for each
format."""

from typing import Any, ClassVar

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma import FP8FP4Wgmma
from torch_cute_ops.gemm.decode import fp4_format
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_mxfp4_wgmma, fp8_nvfp4_wgmma


class FewRows(FP8FP4Wgmma):
    """Tactics are those of ``FP8FP4Wgmma`` that have few rows. ``block_clocks`` were measured on an H200 too, but
    for those of 24 rows, which lie on the line through others."""

    fmt: ClassVar[FP4Format]
    family: ClassVar[Any]
    """The kernel's package."""

    def plan(self, problem: GemmProblem, **given: Any) -> Any:
        return self.family.plan(**given)

    def handles(self, problem: GemmProblem) -> bool:
        return super().handles(problem) and fp4_format(problem) == self.fmt


class FP8MXFP4Wgmma(FewRows):
    """MXFP4: ``kernels/fp8_mxfp4_wgmma``."""

    name = "blocks"
    fmt: ClassVar = MXFP4
    family: ClassVar = fp8_mxfp4_wgmma
    tiles: ClassVar = fp8_mxfp4_wgmma.TILES
    block_clocks: ClassVar = {8: 513.0, 16: 578.0, 24: 614.0, 32: 650.0}
    kernel: ClassVar = fp8_mxfp4_wgmma.KERNEL


class FP8NVFP4Wgmma(FewRows):
    """NVFP4: ``kernels/fp8_nvfp4_wgmma``."""

    name = "registers"
    fmt: ClassVar = NVFP4
    family: ClassVar = fp8_nvfp4_wgmma
    tiles: ClassVar = fp8_nvfp4_wgmma.TILES
    block_clocks: ClassVar = {8: 611.0, 16: 649.0, 24: 687.0}
    kernel: ClassVar = fp8_nvfp4_wgmma.KERNEL
