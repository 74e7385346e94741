"""GEMMs of FP8 activations and an MXFP4 weight for few rows, by Hopper's wgmma: ``kernels/fp8_fp4_wgmma_codes``.

The tensor cores read the MXFP4 codes without a decoding step. The GEMM may be plain or have experts over rows."""

from typing import Any, ClassVar

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma_ss import FP8FP4WgmmaSS
from torch_cute_ops.gemm.decode import fp4_format
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_wgmma_codes


class FP8FP4WgmmaCodes(FP8FP4WgmmaSS):
    """Backend whose kernel multiplies undecoded MXFP4 codes.

    The tactics are chosen as in ``FP8FP4WgmmaSS``, but only among tiles of few rows. ``block_clocks`` were measured on
    an H200, except the value for 24 rows, which is interpolated.
    """

    name = "wgmma_codes"
    tiles: ClassVar = fp8_fp4_wgmma_codes.TILES
    block_clocks: ClassVar = {8: 513.0, 16: 578.0, 24: 614.0, 32: 650.0}
    kernel: ClassVar = fp8_fp4_wgmma_codes.KERNEL

    def plan(self, problem: GemmProblem, **given: Any) -> Any:
        return fp8_fp4_wgmma_codes.plan(**given)

    def handles(self, problem: GemmProblem) -> bool:
        return super().handles(problem) and fp4_format(problem) == MXFP4
