"""The backend ``tcgen05``: supported problems, tactics, estimates, and its launcher's call of the kernel."""

import dataclasses

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import CPU, poisoned
from support.gemm_problems import BF16, FP32, HOPPER, backend_for, check_needs_tcgen05, fp4_problem

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm.backends import _fp4
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels import fp4_tcgen05
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.runtime.arch import ARCHS

(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
BACKEND = backend_for("tcgen05", fp4_problem())


@pytest.mark.parametrize(
    ("reason", "problem"),
    [
        (None, fp4_problem(n=8, k=64)),
        (None, fp4_problem(n=4096, k=96 * 64, fmt=MXFP4, layout="linear")),
        ("a's scales have to be in the weight's layout, 128x4", fp4_problem(layout="8x4")),
        ("k=96: it has to be a multiple of 64", fp4_problem(k=96)),
        ("n=12 and k=64: they have to be multiples of 8 and 32", fp4_problem(n=12, k=64)),
        (
            "b has 6 scales a row; in the linear layout they have to be a multiple of 4",
            fp4_problem(k=192, fmt=MXFP4, layout="linear"),
        ),
    ],
)
def test_supported_problems(reason, problem):
    assert BACKEND.reason_unsupported(problem, BLACKWELL) == reason


def test_supported_gpus():
    check_needs_tcgen05(BACKEND, fp4_problem())
    assert not BACKEND.handles(fp4_problem(k=12 * 64, experts=12)) and not BACKEND.handles(fp4_problem(a_dtype=BF16))


@pytest.mark.parametrize("k", [64, 512, 16_384])
@pytest.mark.parametrize("m", [1, 8, 9, 32, 64, 65, 250, 4096])
def test_tactics(m, k):
    """Check that tile_m fits M, that narrow tiles are offered for few rows only, and that split_k leaves no CTA
    idle."""
    problem = fp4_problem(k=k)
    tactics = BACKEND.tactics(problem, m, BLACKWELL)
    assert len(set(tactics)) == len(tactics)
    for tactic in tactics:
        tile_m, cta_group, split_k = tactic
        assert (tile_m < 2 * m or tile_m == 8) and (tile_m >= 64 or tile_m >= m)
        assert split_k <= -(-k // 256) and (cta_group == 1 or split_k == 1)
        (kernel,) = BACKEND.kernels(problem, tactic, BLACKWELL.arch)
        assert kernel.config.reason_unsupported(BLACKWELL.arch) is None
    assert any(tactic.cta_group == 2 for tactic in tactics) == (m > 128)
    assert max(tactic.split_k for tactic in tactics) == min(8, -(-k // 256))


def test_estimates_are_near_the_limits():
    """Check estimates against a B200's data sheet: with few rows the weight is read at 7.5 TB/s, with many rows 8
    PFLOP/s are computed."""
    problem = fp4_problem(16_384, 16_384)

    def least(m):
        return min(BACKEND.estimate(problem, m, tactic, BLACKWELL) for tactic in BACKEND.tactics(problem, m, BLACKWELL))

    assert 1 < least(1) / (problem.bytes_moved(1) / 7.5e12) < 1.5
    assert 1 < least(16_384) / (problem.flops(16_384) / 8.2e15) < 1.6
    many = [least(m) for m in (1, 16, 64, 256, 1024, 4096)]
    assert many == sorted(many)


@pytest.mark.parametrize(
    ("fmt", "layout", "tactic"), [(NVFP4, "128x4", (16, 1, 2)), (MXFP4, "linear", (64, 1, 1))], ids=["nvfp4", "mxfp4"]
)
def test_a_call(fmt, layout, tactic, monkeypatch):
    """Call the backend's launcher, with the kernel executed in the emulator, and compare the result with the
    reference."""
    m, n, k = 11, 136, 640
    problem = fp4_problem(n, k, fmt, layout=layout, out_dtype=FP32, alpha="column", bias_dtype=FP32)
    target = dataclasses.replace(BLACKWELL, sms=2)
    monkeypatch.setattr(
        _fp4, "compile_kernel", lambda kernel, arch: lambda *call: run_kernel(kernel.make(), arch, *call, strict=True)
    )
    (a, a_scale), (b, b_scale) = (random_matrix(rows, k, fmt, layout, CPU, POWERS[fmt.scale_format]) for rows in (m, n))
    alpha, bias, out = torch.rand(n), torch.randn(n), poisoned(m, n, dtype=FP32)
    BACKEND.launcher(problem, BACKEND.named(tactic), target)(Operands(a, b.t(), a_scale, b_scale, alpha, bias), out)
    layouts = SCALE_LAYOUTS[layout], SCALE_LAYOUTS[layout]
    assert torch.equal(out, fp4_gemm(a, a_scale, b, b_scale, alpha, bias, FP32, fmt, *layouts))


CONFIG = fp4_tcgen05.plan(
    fmt=NVFP4,
    layout=SCALE_LAYOUTS["128x4"],
    epilogue=fp4_problem().epilogue,
    tile_m=64,
    arch=BLACKWELL.arch,
    pdl=True,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": SCALE_LAYOUTS["8x4"]}, "scales are linear or in tiles of 128 rows, not 8x4"),
        ({"tile_m": 24}, "tile_m is 24; it has to be one of (8, 16, 32, 64, 128, 256) with 1 CTAs for each MMA"),
        ({"cta_group": 2}, "tile_m is 64; it has to be one of (256,) with 2 CTAs for each MMA"),
        (
            {"cta_group": 2, "tile_m": 256, "split_k": 2},
            "split_k is 2; it has to be one of (1,) with 2 CTAs for each MMA",
        ),
        ({"split_k": 2, "stages": 1}, "33792 bytes of partial sums do not fit into 1 stages"),
        ({"split_k": 3}, "split_k is 3; it has to be one of (1, 2, 4, 8) with 1 CTAs for each MMA"),
        ({"stages": 12}, "bytes of shared memory; sm_100a has 232448"),
    ],
)
def test_refused_configs(changes, reason):
    assert CONFIG.reason_unsupported(BLACKWELL.arch) is None
    assert reason in dataclasses.replace(CONFIG, **changes).reason_unsupported(BLACKWELL.arch)
    assert CONFIG.reason_unsupported(HOPPER.arch) == "sm_90a has no tcgen05 instructions"


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_columns_of_tensor_memory(fmt, tokens):
    """Check that accumulators and scales fit into tensor memory together, and that two accumulators share columns only
    if necessary."""
    for group in (1, 2) if tokens == 256 else (1,):
        config = dataclasses.replace(CONFIG, fmt=fmt, tile_m=tokens, cta_group=group)
        used = config.acc_columns + 2 * config.stage.scale_columns
        assert used <= config.tmem_columns <= 512 and config.tmem_columns < 2 * used
        assert config.shared_columns % config.columns_per_load == config.acc_pitch % config.columns_per_load == 0
        assert (config.shared_columns > 0) == (tokens == 256) == (2 * tokens + 2 * config.stage.scale_columns > 512)
        # Columns for the scales of 128 rows and one k tile: in each quarter of the lanes, a column stores four scales
        # of 32 rows.
        assert config.stage.scale_columns == (1 + -(-tokens // 128)) * 128 * 256 // fmt.block_size // (4 * 32)
