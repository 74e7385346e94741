"""GEMMs of FP8 activations and an NVFP4 weight for few rows, by Hopper's wgmma: ``kernels/fp8_fp4_wgmma_rs``.

The weight is decoded to registers. The GEMM may be plain or have experts over rows."""

from typing import Any, ClassVar

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma_ss import FP8FP4WgmmaSS
from torch_cute_ops.gemm.decode import fp4_format
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_wgmma_rs


class FP8FP4WgmmaRS(FP8FP4WgmmaSS):
    """Backend whose kernel decodes the weight to registers.

    The tactics are chosen as in ``FP8FP4WgmmaSS``, but only among tiles of few rows. ``block_clocks`` were measured on
    an H200, except the value for 24 rows, which is interpolated.
    """

    name = "wgmma_rs"
    tiles: ClassVar = fp8_fp4_wgmma_rs.TILES
    block_clocks: ClassVar = {8: 611.0, 16: 649.0, 24: 687.0}
    kernel: ClassVar = fp8_fp4_wgmma_rs.KERNEL

    def plan(self, problem: GemmProblem, **given: Any) -> Any:
        return fp8_fp4_wgmma_rs.plan(**given)

    def handles(self, problem: GemmProblem) -> bool:
        return super().handles(problem) and fp4_format(problem) == NVFP4
