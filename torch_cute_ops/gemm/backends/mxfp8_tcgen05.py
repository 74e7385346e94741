"""MXFP8 GEMMs on the tensor cores of data-center Blackwell: ``kernels/mxfp8_tcgen05``."""

from collections.abc import Mapping

import torch

from torch_cute_ops.formats.scale_layout import from_linear, layout_of_operand
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_mxfp8
from torch_cute_ops.gemm.backends._tcgen05 import Tcgen05Tactic
from torch_cute_ops.gemm.backends.fp8_tcgen05 import FP8Tcgen05
from torch_cute_ops.gemm.fp8_tiles import K_TILE
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import mxfp8_tcgen05
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class MXFP8Tcgen05(FP8Tcgen05):
    """Backend for MXFP8 operands without experts. The tensor cores apply the scales, and sum over a CTA's whole range
    of K. Scales in the 128x4 layout are read in place. Each call first rearranges other scales."""

    has_blocks = False  # no promotion

    def handles(self, problem: GemmProblem) -> bool:
        return has_mxfp8(problem) and problem.grouping.over == "none"

    def tiles_m(self, problem: GemmProblem) -> Mapping[tuple[bool, int], tuple[int, ...]]:
        return mxfp8_tcgen05.TILES_M

    def weight_row_bytes(self, problem: GemmProblem) -> int:
        return problem.b.row_bytes(K_TILE)

    def kernels(self, problem: GemmProblem, tactic: Tcgen05Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        epilogue = self.epilogue(problem)
        config = mxfp8_tcgen05.plan(epilogue=epilogue, **tactic._asdict(), arch=arch, pdl=settings.PDL)
        return (KernelSpec(mxfp8_tcgen05.KERNEL, config),)

    def launcher(self, problem: GemmProblem, tactic: Tcgen05Tactic, target: Target) -> Launch:
        launch = super().launcher(problem, tactic, target)

        def with_tiles(given: Operands, out: torch.Tensor) -> None:
            assert given.a_scale is not None
            scales = mx_tiles(given.a_scale, *given.a.shape), mx_tiles(given.b_scale, *given.b.mT.shape)
            launch(given._replace(a_scale=scales[0], b_scale=scales[1]), out)

        return with_tiles


def mx_tiles(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Return the scales of an MXFP8 matrix (rows, K) in the 128x4 layout. Scales in another layout are rearranged."""
    if layout_of_operand(scale) == mxfp8_tcgen05.TILED:
        return scale
    return from_linear(linear_mx_scales(scale, rows, k), mxfp8_tcgen05.TILED)
