"""The backend ``tcgen05`` of MXFP8 GEMMs: supported GPUs, tactics, estimates, and its calls of the kernel."""

import dataclasses
import itertools

import pytest
import torch
from samples import mm_fp8_block
from support.emulated import CPU, poisoned
from support.gemm_problems import FP32, HOPPER, backend_for, check_needs_tcgen05, mx_problem

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.gemm import error_bounds, select
from torch_cute_ops.gemm.backends import _fp8
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels import mxfp8_tcgen05
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
BACKEND = backend_for("tcgen05", mx_problem())


def test_supported_gpus() -> None:
    problem = mx_problem()
    check_needs_tcgen05(BACKEND, problem)
    for arch, m in itertools.product(ARCHS.values(), (1, 16, 300, 4096)):
        assert (select.choose(problem, m, usual_targets(arch)[0]).backend is BACKEND) == arch.has_tcgen05


@pytest.mark.parametrize("k", [64, 512, 16_384])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 250, 4096])
def test_tactics(k: int, m: int) -> None:
    """Check that tile_m fits the rows, that narrow tiles are for few rows only, that split_k leaves no CTA idle, and
    that every kernel can be built."""
    problem = mx_problem(k=k)
    tactics = BACKEND.tactics(problem, m, BLACKWELL)
    assert tactics and len(set(tactics)) == len(tactics)
    for tactic in tactics:
        tile_m, cta_group, split_k = tactic
        assert tile_m >= min(64, m) and (tile_m < 2 * m or tile_m == 16)
        assert split_k <= -(-k // 128) and (cta_group == 1 or split_k == 1)
        (kernel,) = BACKEND.kernels(problem, tactic, BLACKWELL.arch)
        assert kernel.config.reason_unsupported(BLACKWELL.arch) is None
    assert max(tactic.split_k for tactic in tactics) == min(8, 1 << (-(-k // 128)).bit_length() - 1)
    assert any(tactic.cta_group == 2 for tactic in tactics) == (m > 64)


def test_estimates_are_near_the_limits() -> None:
    """Check estimates against a B200's data sheet: with few rows, the weight is read at 7.1 TB/s. With many rows, 4.1
    PFLOP/s are computed, or less, because reading the operands of tiles of 128 tokens takes longer than the MMAs."""
    problem = mx_problem(8192, 8192)

    def least(m: int) -> float:
        return min(BACKEND.estimate(problem, m, tactic, BLACKWELL) for tactic in BACKEND.tactics(problem, m, BLACKWELL))

    assert 1 < least(1) / (problem.bytes_moved(1) / 6.8e12) < 1.7
    assert 1 < least(16_384) / (problem.flops(16_384) / 4.1e15) < 2
    many = [least(m) for m in (1, 16, 64, 256, 1024, 4096)]
    assert many == sorted(many)


def call(sample, tactic, problem, monkeypatch) -> torch.Tensor:
    """Run the backend's kernel in the emulator for a sample's operands; return the result."""
    target = dataclasses.replace(BLACKWELL, sms=2)
    run = lambda kernel, arch: lambda *call: run_kernel(kernel.make(), arch, *call, strict=True)  # noqa: E731
    monkeypatch.setattr(_fp8, "compile_kernel", run)
    out = poisoned(sample.args[0].shape[0], problem.n, dtype=problem.out_dtype)
    BACKEND.launcher(problem, BACKEND.named(tactic), target)(Operands(*sample.args), out)
    return out


@pytest.mark.parametrize(("layout", "weight_layout"), [*zip(SCALE_LAYOUTS, reversed(SCALE_LAYOUTS), strict=True)])
@pytest.mark.parametrize("k", [192, 512])
def test_a_call(layout: str, weight_layout: str, k: int, monkeypatch) -> None:
    """Call the backend with scales in each layout, for whole and for short k tiles."""
    one = mm_fp8_block.mx_sample("", 19, 136, k, CPU, exact=True, layout=layout, weight_layout=weight_layout)
    want = OPS["mm_fp8_block"].reference(*one.args, alpha=None, bias=None, out_dtype=FP32)
    assert torch.equal(call(one, (16, 1, 2), mx_problem(136, k, FP32), monkeypatch), want)


def test_tiled_scales_are_read_in_place(monkeypatch) -> None:
    """Check that no scales in the 128x4 layout are copied."""
    passed = []
    monkeypatch.setattr(_fp8, "compile_kernel", lambda *_: lambda *call: passed.append(call))
    one = mm_fp8_block.mx_sample("", 19, 136, 192, CPU, weight_layout="128x4")
    problem = mx_problem(136, 192, FP32)
    BACKEND.launcher(problem, BACKEND.named((32, 1, 1)), BLACKWELL)(Operands(*one.args), torch.empty(19, 136))
    ((_, _, a_scale, b_scale, *_),) = passed
    assert a_scale is one.args[2] and b_scale is one.args[3]


@pytest.mark.parametrize("tactic", [(64, 1, 1), (64, 1, 2), (128, 2, 1)])
def test_random_operands(tactic, monkeypatch) -> None:
    """Check results against sums in float64: each of K terms may cause one rounding in fp32."""
    one = mm_fp8_block.mx_sample("", 70, 264, 832, CPU)
    problem = mx_problem(264, 832, FP32)
    want, allowed = error_bounds.expected(problem, Operands(*one.args), 70, problem.k * error_bounds.EPS)
    got = call(one, tactic, problem, monkeypatch)
    assert error_bounds.difference(got, want, allowed) is None


CONFIG = mxfp8_tcgen05.plan(epilogue=mx_problem().epilogue, tile_m=64, arch=BLACKWELL.arch, pdl=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 256}, "tile_m is 256; it has to be one of (16, 32, 64, 128) with 1 CTAs for each MMA"),
        ({"cta_group": 2}, "tile_m is 64; it has to be one of (128,) with 2 CTAs for each MMA"),
        (
            {"cta_group": 2, "tile_m": 128, "split_k": 2},
            "split_k is 2; it has to be one of (1,) with tile_m=128 and 2 CTAs for each MMA, without experts",
        ),
        ({"split_k": 2, "stages": 1}, "33792 bytes of partial sums do not fit into 1 stages"),
        ({"stages": 10}, "bytes of shared memory; sm_100a has 232448"),
    ],
)
def test_refused_configs(changes, reason: str) -> None:
    assert CONFIG.reason_unsupported(BLACKWELL.arch) is None
    assert reason in dataclasses.replace(CONFIG, **changes).reason_unsupported(BLACKWELL.arch)
    assert CONFIG.reason_unsupported(HOPPER.arch) == "sm_90a has no tcgen05 instructions"


@pytest.mark.parametrize(
    ("tile_m", "split_k", "columns"), [(16, 1, 128), (32, 1, 256), (64, 8, 256), (128, 1, 512), (128, 2, 256)]
)
def test_columns_of_tensor_memory(tile_m: int, split_k: int, columns: int) -> None:
    """Check that a narrow tile leaves tensor memory to the next kernel."""
    config = mxfp8_tcgen05.plan(
        epilogue=mx_problem().epilogue, tile_m=tile_m, split_k=split_k, arch=BLACKWELL.arch, pdl=True
    )
    assert config.tmem_columns == columns
