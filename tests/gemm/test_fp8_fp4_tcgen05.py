"""The backend ``tcgen05`` of FP8 x FP4 GEMMs: supported problems, tactics, estimates, and its call of the kernel."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import Sample, grouped_mm_fp8_fp4, mm_fp8_fp4
from samples._fp8_fp4_tokens import with_tokens
from support.emulated import CPU, poisoned
from support.gemm_problems import (
    FP32,
    HOPPER,
    ROW_LAYOUTS,
    backend_for,
    check_needs_tcgen05,
    fp8_fp4_problem,
    fp8_problem,
)
from support.tactics import check_every_tactic

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.formats.fp8 import FP8_TOKEN
from torch_cute_ops.gemm.backends import _fp8
from torch_cute_ops.gemm.backends.fp8_fp4_tcgen05 import aligned_codes
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.gemm.select import choose, target_of
from torch_cute_ops.kernels import fp8_fp4_tcgen05
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])


def block_problem(**given: Any) -> GemmProblem:
    """Return a problem with block scales of the activations."""
    return fp8_fp4_problem(**given)


def token_problem(fmt: Any = NVFP4, **given: Any) -> GemmProblem:
    """Return a problem with per-token scales, and prepared scales of the weight."""
    problem = fp8_fp4_problem(fmt, **given)
    return dataclasses.replace(problem, a=Operand(FP8_TOKEN), b=Operand(fmt, is_prepared=True))


BLOCK, TOKEN = backend_for("tcgen05", block_problem()), backend_for("tcgen05", token_problem())
BOTH = pytest.mark.parametrize("make", [block_problem, token_problem], ids=["block", "token"])


def of(make: Any) -> Any:
    """Return the backend for problems that ``make`` returns."""
    return BLOCK if make is block_problem else TOKEN


@BOTH
def test_supported_gpus(make) -> None:
    for rows in ROW_LAYOUTS:
        problem = make(rows=rows, experts=1 if rows.is_plain else 4)
        assert of(make).handles(problem)
        check_needs_tcgen05(of(make), problem)


@BOTH
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("rows", ROW_LAYOUTS, ids=["plain", "offsets", "counted", "masked"])
@pytest.mark.parametrize(("k", "m"), [(64, 1), (512, 17), (512, 250), (16_384, 65), (16_384, 4096)])
def test_tactics(make, fmt, rows, k, m) -> None:
    """Check that tile_m fits the rows of an expert, that narrow tiles are for few rows only, that split_k leaves no CTA
    idle, and that every kernel can be built."""
    experts = 1 if rows.is_plain else 4
    problem = make(fmt=fmt, k=k, rows=rows, experts=experts)
    of_expert = m if rows.is_masked else -(-m // experts)
    tactics = of(make).tactics(problem, m, BLACKWELL)
    assert tactics and len(set(tactics)) == len(tactics)
    for tactic in tactics:
        tile_m, cta_group, split_k = tactic
        assert cta_group == 1 and (tile_m >= 64 or tile_m >= of_expert)
        assert split_k <= -(-k // 128) and (rows.is_plain or split_k == 1)
        (kernel,) = of(make).kernels(problem, tactic, BLACKWELL.arch)
        assert kernel.config.reason_unsupported(BLACKWELL.arch) is None
        assert kernel.config.has_blocks == (make is block_problem) and kernel.config.fmt == fmt
        assert ("mxfp4" in kernel.kernel) == (fmt == MXFP4 and k % 128 == 0)
        assert kernel.config.stages >= (4 if tile_m < 256 else 3)
    widest = max(tactic.tile_m for tactic in tactics)
    assert widest < 2 * of_expert * (2 if rows.has_offsets and not rows.has_counts else 1) or widest <= 32
    assert choose(problem, m, BLACKWELL).backend.name == "tcgen05"


@BOTH
def test_estimates(make) -> None:
    """Check that estimates do not fall with the number of rows, that few rows take little longer than reading the
    weight at 7.1 TB/s, and that one row takes less time than with an FP8 weight."""
    problem, backend = make(n=8192, k=8192), of(make)

    def least(m: int) -> float:
        return min(backend.estimate(problem, m, tactic, BLACKWELL) for tactic in backend.tactics(problem, m, BLACKWELL))

    assert 1 < least(1) / (problem.bytes_moved(1) / 6.8e12) < 2.5
    many = [least(m) for m in (1, 16, 64, 256, 1024, 4096)]
    assert many == sorted(many)
    fp8 = fp8_problem(8192, 8192)
    of_fp8 = backend_for("tcgen05", fp8)
    assert least(1) < min(of_fp8.estimate(fp8, 1, one, BLACKWELL) for one in of_fp8.tactics(fp8, 1, BLACKWELL))


def test_operands_that_torch_rearranges_cost_time() -> None:
    """Check that calls with prepared scales and without interleaved activations get the shortest estimate."""
    problem = token_problem()
    tactic = TOKEN.tactics(problem, 16, BLACKWELL)[0]
    interleaved = dataclasses.replace(problem, a=Operand(FP8_TOKEN, is_interleaved=True))
    unprepared = dataclasses.replace(problem, b=Operand(NVFP4, SCALE_LAYOUTS["128x4"]))
    usual, *others = (TOKEN.estimate(one, 16, tactic, BLACKWELL) for one in (problem, interleaved, unprepared))
    assert usual < min(others)
    assert [TOKEN.checks_operands(one, tactic) for one in (problem, interleaved, unprepared)] == [True, False, False]


def samples() -> Iterator[tuple[str, Sample]]:
    """Yield exact calls of both ops, in every layout of rows: with block scales, and with per-token scales. Of the
    calls with per-token scales, every second call is interleaved, and two of three calls use prepared scales."""
    calls, counts, spare = [], [3, 0, 20], {"exact": True, "spare": 5}
    for fmt, layout, k in ((NVFP4, "128x4", 448), (MXFP4, "linear", 448), (MXFP4, "128x4", 384)):
        calls += [
            mm_fp8_fp4.sample("plain", 19, 136, k, fmt, layout, CPU, exact=True),
            grouped_mm_fp8_fp4.contiguous("counted", fmt, layout, counts, 136, k, CPU, **spare),
            grouped_mm_fp8_fp4.contiguous("offsets", fmt, layout, counts, 136, k, CPU, counted=False, **spare),
            grouped_mm_fp8_fp4.masked("masked", fmt, layout, counts, 21, 136, k, CPU, exact=True),
        ]
    kinds = [{"prepared": i % 3 > 0, "interleaved": i % 2 == 0, "one_a_scale": i % 3 == 1} for i in range(len(calls))]
    tokens = [with_tokens(one, exact=True, **kind) for one, kind in zip(calls, kinds, strict=True)]
    for one in (*calls, *tokens):
        yield "mm_fp8_fp4" if one.name.endswith("plain") else "grouped_mm_fp8_fp4", one


CALLS = [pytest.param(*one, id=f"{one[1].name}-{i}") for i, one in enumerate(samples())]
COVERING = [CALLS[i] for i in (0, 3, 5, 10, 12, 15, 17, 19, 20, 22)]
"""Calls with every layout of rows and every format, for both kinds of scales. The calls with per-token scales have all
six combinations of ``prepared``, ``one_a_scale`` and ``interleaved``."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run calls of ``CALLS`` that combine the same cases in other ways only with ``--more-emulated``."""
    if metafunc.function is test_a_call:
        more = metafunc.config.getoption("more_emulated")
        metafunc.parametrize(("op", "sample"), CALLS if more else COVERING)


def test_a_call(op, sample, monkeypatch) -> None:
    """Call the backend's launcher with operands arranged as by the op, and check its kernel in the emulator."""
    spec = OPS[op]
    kwargs = {**sample.kwargs, "out_dtype": FP32}
    want = spec.reference(*sample.args, **kwargs)
    call = spec.bind(*sample.args, **kwargs)
    problem = spec.path.problem(call)
    backend = backend_for("tcgen05", problem)
    bound = call._asdict()
    target = dataclasses.replace(BLACKWELL, sms=2)
    run = lambda kernel, arch: lambda *given: run_kernel(kernel.make(), arch, *given, strict=True)  # noqa: E731
    monkeypatch.setattr(_fp8, "compile_kernel", run)
    a, b, a_scale, b_scale = (bound[name] for name in ("a", "b", "a_scale", "b_scale"))
    if backend is TOKEN:
        rows = want.shape[:-1].numel()
        a_scale = a_scale.reshape(-1, 1).expand(rows, 1)
    out = poisoned(*want.shape, dtype=FP32)
    rows_of_experts = [bound.get(name) for name in ("offsets", "counts")]
    operands = Operands(a, b, a_scale, b_scale, None, None, *rows_of_experts)
    backend.launcher(problem, backend.named((32, 1, 1)), target)(operands, out)
    used = torch.ones(len(got := out.flatten(0, -2)), dtype=torch.bool)
    if not problem.grouping.rows.is_plain:
        used = used_rows(len(got), *rows_of_experts)
        assert 0 < used.sum() < len(used)
    assert torch.equal(got[used], want.flatten(0, -2)[used])
    assert torch.equal(got[~used].view(torch.uint8), poisoned(*got[~used].shape, dtype=FP32).view(torch.uint8))


@pytest.mark.parametrize("experts", [None, 2])
def test_codes_are_aligned_for_tma(experts) -> None:
    """Check that codes are copied if their address, or the distance between experts, is not a multiple of 32 bytes."""
    shape = (8, 64) if experts is None else (experts, 8, 64)
    good = torch.randint(256, shape, dtype=torch.uint8).mT
    assert aligned_codes(good) is good
    moved = torch.cat((torch.zeros(16, dtype=torch.uint8), good.mT.flatten()))[16:].view(shape).mT
    assert moved.data_ptr() % 32
    apart = torch.nn.functional.pad(good.mT.flatten(-2), (0, 16))[..., : 8 * 64].unflatten(-1, (8, 64)).mT
    for one in (moved, *([] if experts is None else [apart])):
        got = aligned_codes(one)
        assert torch.equal(got, good) and got.stride()[-2:] == (1, 64)
        assert not any(start % 32 for start in (got.data_ptr(), *got.stride()[:-2]))


CONFIG = fp8_fp4_tcgen05.plan(
    rows=ExpertLayout(),
    epilogue=fp8_problem().epilogue,
    fmt=NVFP4,
    layout=SCALE_LAYOUTS["128x4"],
    tile_m=32,
    split_k=1,
    arch=BLACKWELL.arch,
    pdl=True,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 128}, "one of (16, 32, 64) with 1 CTAs for each MMA"),
        ({"tile_m": 8, "layout": None}, "one of (16, 32, 64, 128, 256) with 1 CTAs for each MMA"),
        ({"layout": SCALE_LAYOUTS["8x4"]}, "weight scales in the layout 8x4 are not supported"),
        ({"stages": 5}, "stages is 5; it has to be a multiple of 2, the number of decoder groups"),
        (
            {"rows": ExpertLayout(True), "split_k": 2},
            "one of (1,) with tile_m=32 and 1 CTAs for each MMA, with experts",
        ),
        ({"stages": 10}, "bytes of shared memory; sm_100a"),
        (
            {"epilogue": dataclasses.replace(fp8_problem().epilogue, alpha="expert")},
            "alpha is 'expert', but the GEMM is not grouped",
        ),
    ],
)
def test_refused_configs(changes, reason) -> None:
    assert CONFIG.reason_unsupported(BLACKWELL.arch) is None
    assert reason in dataclasses.replace(CONFIG, **changes).reason_unsupported(BLACKWELL.arch)
    assert "no tcgen05 instructions" in CONFIG.reason_unsupported(HOPPER.arch)


@pytest.mark.slow
@pytest.mark.gpu
def test_every_tactic() -> None:
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if not target.arch.has_tcgen05:
        pytest.skip("needs data-center Blackwell's tcgen05")
    for op, one in samples():
        on_gpu = dataclasses.replace(
            one, args=tuple(arg.to(target.device) if isinstance(arg, torch.Tensor) else arg for arg in one.args)
        )
        check_every_tactic(OPS[op], "tcgen05", on_gpu, {}, target)
