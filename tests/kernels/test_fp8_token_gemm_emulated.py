"""Kernels of FP8 GEMMs with per-token scales, executed in the PTX emulator and compared with exact sums."""

import dataclasses
from typing import Any

import pytest
import torch
from support.emulated import (
    PASSED,
    WAIT,
    changed,
    check_in_orders,
    check_prefetched,
    check_read_ahead,
    check_static_weight,
    poisoned,
    to_prefetch,
    written_late,
)
from support.epilogues import operands
from support.fp8_runs import E4M3, expected
from support.fp8_runs import ExpertRun as Run
from support.host_grids import check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, FP8TokenGemmCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import run_kernel
from ptx_emulator.memory import Deadlock
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp8_token_wgmma import Arguments
from torch_cute_ops.runtime.arch import ARCHS


def execute(
    run: Run, edit: Any = None, late: tuple[str, ...] | None = None, **changes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result, which is poison in rows that no expert owns.

    Operands are whole numbers and scales are powers of two, so that every sum is exact. Rows that no expert owns are
    NaN.
    """
    torch.manual_seed(run.n + run.k)
    case, rows, experts = run.case, run.rows.total, len(run.counts)
    a = torch.randint(-4, 5, (rows, run.k)).float()
    a[run.rows.owner < 0] = torch.nan
    weight = torch.randint(-3, 4, (experts, run.n, run.k)).float()
    scale = torch.exp2(torch.randint(-3, 4, (1 if run.has_one_scale else rows, 1)).float()).expand(rows, 1)
    alpha, bias = operands(case.epilogue, run.n, run.experts)
    want = expected(run, a, weight, scale, torch.ones(experts, run.n, 1), alpha, bias)
    kernel = case.kernel
    if changes:
        kernel = type(kernel)(dataclasses.replace(kernel.config, **changes))
        assert kernel.config.reason_unsupported(ARCHS[case.arch]) is None
    lead = run.rows.lead
    out = poisoned(*lead, run.n, dtype=case.epilogue.out_dtype)
    prefetched = to_prefetch(case)
    given = Arguments(
        a=a.to(E4M3).view(*lead, run.k),
        b=weight[0].to(E4M3).t() if run.experts is None else weight.to(E4M3).mT,
        a_scale=scale,
        b_scale=None,
        **run.rows.tensors,
        alpha=alpha,
        bias=bias,
        out=out,
        prefetch=prefetched,
        max_ctas=run.max_ctas,
    )
    given, written = written_late(given, late or ())
    before = None if late is None else written
    arch = ARCHS[case.arch]
    machines = run_kernel(kernel, arch, *given, seed=run.seed, strict=True, edit=edit, written_before=before)
    check_prefetched(machines, prefetched)
    return out.view(rows, run.n), want


def case(layout: str, tile: tuple[int, int, int], fast: bool, *epilogue: Any, **hints: bool) -> FP8TokenGemmCase:
    return FP8TokenGemmCase(layout, tile, fast, Epilogue(*epilogue), **hints)


def mma(layout: str, tile: int | tuple[int, int], *epilogue: Any, arch: str = "sm_120a") -> FP8TokenGemmCase:
    """Return a case of the kernel ``fp8_mma``. ``tile`` is ``tile_m``, or ``tile_m`` and ``split_k``."""
    sizes = tile if isinstance(tile, tuple) else (tile,)
    return FP8TokenGemmCase(layout, sizes, False, Epilogue(*epilogue), arch, family="fp8_mma")


# Runs with partial tiles, experts without rows, several tiles per CTA, more k tiles than stages, fewer k tiles than one
# iteration of the loop, a last k tile of 64 elements, and one scale for all rows
RUNS = [
    Run(case("plain", (16, 128, 1), False, FP32), (3,), 136, 1984, 1, seed=None),
    Run(case("plain", (16, 64, 2), True, BF16, "column", BF16), (11,), 200, 1344, 2, has_one_scale=True),
    Run(case("plain", (64, 128, 3), False, BF16, "column"), (70,), 136, 896, 3, seed=2),
    Run(case("counted", (32, 128, 4), True, FP32, "expert_column", FP32), (3, 0, 30), 264, 640, 4, seed=1),
    Run(case("offsets", (32, 64, 1), False, FP16, "one"), (16, 0, 23), 264, 256, 3),
    Run(case("masked", (64, 128, 1), True, BF16, "expert_column"), (3, 0, 70), 136, 576, 4, room=72),
    Run(case("plain", (128, 128, 1), False, FP16, "column", FP16), (200,), 264, 1472, 2, seed=None),
    Run(case("plain", (128, 192, 1), True, BF16, "column"), (150,), 392, 1600, 1, seed=1),
    Run(case("counted", (128, 192, 1), False, FP32, "expert_column", FP32), (130, 0, 3), 200, 1088, 2),
    Run(case("masked", (128, 128, 1), True, BF16, "expert"), (3, 0, 70), 264, 704, 1, room=74),
    # Runs with several tiles of one k tile, or of two k tiles
    Run(case("offsets", (128, 64, 1), True, BF16, "expert_column"), (70, 64, 3), 136, 128, 1),
    Run(case("counted", (128, 128, 1), False, BF16), (3, 130, 0, 9), 136, 192, 1, seed=3),
    Run(case("plain", (64, 64, 1), True, FP32, "one", prefetches=True), (77,), 136, 384, 4),
    Run(mma("plain", 16, BF16, "column", BF16), (19,), 136, 704, 1, seed=None),
    Run(mma("plain", 64, FP32, "one", FP32), (70,), 136, 192, 2, has_one_scale=True),
    Run(mma("counted", 16, FP32, "expert_column", FP32), (17, 0, 3), 72, 320, 2, seed=1),
    Run(mma("offsets", 64, BF16, "expert"), (65, 3), 72, 448, 1),
    Run(mma("masked", 16, FP16, "expert_column", arch="sm_90a"), (3, 0, 20), 136, 64, 2, room=21),
    Run(mma("plain", (16, 4), BF16, "column", BF16), (19,), 136, 832, 4, seed=1),
    Run(mma("plain", (64, 2), FP32, "one", FP32), (70,), 136, 192, 4, seed=None, has_one_scale=True),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_gemm(run: Run) -> None:
    """Check that results equal the expected results bit for bit, and that rows of padding are neither used nor
    written."""
    got, want = execute(run)
    assert torch.equal(got, want)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_compiles_without_spills(run: Run) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(run.case, run.case.kernel)


def test_nothing_is_launched_on_overlap() -> None:
    """Check that nothing is launched if the result overlaps any other tensor of a call, including alpha and bias per
    expert."""
    check_nothing_is_launched_on_overlap(RUNS[3].case.kernel, ARCHS["sm_90a"])


STATIC = Run(case("plain", (16, 128, 2), False, BF16, "column", BF16), (5,), 136, 320, 6, seed=1)


def test_a_static_weight() -> None:
    check_static_weight(execute, STATIC)


def test_whether_a_weight_is_read_before_the_wait() -> None:
    check_read_ahead(execute, STATIC)


MANY = Run(case("plain", (128, 64, 1), False, BF16), (130,), 120, 1728, 1)
FAST = Run(case("counted", (128, 64, 1), True, BF16), (130, 3), 72, 704, 1)
SWAPPED = Run(case("masked", (16, 64, 1), True, BF16), (3, 5), 72, 1792, 1, room=8)


@pytest.mark.parametrize(
    ("run", "edit"),
    [
        pytest.param(MANY, changed(WAIT, None, PASSED), id="copies arrived"),
        pytest.param(MANY, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs done"),
        pytest.param(FAST, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs done, fast"),
        pytest.param(SWAPPED, changed(WAIT, 0, PASSED), id="stage empty"),
        pytest.param(SWAPPED, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs done, swapped"),
    ],
)
def test_what_orders_a_gemm_is_needed(run: Run, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes a wait."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        check_in_orders(execute, run, 3, edit)


WAITS = 12


@pytest.mark.parametrize("wait", range(WAITS))
def test_every_wait_is_needed(wait: int) -> None:
    """Check that each wait is needed: of the producer, and of consumers with and without rows, in the loop and after
    it."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        check_in_orders(execute, MANY, 3, changed(WAIT, wait, PASSED))


def test_those_are_all_waits() -> None:
    with pytest.raises(IndexError):
        execute(MANY, changed(WAIT, WAITS, PASSED))


@pytest.mark.parametrize("run", [MANY, FAST, SWAPPED], ids=["many", "fast", "swapped"])
def test_what_orders_a_gemm_is_enough(run: Run) -> None:
    check_in_orders(execute, run, 3)
