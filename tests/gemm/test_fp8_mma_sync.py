"""The backend ``mma_sync`` of FP8 GEMMs and of FP8 x FP4 GEMMs: GPUs, choices, estimates, and its calls of kernels."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import Sample, grouped_mm_fp8, grouped_mm_fp8_fp4, mm_fp8, mm_fp8_block, mm_fp8_fp4
from samples._fp8_fp4_tokens import with_tokens
from support.emulated import CPU, poisoned
from support.gemm_problems import CPU as NO_GPU
from support.gemm_problems import (
    FP32,
    ROW_LAYOUTS,
    backend_for,
    fp8_fp4_problem,
    fp8_problem,
    mx_problem,
    token_problem,
)
from support.tactics import check_every_tactic, operands_of

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.formats.fp8 import FP8_TOKEN
from torch_cute_ops.gemm import error_bounds
from torch_cute_ops.gemm.backends import _fp8
from torch_cute_ops.gemm.backends.fp8_mma_sync import FP8MmaTactic
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.gemm.select import BACKENDS, choose, target_of
from torch_cute_ops.gemm.tune import Bench
from torch_cute_ops.kernels import fp8_fp4_mma, fp8_mma
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales, mxfp8_gemm
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

(CONSUMER, *_) = usual_targets(ARCHS["sm_120a"])


def fp4_token_problem(fmt: Any = NVFP4, **given: Any) -> GemmProblem:
    """Return a problem with per-token scales, interleaved activations, and prepared scales of the weight."""
    problem = fp8_fp4_problem(fmt, **given)
    return dataclasses.replace(problem, a=Operand(FP8_TOKEN, is_interleaved=True), b=Operand(fmt, is_prepared=True))


KINDS = {
    "block": fp8_problem,
    "token": token_problem,
    "fp4-block": fp8_fp4_problem,
    "fp4-token": fp4_token_problem,
}
EVERY = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@EVERY
def test_every_gpu_is_supported(make) -> None:
    for rows in ROW_LAYOUTS:
        problem = make(rows=rows, experts=1 if rows.is_plain else 4)
        backend = backend_for("mma_sync", problem)
        for arch in ARCHS.values():
            (target, *_) = usual_targets(arch)
            assert backend.reason_unsupported(problem, target) is None
            for tactic in backend.tactics(problem, 16, target):
                (kernel,) = backend.kernels(problem, tactic, arch)
                assert kernel.config.reason_unsupported(arch) is None and kernel.config.stages >= 2
        assert "needs a CUDA device" in backend.reason_unsupported(problem, NO_GPU)


@EVERY
@pytest.mark.parametrize("arch", ARCHS)
def test_choices(make, arch) -> None:
    """Check that ``"auto"`` takes the backend for few rows on GPUs without ``wgmma`` and ``tcgen05``, for an FP4 weight
    also for many rows, and never on other GPUs."""
    (target, *_) = usual_targets(ARCHS[arch])
    is_other = target.arch.has_wgmma or target.arch.has_tcgen05
    for fmt in (NVFP4, MXFP4) if "fp4" in make.__name__ else (None,):
        problem = make(n=4096, k=4096, **({} if fmt is None else {"fmt": fmt}))
        for m in (1, 16, 4096):
            found = choose(problem, m, target).backend.name
            assert (found == "mma_sync") == (not is_other and (m < 4096 or make is not token_problem))


@pytest.mark.parametrize("make", [fp8_problem, token_problem, mx_problem])
@pytest.mark.parametrize("arch", ARCHS)
def test_split_k(make, arch) -> None:
    """Check that tactics with split-K exist only on compute capability 12, without experts, for few tiles, and that
    each CTA then has a k tile. With few rows and a small N, ``"auto"`` takes such a tactic, and a launch consists of
    whole clusters."""
    (target, *_) = usual_targets(ARCHS[arch])
    small, large = (backend_for("mma_sync", make(n=1024)).tactics(make(n=n), 16, target) for n in (1024, 64 * 1024))
    is_split = {tactic.split_k for tactic in small} - {1}
    assert is_split == ({2, 4, 8} if target.arch.has_block_scaled_mma else set())
    assert {tactic.split_k for tactic in large} == {1}
    short = make(n=1024, k=256)
    backend = backend_for("mma_sync", short)
    assert max(tactic.split_k for tactic in backend.tactics(short, 16, target)) == (2 if is_split else 1)
    grouped = make(n=128, rows=ExpertLayout(True, True), experts=4)
    assert {tactic.split_k for tactic in backend_for("mma_sync", grouped).tactics(grouped, 16, target)} == {1}
    if not is_split:
        return
    problem = make(n=1024)
    choice = choose(problem, 16, target)
    assert choice.backend.name == "mma_sync" and choice.tactic.split_k > 1
    assert choice.backend.ctas(problem, choice.tactic, target) % choice.tactic.split_k == 0
    times = [choice.backend.estimate(problem, 16, FP8MmaTactic(16, split_k), target) for split_k in (1, 4)]
    assert times[1] < times[0] < 4 * times[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_mxfp8_on_every_gpu(arch) -> None:
    """Check that the backend supports MXFP8 on every GPU, and that ``"auto"`` takes it on compute capability 12 only.
    Further backends are ``wgmma``, ``tcgen05`` and the reference."""
    (target, *_) = usual_targets(ARCHS[arch])
    problem = mx_problem(28_672, 4096)
    assert [each.name for each in BACKENDS if each.handles(problem)] == ["wgmma", "tcgen05", "mma_sync", "reference"]
    name = "wgmma" if target.arch.has_wgmma else "tcgen05" if target.arch.has_tcgen05 else "mma_sync"
    for m in (1, 16, 256, 4096):
        assert choose(problem, m, target).backend.name == name
    backend = backend_for("mma_sync", problem)
    for tactic in backend.tactics(problem, 16, target):
        (kernel,) = backend.kernels(problem, tactic, target.arch)
        assert kernel.config.is_mx and kernel.config.reason_unsupported(target.arch) is None
        assert kernel.config.has_scaled_mmas == target.arch.has_block_scaled_mma
    assert backend.seconds(problem, 1, tactic, target) > problem.bytes_moved(1) / target.bandwidth
    assert problem.bytes_moved(2) == (2 + 28_672) * (4096 + 128) + 2 * 2 * 28_672


@pytest.mark.parametrize("arch", ARCHS)
def test_grouped_mxfp8_on_every_gpu(arch) -> None:
    """Check that with experts the backend is the only kernel of MXFP8 except on Hopper, and that all its kernels
    fit."""
    (target, *_) = usual_targets(ARCHS[arch])
    problem = mx_problem(rows=ExpertLayout(True, True), experts=8)
    assert [each.name for each in BACKENDS if each.handles(problem)] == ["wgmma", "mma_sync", "reference"]
    for m in (1, 16, 4096):
        assert choose(problem, m, target).backend.name == ("wgmma" if target.arch.has_wgmma else "mma_sync")
    backend = backend_for("mma_sync", problem)
    for tactic in backend.tactics(problem, 16, target):
        (kernel,) = backend.kernels(problem, tactic, target.arch)
        assert kernel.config.is_mx and kernel.config.rows == problem.grouping.rows
        assert kernel.config.reason_unsupported(target.arch) is None
        assert backend.seconds(problem, 16, tactic, target) < 1


def test_tiles_of_mxfp8() -> None:
    """Check that block-scaled MMAs take larger tiles for many rows, at most at the rate of FP8 MMAs, and that they are
    refused on other GPUs and for other scales."""
    problem = mx_problem(n=CONSUMER.sms * 128, k=8192)
    chosen = {m: choose(problem, m, CONSUMER) for m in (1, 8192)}
    assert [one.tactic.tile_m for one in chosen.values()] == [16, 64]
    peak = 2 * CONSUMER.arch.flops_per_clock * CONSUMER.sms * 1.7e9
    seconds = backend_for("mma_sync", problem).estimate(problem, 8192, chosen[8192].tactic, CONSUMER)
    assert 1 < seconds / (problem.flops(8192) / peak) < 2.5
    config = fp8_mma.plan(
        rows=ExpertLayout(), epilogue=problem.epilogue, tile_m=64, arch=CONSUMER.arch, pdl=True, is_mx=True
    )
    reason = "need MXFP8 operands and compute capability 12.0 or 12.1"
    assert config.reason_unsupported(CONSUMER.arch) is None
    assert reason in config.reason_unsupported(ARCHS["sm_90a"])
    assert reason in dataclasses.replace(config, is_mx=False).reason_unsupported(CONSUMER.arch)


def test_operands_of_tuning_in_mxfp8() -> None:
    """Check that tuning accepts the reference's results for its operands, and refuses results of one wrong scale."""
    problem = mx_problem(n=72, k=192, out_dtype=FP32)
    bench = Bench(problem, 9, dataclasses.replace(NO_GPU, device=CPU))
    operands, _ = bench._exact
    want, allowed = bench._expected
    a_scale, b_scale = (linear_mx_scales(*each, 192) for each in ((operands.a_scale, 9), (operands.b_scale, 72)))
    got = mxfp8_gemm(operands.a, operands.b.t(), a_scale, b_scale, None, None, FP32)
    assert error_bounds.difference(got, want, allowed) is None
    b_scale[3, 2] += 2
    got = mxfp8_gemm(operands.a, operands.b.t(), a_scale, b_scale, None, None, FP32)
    assert error_bounds.difference(got, want, allowed) is not None


@EVERY
def test_estimates(make) -> None:
    """Check that one row takes little longer than reading the weight, and many rows longer than their MMAs."""
    problem = make(n=CONSUMER.sms * 128, k=8192)
    backend = backend_for("mma_sync", problem)

    def least(m: int) -> float:
        return min(backend.estimate(problem, m, tactic, CONSUMER) for tactic in backend.tactics(problem, m, CONSUMER))

    assert 1 < least(1) / (problem.bytes_moved(1) / CONSUMER.bandwidth) < 1.5
    peak = 2 * CONSUMER.arch.flops_per_clock * CONSUMER.sms * 1.7e9
    assert 1 < least(8192) / (problem.flops(8192) / peak) < 2.5
    tactics = [choose(problem, m, CONSUMER, "mma_sync").tactic.tile_m for m in (1, 8192)]
    assert tactics == [16, 64]


def test_unprepared_scales_cost_time() -> None:
    problem = fp4_token_problem()
    unprepared = dataclasses.replace(problem, b=Operand(NVFP4, SCALE_LAYOUTS["128x4"]))
    backend = backend_for("mma_sync", problem)
    tactic = backend.tactics(problem, 16, CONSUMER)[0]
    usual, other = (backend.estimate(one, 16, tactic, CONSUMER) for one in (problem, unprepared))
    assert usual < other
    assert backend.checks_operands(problem, tactic) and not backend.checks_operands(unprepared, tactic)


def samples(m: int, n: int, k: int, device: torch.device) -> Iterator[tuple[str, Sample]]:
    """Yield exact calls with both kinds of scales, prepared and unprepared scales, and interleaved activations."""
    counts, exact = [m, 0, m // 2 + 1], {"exact": True}
    weights = ("fmt", NVFP4, "128x4"), ("fmt", MXFP4, "linear")
    calls = [
        ("mm_fp8_fp4", mm_fp8_fp4.sample("block", m, n, k, *weights[0][1:], device, exact=True)),
        ("grouped_mm_fp8_fp4", grouped_mm_fp8_fp4.contiguous("block", *weights[1][1:], counts, n, k, device, **exact)),
        ("mm_fp8_block", mm_fp8_block.mx_sample("mxfp8", m, n, k, device, exact=True, layout="linear")),
        ("mm_fp8", mm_fp8.sample("token", m, n, k, device, exact=True)),
        ("mm_fp8", mm_fp8.sample("tensor", m, n, k, device, exact=True, one_a_scale=True, one_b_scale=True)),
    ]
    masked = grouped_mm_fp8.masked("token", counts, m + 3, n, k, device, exact=True)
    calls.append(("grouped_mm_fp8", grouped_mm_fp8.with_token_scales(masked, exact=True)))
    kinds = ((True, True), (True, False), (False, True), (False, False))
    for i, (prepared, interleaved) in enumerate(kinds):
        fmt, layout = weights[i // 2][1:]
        if i % 2:
            op, one = "mm_fp8_fp4", mm_fp8_fp4.sample(f"token{i}", m, n, k, fmt, layout, device, exact=True)
        else:
            op = "grouped_mm_fp8_fp4"
            one = grouped_mm_fp8_fp4.masked(f"token{i}", fmt, layout, counts, m + 3, n, k, device, exact=True)
        calls.append((op, with_tokens(one, exact=True, prepared=prepared, interleaved=interleaved, one_a_scale=i == 2)))
    yield from calls


CALLS = list(samples(5, 72, 192, CPU))


@pytest.mark.parametrize(("op", "sample"), [pytest.param(*one, id=f"{one[0]}-{one[1].name}") for one in CALLS])
def test_a_call(op, sample, monkeypatch) -> None:
    """Check a launcher's call of the kernel in the emulator, with the operands arranged as by the op."""
    spec, kwargs = OPS[op], {**sample.kwargs, "out_dtype": FP32}
    want = spec.reference(*sample.args, **kwargs)
    call = spec.bind(*sample.args, **kwargs)
    problem = spec.path.problem(call)
    backend = backend_for("mma_sync", problem)
    target = dataclasses.replace(CONSUMER, sms=1)
    run = lambda kernel, arch: lambda *given: run_kernel(kernel.make(), arch, *given, strict=True)  # noqa: E731
    monkeypatch.setattr(_fp8, "compile_kernel", run)
    out = poisoned(*want.shape, dtype=FP32)
    backend.launcher(problem, backend.named((16, 1)), target)(operands_of(problem, call), out)
    got, want = out.flatten(0, -2), want.flatten(0, -2)
    used = torch.ones(len(got), dtype=torch.bool)
    if not problem.grouping.rows.is_plain:
        used = used_rows(len(got), call.offsets, call.counts)
    assert torch.equal(got[used], want[used])
    assert torch.equal(got[~used].view(torch.uint8), poisoned(*got[~used].shape, dtype=FP32).view(torch.uint8))


CONFIG = fp8_fp4_mma.plan(
    rows=ExpertLayout(),
    epilogue=fp8_problem().epilogue,
    fmt=NVFP4,
    layout=SCALE_LAYOUTS["128x4"],
    tile_m=16,
    arch=CONSUMER.arch,
    pdl=True,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 32}, "no tile has tile_m=32"),
        ({"layout": SCALE_LAYOUTS["8x4"]}, "weight scales in the layout 8x4 are not supported"),
        ({"is_interleaved": True}, "k of activations with block scales is never interleaved"),
        ({"stages": 8}, "bytes of shared memory; sm_120a"),
    ],
)
def test_refused_configs(changes, reason) -> None:
    assert CONFIG.reason_unsupported(CONSUMER.arch) is None
    assert reason in dataclasses.replace(CONFIG, **changes).reason_unsupported(CONSUMER.arch)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(1, 128), (9, 448), (70, 2880)])
def test_every_tactic(m, k) -> None:
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    for op, one in samples(m, 264, k, target.device):
        check_every_tactic(OPS[op], "mma_sync", one, {"out_dtype": FP32}, target)
