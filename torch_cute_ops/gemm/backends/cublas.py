"""FP4 operands decoded to 16 bits in memory, then cuBLAS: for many rows, where arithmetic takes the time."""

import torch

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4Backend
from torch_cute_ops.gemm.cost import memory_seconds, tensor_core_seconds
from torch_cute_ops.gemm.decode import decoder, decoding_kernel, reason_no_kernel, sixteen_bit_dtype, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DECODING_EFFICIENCY = 0.45
"""Bandwidth of the decoding kernel, as a share of a copy's (measured on an H200)."""


class Cublas(FP4Backend):
    """The decoded operands are exact in the 16-bit dtype; sums are in fp32, and rounded once, after the epilogue."""

    name = "cublas"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_kernel(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        # Decoded operands are written and read again, and so is the fp32 result.
        size = 2 * problem.k * (problem.n + (m if problem.a.is_fp4 else 0))
        decoding = memory_seconds(size + problem.bytes_moved(m), 1, target) / DECODING_EFFICIENCY
        sums = 4 * m * problem.n
        multiplying = max(memory_seconds(size + sums, 1, target), tensor_core_seconds(problem.flops(m), target))
        return decoding + multiplying + memory_seconds(2 * sums, 1, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        layouts = dict.fromkeys(layout for layout in (weight_scales(problem), problem.a.scale_layout) if layout)
        return tuple(decoding_kernel(problem, layout, _dtype(problem)) for layout in layouts)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        dtype, layout = _dtype(problem), problem.a.scale_layout
        decode_b = decoder(problem, weight_scales(problem), dtype, target)
        decode_a = None if layout is None else decoder(problem, layout, dtype, target)

        def multiply(
            a: torch.Tensor,
            b: torch.Tensor,
            a_scale: torch.Tensor | None,
            b_scale: torch.Tensor,
            alpha: torch.Tensor | None,
            bias: torch.Tensor | None,
            offsets: None,
            counts: None,
            out: torch.Tensor,
        ) -> None:
            left = a.to(dtype) if decode_a is None or a_scale is None else decode_a(a, a_scale)
            total = _sums(left, decode_b(b.t(), b_scale))
            if alpha is not None:
                total = total.mul_(alpha)
            if bias is not None:
                total = total.add_(bias)
            out.copy_(total)

        return multiply


def _dtype(problem: GemmProblem) -> torch.dtype:
    """What operands are decoded to: the dtype of ``a`` where that holds the weight, else bfloat16."""
    return torch.bfloat16 if problem.a.is_fp4 else sixteen_bit_dtype(problem)


def _sums(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``a @ weight.T`` in fp32: with a 16-bit result cuBLAS may round partial sums to it."""
    return torch.mm(a, weight.t(), out_dtype=torch.float32)
