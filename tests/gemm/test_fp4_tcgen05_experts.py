"""The backend ``tcgen05`` for GEMMs in which each expert owns a range of K: supported problems, tactics, estimates,
launcher."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import CPU, poisoned
from support.gemm_problems import BF16, FP32, HOPPER, backend_for, check_needs_tcgen05, fp4_problem

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends import _fp4
from torch_cute_ops.gemm.backends import fp4_tcgen05_experts as backend
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels import fp4_tcgen05_experts
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.runtime.arch import ARCHS

(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
DEEPSEEK = fp4_problem(7168, 65_536, experts=256)
BACKEND = backend_for("tcgen05", DEEPSEEK)


@pytest.mark.parametrize(
    ("reason", "problem"),
    [
        (None, fp4_problem(n=8, k=64, experts=1)),
        (None, fp4_problem(n=40, k=3 * 64, experts=3, fmt=MXFP4, bias_dtype=FP32)),
        (None, fp4_problem(n=40, k=4 * 320, experts=4, fmt=MXFP4, layout="linear")),
        (None, fp4_problem(n=40, k=1000 * 64, experts=1000)),
        ("both operands have to be in FP4; a is torch.bfloat16", fp4_problem(k=512, experts=2, a_dtype=BF16)),
        ("a's scales have to be in the weight's layout, 128x4", fp4_problem(k=512, experts=2, layout="8x4")),
        ("an expert's width is 96: it has to be a multiple of 64", fp4_problem(k=192, experts=2)),
        ("n=12 and k=64: they have to be multiples of 8 and 32", fp4_problem(n=12, k=64, experts=1)),
        (
            "b has 6 scales a row; in the linear layout they have to be a multiple of 4",
            fp4_problem(k=192, experts=3, fmt=MXFP4, layout="linear"),
        ),
    ],
)
def test_supported_problems(reason: str | None, problem: Any) -> None:
    assert BACKEND.reason_unsupported(problem, BLACKWELL) == reason


def test_supported_gpus() -> None:
    check_needs_tcgen05(BACKEND, DEEPSEEK)
    for arch in ARCHS.values():
        if arch.has_tcgen05:
            assert select.choose(DEEPSEEK, 16, usual_targets(arch)[0]).backend is BACKEND
    assert not BACKEND.handles(fp4_problem())


@pytest.mark.parametrize(("experts", "skips"), [(1, False), (8, False), (9, True), (513, True)])
def test_tactics(experts: int, skips: bool) -> None:
    """Check that routed tactics are offered from 9 experts on, and the numbers of groups into which experts are
    divided.

    No group is empty, and there are no more groups than are needed to give every SM work.
    """
    problem = fp4_problem(k=64 * experts, experts=experts)
    tactics = BACKEND.tactics(problem, 64, BLACKWELL)
    assert {tactic.mode for tactic in tactics} == ({"dense", "routed"} if skips else {"dense"})
    assert {tactic.tile_n for tactic in tactics} == {32, 64, 128}
    assert max(tactic.classes for tactic in tactics) == min(experts, 8)
    assert {tactic.classes for tactic in BACKEND.tactics(problem, 148 * 128 * 16, BLACKWELL)} == {1}
    linear = fp4_problem(k=64 * experts, experts=experts, layout="linear")
    assert {tactic.tile_n for tactic in BACKEND.tactics(linear, 64, BLACKWELL)} == {32, 64}


def test_estimates_are_near_the_limits() -> None:
    """Check estimates against a B200's data sheet: with few tokens only their experts' weights are read, with many
    tokens all experts are computed."""

    def least(m: int, mode: str) -> float:
        tactics = [tactic for tactic in BACKEND.tactics(DEEPSEEK, m, BLACKWELL) if tactic.mode == mode]
        return min(BACKEND.estimate(DEEPSEEK, m, tactic, BLACKWELL) for tactic in tactics)

    every = DEEPSEEK.n * DEEPSEEK.b.row_bytes(DEEPSEEK.k)
    assert 1 < least(1, "dense") / (every / 6.8e12) < 2
    assert 1 < least(8, "routed") / (DEEPSEEK.bytes_moved(8) / 6.8e12) < 2.5
    assert 1 < least(4096, "dense") / (2 * 4096 * DEEPSEEK.n * DEEPSEEK.k / 8.2e15) < 3
    # 56 tiles of 128 weight rows in five groups of experts are 280 work tiles, enough for 148 SMs.
    for m in (32, 64):
        tactic = min(
            BACKEND.tactics(DEEPSEEK, m, BLACKWELL), key=lambda each: BACKEND.estimate(DEEPSEEK, m, each, BLACKWELL)
        )
        assert tactic == (128, 5, "routed")
        assert BACKEND.estimate(DEEPSEEK, m, tactic, BLACKWELL) < 1.65 * DEEPSEEK.bytes_moved(m) / 6.8e12
    assert all(least(m, "routed") < least(m, "dense") for m in (1, 8, 32, 64))
    # With 128 tokens, 98 % of the experts get at least one token.
    assert 0.98 < least(512, "routed") / least(512, "dense") < 1


def test_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the backend's launcher, with the kernel executed in the emulator, and compare the result with the
    reference."""
    fmt, layout, tactic = MXFP4, "linear", backend.Tcgen05ExpertsTactic(32, 2, "routed")
    m, n, experts, width = 5, 40, 10, 64
    k = experts * width
    problem = fp4_problem(n, k, fmt, layout=layout, out_dtype=FP32, experts=experts, bias_dtype=FP32)
    assert tactic in BACKEND.tactics(problem, m, BLACKWELL)
    monkeypatch.setattr(
        _fp4, "compile_kernel", lambda kernel, arch: lambda *call: run_kernel(kernel.make(), arch, *call, strict=True)
    )
    (a, a_scale), (b, b_scale) = (random_matrix(rows, k, fmt, layout, CPU, POWERS[fmt.scale_format]) for rows in (m, n))
    alpha, out = torch.randint(0, 3, (m, experts)) / 2, poisoned(m, n, dtype=FP32)
    bias = torch.randint(-50, 51, (experts, n)).float()
    assert BACKEND.checks_operands(problem, tactic)
    monkeypatch.setattr(backend, "new_bytes", lambda device, size: poisoned(size, dtype=torch.uint8))
    BACKEND.launcher(problem, tactic, BLACKWELL)(Operands(a, b.t(), a_scale, b_scale, alpha, bias), out)
    layouts = SCALE_LAYOUTS[layout], SCALE_LAYOUTS[layout]
    assert torch.equal(out, expert_gemm(a, a_scale, b, b_scale, alpha, bias, FP32, fmt, *layouts))


CONFIG = fp4_tcgen05_experts.plan(
    fmt=NVFP4,
    layout=SCALE_LAYOUTS["128x4"],
    out_dtype=BF16,
    expert_k=256,
    tile_n=128,
    classes=2,
    routed=True,
    arch=ARCHS["sm_100a"],
    pdl=True,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": SCALE_LAYOUTS["8x4"]}, "scales are linear or in tiles of 128 rows, not 8x4"),
        ({"expert_k": 96}, "an expert's width is 96; it has to be a multiple of 64"),
        ({"tile_n": 96}, "tile_n is 96; it has to be one of (32, 64, 128)"),
        ({"classes": 4}, "there are 4 classes of experts; the number has to be one of (1, 2, 3, 5, 8)"),
        (
            {"layout": SCALE_LAYOUTS["linear"], "tile_n": 64, "bias_dtype": FP32},
            "tile_n is 64; with linear scales it must be at most 32",
        ),
        ({"layout": SCALE_LAYOUTS["linear"]}, "tile_n is 128; with linear scales it must be at most 64"),
        ({"stages": 7}, "bytes of shared memory; sm_100a has 232448"),
    ],
)
def test_refused_configs(changes: dict[str, Any], reason: str) -> None:
    assert CONFIG is not None and CONFIG.reason_unsupported(ARCHS["sm_100a"]) is None
    assert reason in (dataclasses.replace(CONFIG, **changes).reason_unsupported(ARCHS["sm_100a"]) or "")
    assert HOPPER.arch is not None
    assert CONFIG.reason_unsupported(HOPPER.arch) == "sm_90a has no tcgen05 instructions"


@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("width", [256, 320])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_columns_of_tensor_memory(fmt: Any, width: int, columns: int) -> None:
    """Check that two accumulators and the scales of two k tiles fit into tensor memory.

    If experts begin inside a scale tile, the scales need one more tile.
    """
    assert CONFIG is not None
    config = dataclasses.replace(CONFIG, fmt=fmt, expert_k=width, tile_n=columns)
    used = config.acc_columns + 2 * config.stage.scale_columns
    assert config.acc_columns == 2 * columns and used <= config.tmem_columns <= 512
    assert config.tmem_columns < 2 * used
    tiles = 256 // (4 * fmt.block_size) + (fmt == MXFP4 and width == 320)
    assert config.stage.scale_columns == 2 * 4 * tiles
