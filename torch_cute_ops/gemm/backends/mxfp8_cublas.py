"""MXFP8 GEMMs by cuBLAS with operands decoded to bfloat16."""

from typing import Final

import torch

from torch_cute_ops.formats import SCALE_LAYOUTS, ScaleLayout
from torch_cute_ops.formats.scale_layout import layout_of_operand
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_mxfp8
from torch_cute_ops.gemm.backends.cublas import L2_RATE, accumulate, finish
from torch_cute_ops.gemm.cost import LAUNCH_SECONDS, memory_seconds, tensor_core_seconds
from torch_cute_ops.gemm.decode import reason_no_kernel
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import mxfp8_dequant
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

DECODING_EFFICIENCY: Final = 0.95
"""Bandwidth of the decoding kernel, divided by the bandwidth of a copy (fitted to calls with one row on an H200)."""

L2_BYTES: Final = 40 << 20
"""Largest size in bytes of both decoded operands at which cuBLAS is assumed to read them from L2. (An H200 has 50
MB.)"""
LINEAR: Final = SCALE_LAYOUTS["linear"]
LAYOUTS: Final = (LINEAR, SCALE_LAYOUTS["128x4"])
"""Layouts of scales that the decoding kernel reads. Scales in other layouts are first converted to linear scales."""

Tensor = torch.Tensor


class MXFP8Cublas(Backend):
    """Backend that decodes MXFP8 operands to bfloat16 in memory and calls cuBLAS.

    Without block-scaled MMAs, two fp32 operations for each 32 products limit MXFP8 to the rate of 16-bit MMAs
    (docs/notes/fp8_fp4_mma.md). So decoding to bfloat16 is as fast with many rows, and for many shapes also with few.
    Decoding is exact for scales from 2^-124 to 2^119 (``kernels.mxfp8_dequant``). Sums over all of K are fp32, and are
    rounded once, after the epilogue.
    """

    name = "cublas"

    def handles(self, problem: GemmProblem) -> bool:
        return has_mxfp8(problem) and problem.grouping.over == "none"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_kernel(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        acc_bytes, decoded = 4 * m * problem.n, 2 * problem.k * (problem.n + m)
        decoding = memory_seconds(decoded + problem.bytes_moved(m), 2, target) / DECODING_EFFICIENCY
        read = decoded // L2_RATE if decoded <= L2_BYTES else decoded
        multiplying = max(memory_seconds(read + acc_bytes, 1, target), tensor_core_seconds(problem.flops(m), target))
        # Another kernel reads the fp32 sums and writes the result.
        return LAUNCH_SECONDS + decoding + multiplying + memory_seconds(2 * acc_bytes, 1, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return tuple(decoding_kernel(problem.k, layout) for layout in LAYOUTS)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        assert target.arch is not None
        functions = {layout: compile_kernel(decoding_kernel(problem.k, layout), target.arch) for layout in LAYOUTS}
        device, k, max_ctas = target.device, problem.k, target.sms * mxfp8_dequant.CTAS_PER_SM

        def decode(codes: Tensor, scale: Tensor) -> Tensor:
            rows, layout = codes.shape[0], layout_of_operand(scale)
            if layout not in functions or not scale.is_contiguous():
                scale, layout = linear_mx_scales(scale, rows, k).contiguous(), LINEAR
            numbers = allocator(device)((rows, k), (k, 1), torch.bfloat16)
            functions[layout](codes, scale.view(torch.uint8), numbers, max_ctas)
            return numbers

        def launch(given: Operands, out: Tensor) -> None:
            assert given.a_scale is not None
            weight = decode(given.b.t(), given.b_scale)
            finish(accumulate(decode(given.a, given.a_scale), weight), given, out)

        return launch


def decoding_kernel(k: int, layout: ScaleLayout) -> KernelSpec:
    """Return the kernel that decodes rows of ``k`` elements, with scales in this layout, to bfloat16."""
    return KernelSpec(mxfp8_dequant.KERNEL, mxfp8_dequant.plan(k, layout))
