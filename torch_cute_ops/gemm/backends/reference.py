"""The executable specification as a backend: right on every device, and slow."""

from typing import Any

import torch

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.experts import merged
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.grouped_mm_fp8 import grouped_gemm
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.reference.mm_fp8_block import block_scaled_gemm, factors_of_columns
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight
from torch_cute_ops.reference.moe_fc1_fp4 import gated_experts, quantize_experts, written_parts
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Tensor = torch.Tensor


class Reference(Backend):
    """The references of the ops, which sum in float64."""

    name = "reference"
    by_name_only = True
    makes_input = True

    def handles(self, problem: GemmProblem) -> bool:
        return problem.b.is_fp4 or (problem.a.is_fp8 and problem.b.is_fp8)

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return None

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        # About the rate of float64 units; in any case more than every other backend.
        return 1e-3 + problem.flops(m) * 1e-12

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return ()

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        if problem.gate is not None:
            return _gated(problem)
        fmt, dtype, over = problem.b.format, problem.out_dtype, problem.grouping.over
        layouts = problem.of_activations.a.scale_layout, problem.b.scale_layout

        def multiply(*fields: Any) -> None:
            a, b, a_scale, b_scale, alpha, bias, offsets, counts, _, out = fields
            if problem.a.is_fp8:
                weight = b if over == "rows" else b.t()
                if isinstance(fmt, FP4Format):
                    assert layouts[1] is not None
                    weight, factors = fp8_weight(weight, b_scale, fmt, layouts[1])
                else:
                    factors = factors_of_columns(b_scale, weight.shape[-2])
                if over == "rows":
                    result = grouped_gemm(a, weight, a_scale, factors, offsets, counts, alpha, bias, dtype)
                else:
                    result = block_scaled_gemm(a, weight, a_scale, factors, alpha, bias, dtype)
            else:
                assert isinstance(fmt, FP4Format)
                if problem.makes_input:
                    a, a_scale = made_input(problem, a, a_scale)
                if over == "k":
                    assert alpha is not None
                    result = expert_gemm(a, a_scale, b.t(), b_scale, alpha, bias, dtype, fmt, *layouts)
                else:
                    result = fp4_gemm(a, a_scale, b.t(), b_scale, alpha, bias, dtype, fmt, *layouts)
            out.copy_(result)

        return multiply


def made_input(problem: GemmProblem, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The activations that a problem which ``makes_input`` makes of ``rows``, and their scales where it quantises
    them."""
    return rounded_input(problem, unrounded_input(problem, rows), global_scale)


def unrounded_input(problem: GemmProblem, rows: Tensor) -> Tensor:
    """These activations in fp32, before they are rounded."""
    return silu_mul_rows(rows) if problem.gates_input else rows.float()


def rounded_input(problem: GemmProblem, value: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``value``, which ``unrounded_input`` has made, in the activations' dtype, or quantised, with its scales."""
    operand = problem.of_activations.a
    if not isinstance(operand.format, FP4Format):
        assert isinstance(operand.format, torch.dtype)
        return value.to(operand.format), None
    assert operand.scale_layout is not None
    return quantize_rows(value, operand.format, global_scale, operand.scale_layout.name)


def _gated(problem: GemmProblem) -> Launch:
    fmt, layout, experts = problem.b.format, problem.b.scale_layout, problem.experts
    assert isinstance(fmt, FP4Format) and layout is not None

    def compute(*fields: Any) -> None:
        a, b, a_scale, b_scale, alpha, bias, routing, global_scale, *given, y, scale = fields
        gate = (1.0, 0.0, None) if given[0] is None else tuple(given)
        formats = fmt, problem.a.scale_layout, layout
        value = gated_experts(a, a_scale, b, b_scale, routing, alpha, bias, gate, *formats)
        if problem.quantised is None or scale is None:
            routed = (routing != 0).repeat_interleave(problem.expert_n, 1)
            y.copy_(torch.where(routed, value.to(y.dtype), y))
            return
        assert problem.quantised.scale_layout is not None
        new = quantize_experts(value, experts, global_scale, fmt, problem.quantised.scale_layout)
        masks = written_parts((y, scale), routing, fmt, problem.quantised.scale_layout)
        for output, values, mask in zip((y, scale), new, masks, strict=True):
            output.copy_(merged(values, output, mask))

    return compute
