"""Kernel configurations (cases) that tests compile, one module per group of kernels. Functions return all cases of a
group, or a selection of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.kernel_grid.common import ARCHS, BF16, FP16, FP32, KernelCase
from support.kernel_grid.fp4_gemms import (
    ExpertsCase,
    GatedExpertsCase,
    MmaCase,
    WgmmaCase,
    experts_cases,
    gated_experts_cases,
    mma_cases,
    wgmma_cases,
)
from support.kernel_grid.fp8_gemms import (
    FP8_LAYOUTS,
    RECODED,
    FP8FP4GemmCase,
    FP8FP4MmaCase,
    FP8FP4TokenGemmCase,
    FP8GemmCase,
    FP8TokenGemmCase,
    MXFP8GemmCase,
    RecodeCase,
    fp8_fp4_gemm_cases,
    fp8_fp4_mma_cases,
    fp8_fp4_token_gemm_cases,
    fp8_gemm_cases,
    fp8_token_gemm_cases,
    mxfp8_gemm_cases,
)
from support.kernel_grid.moe import MoeCase, moe_cases
from support.kernel_grid.rows import (
    DYNAMIC_TENSOR,
    FP8_TARGETS,
    POWER_TARGETS,
    ROUNDED,
    SIX_TARGETS,
    WHAT,
    Case,
    covering_cases,
    every_case,
)
from support.kernel_grid.tcgen05 import (
    FP8FP4Tcgen05Case,
    FP8Tcgen05Case,
    MXFP8Tcgen05Case,
    Tcgen05Case,
    Tcgen05ExpertsCase,
    Tcgen05GatedCase,
    WeightTcgen05Case,
    fp8_fp4_tcgen05_cases,
    fp8_tcgen05_cases,
    mxfp8_tcgen05_cases,
    tcgen05_cases,
    tcgen05_experts_cases,
    tcgen05_gated_cases,
    weight_tcgen05_cases,
)
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS
from torch_cute_ops.testing.resources import compile_for

__all__ = [
    "ARCHS",
    "BF16",
    "DYNAMIC_TENSOR",
    "FP8_LAYOUTS",
    "FP8_TARGETS",
    "FP16",
    "FP32",
    "POWER_TARGETS",
    "RECODED",
    "ROUNDED",
    "SIX_TARGETS",
    "WHAT",
    "Case",
    "ExpertsCase",
    "FP8FP4GemmCase",
    "FP8FP4MmaCase",
    "FP8FP4Tcgen05Case",
    "FP8FP4TokenGemmCase",
    "FP8GemmCase",
    "FP8Tcgen05Case",
    "FP8TokenGemmCase",
    "GatedExpertsCase",
    "KernelCase",
    "MXFP8GemmCase",
    "MXFP8Tcgen05Case",
    "MmaCase",
    "MoeCase",
    "RecodeCase",
    "Tcgen05Case",
    "Tcgen05ExpertsCase",
    "Tcgen05GatedCase",
    "WeightTcgen05Case",
    "WgmmaCase",
    "build_of",
    "covering_cases",
    "every_case",
    "experts_cases",
    "fp8_fp4_gemm_cases",
    "fp8_fp4_mma_cases",
    "fp8_fp4_tcgen05_cases",
    "fp8_fp4_token_gemm_cases",
    "fp8_gemm_cases",
    "fp8_tcgen05_cases",
    "fp8_token_gemm_cases",
    "gated_experts_cases",
    "in_process",
    "mma_cases",
    "moe_cases",
    "mxfp8_gemm_cases",
    "mxfp8_tcgen05_cases",
    "tcgen05_cases",
    "tcgen05_experts_cases",
    "tcgen05_gated_cases",
    "weight_tcgen05_cases",
    "wgmma_cases",
]


def in_process(work: Callable[[Any], Any], case: Any) -> Any:
    """Return ``work(case)``, or the text of its exception: some exceptions of the DSL cannot be pickled."""
    try:
        return work(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def build_of(case: KernelCase) -> Any:
    """Compile the case's kernel; return the ``Resources`` of each device kernel that it launches, and the number of
    tensor-core instructions by name."""
    return compile_for(case.kernel, GPU_ARCHS[case.arch])[1:]
