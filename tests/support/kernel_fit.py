"""Check that a compiled kernel fits an SM, and that its machine code contains the intended tensor-core instructions.

It fits if no registers are spilled, and if the warps get the registers they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptx_emulator.adapter import compile_ptx
from support.kernel_grid import (
    DYNAMIC_TENSOR,
    Case,
    ExpertsCase,
    GatedExpertsCase,
    KernelCase,
    MoeCase,
    Tcgen05ExpertsCase,
    Tcgen05GatedCase,
    WeightTcgen05Case,
    WgmmaCase,
)
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.fp4_weight_tcgen05 import STREAM_K
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.resources import Resources

ALLOWED_SPILLS: dict[str, str] = {
    "experts-float16-nvfp4-128x4-128x4-8of16by8with1024-float32-sm_90a": "with more than 512 experts a lane lists 32, "
    "in two ranges of classes: 16 bytes, once a CTA",
    "experts-bfloat16-mxfp4-128x4-bfloat16-24of128by8-float16-bias_float32-sm_90a": "with CUDA 13's ptxas, 104 "
    "bytes of 96 registers a thread; with CUDA 12's none",
    "experts-float16-nvfp4-linear-linear-32of64by8-float16-bias_float32-sm_90a": "with CUDA 13's ptxas, 148 "
    "bytes of 96 registers a thread; with CUDA 12's none",
    "gated_experts-bfloat16-mxfp4-128x4-128x4-64by16in2of32-mxfp4-128x4-None-float32-None-swiglu-sm_90a": "with CUDA "
    "13's ptxas, 132 bytes of 96 registers a thread; with CUDA 12's none",
    "wgmma-bfloat16-mxfp4-128x4-bfloat16-64by0-bfloat16-alpha_one-bias_bfloat16-sm_90a": "with CUDA 13's ptxas, 36 "
    "bytes of 96 registers a thread, once a tile",
}
"""Reason that the kernel of a case may spill registers, keyed by case id."""

REGISTERS_PER_SM = 65_536


INSTRUCTIONS: dict[str, str] = {
    "fp4_mma": "HMMA",
    "fp4_wgmma": "HGMMA",
    "fp4_experts": "HGMMA",
    "fp4_gated_experts": "HGMMA",
    "fp4_tcgen05": "UTCOMMA",
    "fp4_tcgen05_experts": "UTCOMMA",
    "fp4_tcgen05_gated_experts": "UTCOMMA",
    "fp4_weight_tcgen05": "UTCHMMA",
    "fp8_mma": "HMMA",
    "fp8_wgmma": "QGMMA",
    "fp8_token_wgmma": "QGMMA",
    "fp8_tcgen05": "UTCQMMA",
    "fp8_fp4_mma": "HMMA",
    "fp8_fp4_wgmma_ss": "QGMMA",
    "fp8_fp4_wgmma_rs": "QGMMA",
    "fp8_fp4_wgmma_codes": "QGMMA",
    "fp8_fp4_recode": "QGMMA",
    "fp8_fp4_token_wgmma": "QGMMA",
    "fp8_fp4_tcgen05": "UTCQMMA",
    "fp8_mxfp4_tcgen05": "UTCQMMA",
    "mxfp8_tcgen05": "UTCQMMA",
    "mxfp8_wgmma": "QGMMA",
}
"""Tensor-core instructions in the machine code of each kernel package, except in the cases that ``instructions_of``
names. All other packages use no tensor cores."""


def instructions_of(kernel: Any, arch: str) -> set[str]:
    """Return the names of the tensor-core instructions that the machine code of a kernel must contain."""
    *_, package, module = type(kernel).__module__.split(".")
    config = kernel.config
    if module == "weight_kernel":
        return set()  # decodes a weight for the GEMM of its package
    if multiplies_codes(config):
        return {"OMMA"}
    if getattr(config, "has_scaled_mmas", False):
        return {"QMMA.SF"}
    if package in ("fp8_mma", "fp8_fp4_mma") and ARCHS[arch].has_block_scaled_mma:
        return {"QMMA"}  # elsewhere ptxas converts the operands of e4m3 MMAs to 16 bits
    if getattr(config, "by_codes", False):
        return {"QGMMA"}  # a single row, whose codes are multiplied as FP8 numbers
    if getattr(config, "by_warp", False):
        return {"HMMA"}  # few rows
    return {INSTRUCTIONS[package]} if package in INSTRUCTIONS else set()


def multiplies_codes(config: Any) -> bool:
    """Return True if block-scaled MMAs of a warp multiply the FP4 codes of both operands."""
    return torch.uint8 in (getattr(config, "dtype", None), getattr(getattr(config, "operands", None), "dtype", None))


def check_emulated(case: KernelCase, kernel: Any) -> None:
    """Check the resources and the tensor-core instructions of a kernel that an emulator test has compiled."""
    compiled = compile_ptx(kernel, ARCHS[case.arch])
    check_fit(case, kernel, compiled.resources, compiled.instructions)


def check_machine_code(case: Any, arch: str, instructions: dict[str, int]) -> None:
    """Check how often the machine code of a case's kernel for ``arch`` contains each tensor-core instruction."""
    assert compile_ptx(replace(case, arch=arch).kernel, ARCHS[arch]).instructions == instructions


def check_same_ptx(case: Any, other: str) -> None:
    """Check that a case's kernel has the same PTX for another architecture, so that the emulator's results apply to it
    too."""
    own, its = (
        compile_ptx(replace(case, arch=arch).kernel, ARCHS[arch]).ptx.replace(arch, "") for arch in (case.arch, other)
    )
    assert own == its


def check_warp_mmas(kernel: Any, arch: str, k: int, copies: tuple[int, ...] = (1,)) -> None:
    """Check that the PTX of a kernel contains the mma.sync instructions of a k tile, and not more.

    Args:
        kernel: kernel whose configuration has the field ``tile_m``.
        arch: name of the architecture to compile for.
        k: number of elements of k that a warp multiplies in a k tile.
        copies: possible numbers of copies of these instructions. Unrolled loops contain several.
    """
    ptx = compile_ptx(kernel, ARCHS[arch]).ptx
    instruction, mma_k = ("m16n8k64", 64) if multiplies_codes(kernel.config) else ("m16n8k16", 16)
    count = kernel.config.tile_m // 8 * k // mma_k
    assert len(re.findall(rf"mma\.sync\.aligned\S*\.{instruction}\.", ptx)) in [count * each for each in copies]


def check_fit(case: KernelCase, kernel: Any, kernels: Sequence[Resources], instructions: Collection[str]) -> None:
    """Check the kernels that a case launches, given the resources that ptxas reports, and the tensor-core instructions
    of their machine code.

    The first of ``kernels`` is the GEMM, or the kernel for many rows.
    """
    assert set(instructions) == instructions_of(kernel, case.arch)
    arch, config = ARCHS[case.arch], kernel.config
    # A separate kernel rearranges the activations, unless the GEMM's CTAs do so. In expert GEMMs, a separate kernel
    # builds the list of each expert's tokens.
    apart = isinstance(case, ExpertsCase | GatedExpertsCase) or (isinstance(case, WgmmaCase) and not config.rearranges)
    # Routing and permuting compile three kernels: one kernel for few tokens, which bypasses L1, and two kernels for
    # more tokens.
    either = isinstance(case, MoeCase) and case.family in ("moe_route", "moe_route_ids", "moe_permute")
    apart |= isinstance(case, MoeCase) and case.family == "moe_finalize"
    count = 3 if either else 2 if apart else 1
    if isinstance(case, Tcgen05ExpertsCase):
        # With routing, another kernel finds the experts with tokens; with partial sums, another kernel adds these up.
        count += config.routed + config.has_partial_sums
    # With stream-K, another kernel adds up partial sums.
    count += isinstance(case, WeightTcgen05Case) and config.split_k == STREAM_K
    # A kernel lists pairs of an expert and an m tile.
    count += isinstance(case, Tcgen05GatedCase)
    # Another kernel computes the amax of the tensor.
    count += isinstance(case, Case) and case.target == DYNAMIC_TENSOR
    few_rows = getattr(config, "few_rows_config", None)
    count += few_rows is not None
    assert len(kernels) == count
    assert getattr(config, "smem_bytes", 0) <= arch.smem_per_cta
    threads = max(getattr(config, "threads", 256), getattr(config, "more_threads", 0))
    of_each = [threads] * count if few_rows is None else [threads, few_rows.threads]
    if isinstance(case, Tcgen05GatedCase):
        of_each = [threads, config.list_threads]
    for resources, launched in zip(kernels, of_each, strict=True):
        assert case.id in ALLOWED_SPILLS or (resources.spill_bytes == 0 and resources.stack_bytes == 0), resources
        # Kernels use only dynamic shared memory, because CUDA 12 allows only 48 KB of static shared memory.
        assert resources.smem_bytes == 0
        assert resources.registers * launched <= REGISTERS_PER_SM, "a CTA cannot be launched"
    if getattr(config, "registers", None) is not None:
        # Producers and decoders give up registers, which consumers take. The sum must not exceed the registers at
        # launch.
        own, given = kernels[0].registers, config.registers[1:]
        helpers = 32 * getattr(config, "decoder_warps", 0) * getattr(config, "decoder_teams", 1)
        producers = 32 * config.producer_warps if isinstance(case, GatedExpertsCase) else WARPGROUP
        if isinstance(case, WgmmaCase):
            producers *= config.other_groups
        groups = (threads - producers - helpers, producers, helpers)
        taken = sum(size * each for size, each in zip(groups, config.registers, strict=False))
        assert taken <= threads * own, "a warpgroup would wait for registers forever"
        if helpers:
            assert max(given) <= own <= config.registers[0], "setmaxnreg would be an illegal instruction"
