"""Backend that calls the ops' references. The backend is correct on every device, and slow."""

import functools

import torch

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.experts import merged
from torch_cute_ops.formats.interleave import deinterleave_k
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_mxfp8, has_token_scales, has_tokens_and_fp4
from torch_cute_ops.gemm.operands import GatedOperands, Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand, Tactic
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.grouped_mm_fp8 import grouped_gemm, grouped_mxfp8_gemm, grouped_token_gemm
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.reference.mm_fp8 import scaled_gemm
from torch_cute_ops.reference.mm_fp8_block import (
    block_scaled_gemm,
    factors_of_columns,
    linear_mx_scales,
    mxfp8_gemm,
)
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight, prepared_weight
from torch_cute_ops.reference.moe_fc1_fp4 import gated_experts, quantize_experts, written_parts
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Tensor = torch.Tensor


class Reference(Backend):
    """Backend that calls the references of the ops, which accumulate in float64."""

    name = "reference"
    by_name_only = True
    computes_prologue = True

    def handles(self, problem: GemmProblem) -> bool:
        return problem.b.is_fp4 or (problem.a.is_fp8 and problem.b.is_fp8)

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return None

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        # Assume roughly the rate of float64 units, so that this estimate exceeds every other backend's estimate.
        return 1e-3 + problem.flops(m) * 1e-12

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return ()

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        if problem.gate is not None:
            return functools.partial(_gated_experts, problem)
        compute = _fp8 if problem.a.is_fp8 else _fp4

        def launch(given: Operands, out: Tensor) -> None:
            out.copy_(compute(problem, given))

        return launch


def _fp8(problem: GemmProblem, given: Operands) -> Tensor:
    fmt, over = problem.b.format, problem.grouping.over
    if has_token_scales(problem):
        assert given.a_scale is not None
        scales = given.a_scale, given.b_scale
        if over == "rows":
            rows = given.offsets, given.counts
            return grouped_token_gemm(given.a, given.b.mT, *scales, *rows, None, given.bias, problem.out_dtype)
        return scaled_gemm(given.a, given.b.t(), *scales, given.bias, problem.out_dtype)
    weight = given.b.mT
    assert given.a_scale is not None
    if has_mxfp8(problem) and over == "rows":
        rows, scales = (given.offsets, given.counts), (given.a_scale, given.b_scale)
        return grouped_mxfp8_gemm(given.a, weight, *scales, *rows, given.alpha, given.bias, problem.out_dtype)
    if has_mxfp8(problem):
        scales = linear_mx_scales(given.a_scale, *given.a.shape), linear_mx_scales(given.b_scale, *weight.shape)
        return mxfp8_gemm(given.a, weight, *scales, given.alpha, given.bias, problem.out_dtype)
    if has_tokens_and_fp4(problem):
        return _tokens_and_fp4(problem, given)
    if isinstance(fmt, FP4Format):
        assert problem.b.scale_layout is not None
        weight, factors = fp8_weight(weight, given.b_scale, fmt, problem.b.scale_layout)
    else:
        factors = factors_of_columns(given.b_scale, weight.shape[-2])
    operands, epilogue = (given.a, weight, given.a_scale, factors), (given.alpha, given.bias, problem.out_dtype)
    if over == "rows":
        return grouped_gemm(*operands, given.offsets, given.counts, *epilogue)
    return block_scaled_gemm(*operands, *epilogue)


def _tokens_and_fp4(problem: GemmProblem, given: Operands) -> Tensor:
    fmt, a, a_scale, alpha = problem.b.format, given.a, given.a_scale, given.alpha
    assert isinstance(fmt, FP4Format) and a_scale is not None
    if problem.a.is_interleaved:
        a = deinterleave_k(a, problem.k)
    weight, powers = weight_of_rows(given.b.mT, given.b_scale, problem.b)
    if problem.grouping.over == "rows":
        epilogue = alpha, given.bias, problem.out_dtype
        return grouped_token_gemm(a, weight, a_scale, powers, given.offsets, given.counts, *epilogue)
    factor = powers if alpha is None else powers * alpha
    return scaled_gemm(a, weight, a_scale, factor, given.bias, problem.out_dtype)


def weight_of_rows(codes: Tensor, scale: Tensor, operand: Operand) -> tuple[Tensor, Tensor]:
    """Convert the FP4 weight (..., N, K/2) of a problem with per-token scales to FP8. Return the weight (..., N, K)
    float8_e4m3fn, and the power of two of each row, (..., N) float32."""
    assert isinstance(operand.format, FP4Format)
    if operand.is_prepared:
        return prepared_weight(codes, scale, operand.format)
    assert operand.scale_layout is not None
    weight, powers = fp8_weight(codes, scale, operand.format, operand.scale_layout, by_row=True)
    return weight, powers.squeeze(-1)


def _fp4(problem: GemmProblem, given: Operands) -> Tensor:
    fmt, a, a_scale, alpha = problem.b.format, given.a, given.a_scale, given.alpha
    assert isinstance(fmt, FP4Format)
    layouts = problem.without_prologue.a.scale_layout, problem.b.scale_layout
    if problem.has_prologue:
        a, a_scale = round_activations(problem, unrounded_activations(problem, a), a_scale)
    operands = a, a_scale, given.b.t(), given.b_scale
    if problem.grouping.over == "k":
        assert alpha is not None
        return expert_gemm(*operands, alpha, given.bias, problem.out_dtype, fmt, *layouts)
    return fp4_gemm(*operands, alpha, given.bias, problem.out_dtype, fmt, *layouts, given.row_scale)


def unrounded_activations(problem: GemmProblem, rows: Tensor) -> Tensor:
    """Return the activations that a prologue computes from a call's input rows, in fp32, before they are rounded."""
    return rows.float() if problem.prologue_gate is None else silu_mul_rows(rows, gate=problem.prologue_gate)


def round_activations(problem: GemmProblem, value: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Round activations to their 16-bit dtype and return them with None, or quantise them and return them with their
    block scales."""
    operand = problem.without_prologue.a
    if not isinstance(operand.format, FP4Format):
        assert isinstance(operand.format, torch.dtype)
        return value.to(operand.format), None
    assert operand.scale_layout is not None
    return quantize_rows(value, operand.format, global_scale, operand.scale_layout.name)


def _gated_experts(problem: GemmProblem, given: GatedOperands, out: tuple[Tensor, Tensor | None]) -> None:
    (y, scale), fmt, layout = out, problem.b.format, problem.b.scale_layout
    assert isinstance(fmt, FP4Format) and layout is not None
    parameters: tuple[float, float, float | None] = (1.0, 0.0, None)
    if given.swiglu_alpha is not None and given.swiglu_beta is not None:
        parameters = given.swiglu_alpha, given.swiglu_beta, given.swiglu_limit
    assert problem.gate is not None
    gate = *parameters, "silu" if problem.gate == "swiglu" else problem.gate
    operands = given.a, given.a_scale, given.b.mT, given.b_scale, given.routing, given.alpha, given.bias
    value = gated_experts(*operands, gate, fmt, problem.a.scale_layout, layout, given.row_scale)
    if problem.quantised is None or scale is None:
        routed = (given.routing != 0).repeat_interleave(problem.expert_n, 1)
        y.copy_(torch.where(routed, value.to(y.dtype), y))
        return
    assert problem.quantised.scale_layout is not None
    new = quantize_experts(value, problem.experts, given.global_scale, fmt, problem.quantised.scale_layout)
    masks = written_parts((y, scale), given.routing, fmt, problem.quantised.scale_layout)
    for output, values, mask in zip((y, scale), new, masks, strict=True):
        output.copy_(merged(values, output, mask))
