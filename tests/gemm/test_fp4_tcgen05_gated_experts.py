"""The backend ``tcgen05`` for GEMMs with a gate over experts: supported problems, tactics, estimates, launcher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.emulated import poisoned
from support.gated_gemm import HALF, Gated, expected, operands
from support.gemm_problems import FP32, check_needs_tcgen05, gated_problem
from support.kernel_grid import Tcgen05GatedCase

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends import _fp4, fp4_tcgen05_gated_experts
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import GatedOperands
from torch_cute_ops.gemm.problem import GemmProblem, Grouping, Operand
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

TILED, LINEAR = SCALE_LAYOUTS["128x4"], SCALE_LAYOUTS["linear"]
(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
BACKEND = fp4_tcgen05_gated_experts.FP4Tcgen05GatedExperts()
LAYER = gated_problem(
    256 * 2048, 7168, experts=256, alpha="expert_half", bias_dtype=FP32, gate="swiglu", global_scale="expert"
)
"""First GEMM of the experts of DeepSeek-V3."""


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (None, {}),
        (None, {"k": 64}),
        (None, {"quantised": None, "global_scale": None}),
        ("it computes only GEMMs of experts with a gate", {"gate": None}),
        ("there are 1025 experts; tcgen05 takes at most 1024", {"n": 1025 * 64, "grouping": Grouping("n", 1025)}),
        ("an expert has 96 columns; the number must be a multiple of 64", {"n": 256 * 96}),
        ("k=96: it has to be a multiple of 64", {"k": 96}),
        ("both operands have to be in FP4; a is torch.bfloat16", {"a": Operand(torch.bfloat16)}),
        ("a's scales have to be in the weight's layout, 128x4", {"a": Operand(NVFP4, LINEAR)}),
        (
            "b has 6 scales a row; in the linear layout they have to be a multiple of 4",
            {"a": Operand(MXFP4, LINEAR), "b": Operand(MXFP4, LINEAR), "k": 192},
        ),
    ],
)
def test_supported_problems(reason: str | None, changes: dict[str, Any]) -> None:
    found = BACKEND.reason_unsupported(replace(LAYER, **changes), BLACKWELL)
    assert found == reason or (reason is not None and found is not None and reason in found)


def test_supported_gpus() -> None:
    check_needs_tcgen05(BACKEND, LAYER)
    for arch in ARCHS.values():
        if arch.has_tcgen05:
            assert select.choose(LAYER, 16, usual_targets(arch)[0]).backend.name == "tcgen05"


def test_tiles_divide_the_columns_of_an_expert() -> None:
    for columns, tiles in ((64, {64, 128}), (192, {64, 128}), (256, {64, 128, 256})):
        problem = replace(LAYER, n=256 * columns)
        assert {tactic.tile_n for tactic in BACKEND.tactics(problem, 8, BLACKWELL)} == tiles


@pytest.mark.parametrize(("m", "most"), [(1, 2.2), (8, 1.5), (64, 1.4), (128, 1.5)])
def test_estimates_are_near_the_limits(m: int, most: float) -> None:
    """Check estimates against the time in which a B200 reads the weights of the routed experts."""
    times = [BACKEND.estimate(LAYER, m, tactic, BLACKWELL) for tactic in BACKEND.tactics(LAYER, m, BLACKWELL)]
    floor = LAYER.bytes_moved(m) / 6.8e12
    assert 1 < (min(times) - 6e-6) / floor < most


def test_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the backend's launcher, with the kernel executed in the emulator, and compare the result with the
    reference's."""
    case = Tcgen05GatedCase(MXFP4, "linear", 64, (MXFP4, LINEAR, "expert", FP32, None, "swiglu", True))
    one = Gated(case, m=5, k=256, experts=4, columns=64, routing="few", num_ctas=148, seed=None, gate=HALF)
    given, (codes, scales) = operands(one), expected(one, operands(one))
    problem = GemmProblem(
        Operand(MXFP4, LINEAR),
        Operand(MXFP4, LINEAR),
        one.experts * one.columns,
        one.k,
        Epilogue(torch.bfloat16, "expert", FP32, has_row_scale=True),
        Grouping("n", one.experts),
        gate="swiglu",
        quantised=Operand(MXFP4, LINEAR),
    )
    tactic = fp4_tcgen05_gated_experts.Tcgen05GatedTactic(64)
    assert tactic in BACKEND.tactics(problem, one.m, BLACKWELL) and BACKEND.checks_operands(problem, tactic)
    monkeypatch.setattr(
        _fp4, "compile_kernel", lambda kernel, arch: lambda *call: run_kernel(kernel.make(), arch, *call, strict=True)
    )
    monkeypatch.setattr(fp4_tcgen05_gated_experts, "new_bytes", lambda device, size: poisoned(size, dtype=torch.uint8))
    y, scale = poisoned(*codes.shape, dtype=torch.uint8), poisoned(*scales.shape, dtype=torch.uint8)
    call = GatedOperands(
        a=given.a,
        b=given.b.view(one.experts, 2 * one.columns, -1).mT,
        a_scale=given.a_scale,
        b_scale=given.b_scale.view(one.experts, 2 * one.columns, -1),
        alpha=given.alpha,
        bias=given.bias,
        routing=given.routing,
        global_scale=None,
        swiglu_alpha=HALF[0],
        swiglu_beta=HALF[1],
        swiglu_limit=HALF[2],
        row_scale=given.row_scale,
    )
    BACKEND.launcher(problem, tactic, BLACKWELL)(call, (y, scale))
    assert torch.equal(y, codes) and torch.equal(scale, scales)
