"""MXFP8 GEMMs by Hopper's wgmma, plain or grouped by rows: ``kernels/mxfp8_wgmma``."""

from typing import Final

import torch

from torch_cute_ops.formats import SCALE_LAYOUTS, ScaleLayout
from torch_cute_ops.formats.scale_layout import layout_of_operand
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8Tactic, has_mxfp8, plan_of_tile
from torch_cute_ops.gemm.backends.fp8_mma_sync import mx_words_of
from torch_cute_ops.gemm.backends.fp8_wgmma import FP8Wgmma
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import mxfp8_fold, mxfp8_wgmma
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

LINEAR: Final = SCALE_LAYOUTS["linear"]
LAYOUTS: Final = (LINEAR, SCALE_LAYOUTS["128x4"])
"""Layouts of the activations' scales that the folding kernel reads. Scales in other layouts are first converted to
linear scales."""

Tensor = torch.Tensor


class MXFP8Wgmma(FP8Wgmma):
    """Backend for MXFP8 operands on Hopper.

    Each 128 elements of both operands get one scale, which rounds elements below 2^-6 times the largest scale of the
    128 elements (``kernels.mxfp8_fold``). A kernel folds the activations before the GEMM, whose decoder warps fold the
    weight. Weight scales that are not linear, or whose rows are not whole words (K is no multiple of 128), are first
    rearranged.
    """

    def handles(self, problem: GemmProblem) -> bool:
        return has_mxfp8(problem) and problem.grouping.over in ("none", "rows")

    def kernels(self, problem: GemmProblem, tactic: FP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        config = mxfp8_wgmma.plan(**plan_of_tile(problem, self.tile(tactic), arch))
        return KernelSpec(mxfp8_wgmma.KERNEL, config), *(folding_kernel(problem.k, layout) for layout in LAYOUTS)

    def launcher(self, problem: GemmProblem, tactic: FP8Tactic, target: Target) -> Launch:
        assert target.arch is not None
        kernel, *_ = self.kernels(problem, tactic, target.arch)
        multiply, prefetches = compile_kernel(kernel, target.arch), kernel.config.prefetches
        functions = {layout: compile_kernel(folding_kernel(problem.k, layout), target.arch) for layout in LAYOUTS}
        device, k, max_ctas = target.device, problem.k, self.ctas(problem, tactic, target)
        groups, folding_ctas = -(-k // mxfp8_fold.GROUP), target.sms * mxfp8_fold.CTAS_PER_SM

        def fold(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            *lead, _ = codes.shape
            rows, layout = codes.numel() // k, layout_of_operand(scale)
            if layout not in functions or not scale.is_contiguous():
                scale, layout = linear_mx_scales(scale, rows, k).contiguous(), LINEAR
            allocate = allocator(device)
            folded = allocate((rows, k), (k, 1), codes.dtype)
            of_groups = allocate((groups, rows), (rows, 1), torch.float32)
            scale = scale.view(rows, -1) if layout is LINEAR else scale
            functions[layout](codes.view(rows, k), scale.view(torch.uint8), folded, of_groups, folding_ctas)
            return folded.view(codes.shape), of_groups.view(groups, *lead).movedim(0, -1)

        def launch(given: Operands, out: Tensor) -> None:
            assert given.a_scale is not None
            b_scale = mx_words_of(given.b_scale, given.b.mT.shape)
            a, a_scale = fold(given.a, given.a_scale)
            rows, epilogue = (given.offsets, given.counts), (given.alpha, given.bias)
            following = given.prefetch if prefetches else None
            multiply(a, given.b, a_scale, b_scale, *rows, *epilogue, out, following, max_ctas)

        return launch


def folding_kernel(k: int, layout: ScaleLayout) -> KernelSpec:
    """Return the kernel that folds rows of ``k`` elements, with scales in this layout."""
    return KernelSpec(mxfp8_fold.KERNEL, mxfp8_fold.plan(k, layout, settings.PDL))
