"""MXFP8 GEMMs by tcgen05, run thread by thread in the PTX emulator and compared with exact sums.

No GPU with these instructions was available: these tests are the only evidence of the kernel's results.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.epilogues import finished, operands
from support.fp8_runs import E4M3, launch, tiled
from support.fp8_runs import MatrixRun as Run
from support.host_grids import check_ctas, check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated, check_machine_code, check_same_ptx
from support.kernel_grid import BF16, FP16, FP32, MXFP8Tcgen05Case
from support.ptx_faults import (
    CONVERGED,
    FOURTH_TILE,
    FP8_TCGEN05,
    LOOPS,
    NOTHING_READ,
    ONE_TILE,
    READ_LATE,
    Edit,
    Unfound,
    check_faults,
)

from torch_cute_ops.formats.fp4 import UE8M0_NAN
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

BLOCK = 32
SPARE = 1
"""Number of weight rows that follow the weight. They hold NaN."""


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return a matrix in float64: its codes times its scales."""
    powers = torch.exp2(scales.double() - 127)
    powers[scales == UE8M0_NAN] = torch.nan
    return codes.double() * powers.repeat_interleave(BLOCK, 1)


def launch_scaled(
    run: Run,
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *terms: Any,
    **how: Any,
) -> torch.Tensor:
    """Run the kernel for e4m3 matrices and their linear scales. ``launch`` gets the other arguments."""
    padded = torch.full((run.n + SPARE, run.k), torch.nan).to(E4M3)
    padded[: run.n] = weight
    return launch(
        run, a, padded[: run.n].t(), *(tiled(scale, UE8M0_NAN) for scale in (a_scale, b_scale)), *terms, **how
    )


def execute(
    run: Run, seed: int | None = 0, edit: Edit | None = None, late: bool = False, special: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's output and the expected output.

    Operands are whole numbers and scales are powers of two, so that every sum is exact. NaN follows the last scales and
    the weight. If ``late``, the previous kernel writes the operands at the last moment. If ``special``, some scales
    are NaN, 2^-127 or large.
    """
    torch.manual_seed(run.n + run.k)
    a = torch.randint(-4, 5, (run.m, run.k)).to(E4M3)
    weight = torch.randint(-3, 4, (run.n, run.k)).to(E4M3)
    a_scale, b_scale = (torch.randint(125, 130, (rows, run.k // BLOCK)).to(torch.uint8) for rows in (run.m, run.n))
    if special:
        a_scale[0, 0], a_scale[-1] = UE8M0_NAN, 0
        b_scale[1, 1], b_scale[-1] = UE8M0_NAN, 180
    alpha, bias = operands(run.case.epilogue, run.n, None)
    sums = decoded(a, a_scale) @ decoded(weight, b_scale).t()
    want = finished(sums.float(), run.case.epilogue, alpha, bias)
    return launch_scaled(run, a, weight, a_scale, b_scale, alpha, bias, late=late, seed=seed, edit=edit), want


def case(tile_m: int, *epilogue: Any, cta_group: int = 1, split_k: int = 1, stages: int = 3) -> MXFP8Tcgen05Case:
    return MXFP8Tcgen05Case(tile_m, cta_group, split_k, Epilogue(*epilogue), stages=stages)


# Launches with partial tiles along M, N and K, more k tiles than stages, and, except with split-K, at least three tiles
# for each CTA. Tiles of fewer than 128 tokens begin at several rows of a scale tile.
COVERING = [
    Run(case(16, BF16, "column", BF16), 85, 136, 576),
    Run(case(32, FP32, "one", FP32), 150, 136, 448, 2),
    Run(case(64, FP16, "column", FP16), 150, 136, 576),
    Run(case(128, BF16, "column", FP32), 150, 264, 448, 2),
    Run(case(128, FP32, None, FP32), 300, 72, 1088),
    Run(case(16, BF16, "column", BF16, split_k=8, stages=2), 21, 72, 2624),
    Run(case(32, FP32, split_k=4), 70, 72, 1152),
    Run(case(64, FP32, "one", FP32, split_k=2), 70, 136, 1088),
    Run(case(128, FP16, "column", FP16, split_k=2, stages=4), 130, 136, 832),
    Run(case(128, BF16, "column", BF16, cta_group=2), 300, 392, 576, 2),
    # The second CTA of the last pair owns no weight row.
    Run(case(128, FP32, "one", FP32, cta_group=2), 300, 328, 448, 2),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in COVERING])
def test_gemm(run: Run) -> None:
    """Check that results equal the exact sums bit for bit, in two orders of events."""
    for seed in (None, 1):
        got, want = execute(run, seed, late=seed is not None)
        assert torch.equal(got, want)


@pytest.mark.parametrize("covering", [1, 7, 9])
def test_special_scales(covering: int) -> None:
    """Check that a NaN scale makes its row or column NaN, and check the smallest and a large scale."""
    got, want = execute(COVERING[covering], special=True)
    assert want.isnan().any() and not want.isnan().all()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def test_each_block_takes_its_own_scales() -> None:
    """Check one-hot rows: element k of row k of ``a`` is 1, so row k of the result is row k of the weight, times both
    scales of the block of k."""
    run = Run(case(32, FP32), 192, 136, 192, 2)
    a = torch.eye(run.k).to(E4M3)
    weight = torch.randint(-3, 4, (run.n, run.k)).to(E4M3)
    a_scale, b_scale = (torch.randint(100, 154, (rows, run.k // BLOCK), dtype=torch.uint8) for rows in (run.m, run.n))
    want = torch.empty(run.m, run.n)
    for row in range(run.k):
        exponent = a_scale[row, row // BLOCK].int() + b_scale[:, row // BLOCK].int() - 254
        want[row] = weight.float()[:, row] * 2.0**exponent
    assert torch.equal(launch_scaled(run, a, weight, a_scale, b_scale, None, None), want)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in COVERING])
def test_compiles_without_spills(run: Run) -> None:
    """Check the registers and spills of kernels with these warp roles, which ``test_compile_kernels`` does not
    check."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize("covering", [0, 9])
def test_other_gpus_have_the_same_ptx(covering: int) -> None:
    """Check that the emulator's results apply to sm_103a too."""
    check_same_ptx(COVERING[covering].case, "sm_103a")


@pytest.mark.parametrize(("covering", "arch"), [(0, "sm_100a"), (3, "sm_103a"), (7, "sm_100a"), (9, "sm_103a")])
def test_machine_code(covering: int, arch: str) -> None:
    """Check that the machine code multiplies FP8 on the tensor cores of tcgen05 (four MMAs for a k tile), and not by
    warp-level MMAs of 16 bits."""
    check_machine_code(COVERING[covering].case, arch, {"UTCQMMA": 4})


@pytest.mark.parametrize("covering", [3, 7])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    one = COVERING[covering].case
    check_nothing_is_launched_on_overlap(one.kernel, ARCHS[one.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "ctas"),
    [
        # Expected CTAs for M = 300 and N = 400: m tiles times n tiles, times split_k or the two CTAs of a pair. Without
        # split-K, at most one CTA for each SM, in whole pairs.
        (0, 148, 19 * 4),
        (0, 7, 7),
        (5, 7, 19 * 4 * 8),
        (9, 148, 3 * 2 * 2),
        (9, 7, 6),
    ],
)
def test_ctas(covering: int, sms: int, ctas: int) -> None:
    """Check the number of CTAs: at most one for each SM, in whole pairs; with split-K, a cluster for each tile."""
    check_ctas(COVERING[covering].case, ctas, n=400, rows=300, k=256, max_ctas=sms)


# Faults. Each case takes more k tiles than stages, and, except with split-K, three tiles for each CTA.

FAULTY = {
    "one": Run(case(16, FP32, "column", stages=2), 47, 136, 448),
    "pair": Run(case(128, BF16, cta_group=2, stages=2), 260, 136, 320, 2),
    "split": Run(case(16, FP32, "one", split_k=2), 31, 72, 1600),
}
UNFOUND: dict[str, dict[str, Unfound]] = {
    "one": {**LOOPS, "barrier of the warp left out": CONVERGED},
    "pair": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED,
        "kernel before not waited for": NOTHING_READ,
        "other count of arrivals": FOURTH_TILE,
    },
    "split": {
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "kernel before not waited for": READ_LATE,
        "wait left out": ONE_TILE,
        "arrival left out": ONE_TILE,
        "other count of arrivals": ONE_TILE,
        "fence before left out": ONE_TILE,
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that faults are found: omitted or altered waits, arrivals, commits, fences, descriptors, copies, scales."""
    run = FAULTY[name]
    faulty = functools.partial(execute, run, late=True)
    check_faults(faulty, run.case.kernel, run.case.arch, UNFOUND[name], request, kinds=FP8_TCGEN05, least=30)
