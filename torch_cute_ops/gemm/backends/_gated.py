"""Code that the backends for GEMMs over experts with a gate share."""

from typing import Any, Final

import torch

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.gemm.decode import fp4_format
from torch_cute_ops.gemm.operands import GatedOperands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels.common.experts.gated_layouts import GatedEpilogue

COLUMN_MULTIPLE: Final = 64
"""Divisor that an expert's number of columns must have. With this divisor, the rows of an expert are whole scale tiles,
and n tiles of up to 128 weight rows are full."""


def reason_ungated(problem: GemmProblem) -> str | None:
    """Return the reason that no kernel for experts with a gate computes a problem, or None if one might."""
    if problem.gate is None:
        return "it computes only GEMMs of experts with a gate"
    if problem.expert_n % COLUMN_MULTIPLE:
        return f"an expert has {problem.expert_n} columns; the number must be a multiple of {COLUMN_MULTIPLE}"
    return None


def gated_epilogue(problem: GemmProblem) -> GatedEpilogue:
    """Return the epilogue for the kernel's configuration."""
    epilogue, quantised = problem.epilogue, problem.quantised
    assert epilogue.alpha in (None, "expert", "expert_half") and problem.gate is not None
    out: torch.dtype | FP4Format = epilogue.out_dtype
    layout = None
    if quantised is not None:
        out, layout = fp4_format(problem), quantised.scale_layout
    return GatedEpilogue(
        *(out, layout, epilogue.alpha, epilogue.bias_dtype, problem.global_scale, problem.gate),
        has_row_scale=epilogue.has_row_scale,
    )


def gated_arguments(given: GatedOperands, out: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[Any, ...]:
    """Return the kernel's arguments, in order, up to the result."""
    return (
        given.a,
        given.a_scale,
        given.b,
        given.b_scale,
        given.routing,
        given.alpha,
        given.bias,
        given.global_scale,
        given.row_scale,
        given.swiglu_alpha,
        given.swiglu_beta,
        given.swiglu_limit,
        *out,
    )
