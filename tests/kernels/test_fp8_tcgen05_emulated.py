"""FP8 GEMMs by tcgen05, run thread by thread in the PTX emulator and compared with exact sums.

No GPU with these instructions was available: these tests are the only evidence of the kernel's results.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from samples._fp8_gemm import NAN
from support.epilogues import operands
from support.fp8_runs import BLOCK, E4M3, activation_scales, expected, launch_rows, powers, void_padding
from support.fp8_runs import ExpertRun as Run
from support.host_grids import check_ctas, check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated, check_machine_code, check_same_ptx
from support.kernel_grid import BF16, FP16, FP32, FP8Tcgen05Case
from support.ptx_faults import (
    ACC_USED_ONCE,
    CONVERGED,
    FOURTH_TILE,
    FP8_TCGEN05,
    LOOPS,
    MISSING,
    ONE_TILE,
    TABLE_ENDS,
    Edit,
    Unfound,
    check_faults,
)

from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS


def execute(
    run: Run, seed: int | None = 0, edit: Edit | None = None, late: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's output and the expected output, which is poison in rows that no expert owns.

    Operands are whole numbers and scales are powers of two, so that every sum is exact. Rows that no expert owns hold
    NaN, and NaN follows the weight of each expert. If ``late``, the previous kernel writes the operands at the last
    moment.
    """
    torch.manual_seed(run.n + run.k)
    case, is_plain, experts, n, k = run.case, run.experts is None, len(run.counts), run.n, run.k
    a = torch.randint(-4, 5, (run.rows.total, k)).float()
    weight = torch.randint(-3, 4, (experts, n, k)).float()
    a_scale, b_scale, units = activation_scales(run, case.has_blocks), None, torch.ones(experts, n, 1)
    if case.has_blocks:
        b_scale = powers(experts, -(-n // BLOCK), -(-k // BLOCK))
        units = b_scale.repeat_interleave(BLOCK, 1)[:, :n]
    terms = operands(case.epilogue, n, run.experts)
    want = expected(run, a, weight, a_scale, units, *terms)
    void_padding(run, a, a_scale)
    padded = torch.full((experts, n + 1, k), NAN, dtype=torch.uint8)
    padded[:, :n] = weight.to(E4M3).view(torch.uint8)
    b = padded.view(E4M3)[:, :n].mT
    if is_plain:
        b, b_scale = b[0], None if b_scale is None else b_scale[0]
    return launch_rows(run, a.to(E4M3), b, a_scale, b_scale, *terms, late=late, seed=seed, edit=edit), want


def case(
    layout: str, scales: str, tile_m: int, *epilogue: Any, cta_group: int = 1, split_k: int = 1, stages: int = 3
) -> FP8Tcgen05Case:
    return FP8Tcgen05Case(layout, scales == "block", tile_m, cta_group, split_k, Epilogue(*epilogue), stages=stages)


# Launches with partial tiles along M, N and K, more k tiles than stages, and, except with split-K, at least three tiles
# for each CTA
COVERING = [
    Run(case("plain", "token", 16, BF16, "column", BF16), (5,), 328, 576),
    Run(case("plain", "token", 32, FP32, "one", FP32), (90,), 136, 448, 2),
    Run(case("plain", "token", 64, FP16, "column", FP16), (150,), 136, 576, has_one_scale=True),
    Run(case("plain", "token", 128, BF16, "column", FP32), (150,), 264, 448, 2),
    Run(case("plain", "token", 256, BF16, "one"), (300,), 136, 576),
    Run(case("plain", "token", 16, BF16, "column", BF16, split_k=8, stages=2), (5,), 72, 2624),
    Run(case("plain", "token", 64, FP32, "one", FP32, split_k=2), (70,), 136, 1088),
    Run(case("offsets", "token", 32, FP16, "expert_column"), (16, 0, 41), 136, 448),
    Run(case("counted", "token", 64, FP32, "expert", FP32), (3, 0, 70), 200, 448, 2),
    Run(case("masked", "token", 128, BF16, "expert_column", BF16), (3, 0, 130), 136, 448, room=132),
    Run(case("plain", "block", 16, FP32, "column", FP32), (5,), 328, 1088),
    Run(case("plain", "block", 32, BF16), (70,), 136, 1216, 2),
    Run(case("plain", "block", 64, FP16, "one", FP16), (150,), 136, 576),
    Run(case("plain", "block", 128, BF16, "column", FP32), (270,), 136, 576, 2),
    Run(case("plain", "block", 16, FP32, None, FP32, split_k=4), (5,), 136, 1984),
    Run(case("plain", "block", 64, BF16, "column", BF16, split_k=2), (70,), 72, 1088),
    Run(case("offsets", "block", 64, FP32, "expert_column", FP32), (70, 64, 3), 136, 448),
    Run(case("counted", "block", 32, BF16, "expert"), (3, 0, 33), 264, 576, 2),
    Run(case("masked", "block", 16, FP16, "expert_column", FP16), (3, 0, 20), 136, 576, room=21),
    Run(case("counted", "block", 128, FP32, "one", FP32), (130, 3), 136, 448),
    Run(case("plain", "token", 256, BF16, "column", BF16, cta_group=2), (300,), 392, 576, 2),
    Run(case("masked", "token", 256, FP32, "expert_column", FP32, cta_group=2, stages=2), (3, 260), 136, 448, 2, 262),
    Run(case("plain", "block", 128, FP32, "column", FP32, cta_group=2), (300,), 136, 576, 2),
    # The second CTA of the last pair owns no weight row.
    Run(case("offsets", "block", 128, BF16, "expert_column", BF16, cta_group=2), (130, 9), 328, 448, 2),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in COVERING])
def test_gemm(run: Run) -> None:
    """Check that results equal the exact sums bit for bit, in two orders of events. Rows of padding are not used and
    not written."""
    for seed in (None, 1):
        got, want = execute(run, seed, late=seed is not None)
        assert torch.equal(got, want)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in COVERING])
def test_compiles_without_spills(run: Run) -> None:
    """Check the registers and spills of kernels with these warp roles, which ``test_compile_kernels`` does not
    check."""
    check_emulated(run.case, run.case.kernel)


def test_other_gpus_have_the_same_ptx() -> None:
    """Check that the emulator's results apply to sm_103a too."""
    check_same_ptx(COVERING[10].case, "sm_103a")


@pytest.mark.parametrize(
    ("covering", "arch"), [(0, "sm_100a"), (10, "sm_100a"), (17, "sm_103a"), (20, "sm_103a"), (22, "sm_100a")]
)
def test_machine_code(covering: int, arch: str) -> None:
    """Check that the machine code multiplies FP8 on the tensor cores of tcgen05 (four MMAs for a k tile), and not by
    warp-level MMAs of 16 bits."""
    check_machine_code(COVERING[covering].case, arch, {"UTCQMMA": 4})


@pytest.mark.parametrize("covering", [6, 8, 16])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    one = COVERING[covering].case
    check_nothing_is_launched_on_overlap(one.kernel, ARCHS[one.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "ctas"),
    [
        # Expected CTAs for M = 300 and N = 400: m tiles times n tiles times CTAs that split K
        (0, 148, 19 * 4),
        (0, 7, 7),
        (5, 7, 19 * 4 * 8),
        (13, 148, 3 * 4),
        (20, 148, 2 * 2 * 2),
        (20, 7, 6),
    ],
)
def test_ctas(covering: int, sms: int, ctas: int) -> None:
    """Check the number of CTAs: at most one for each SM, in whole pairs; with split-K, a cluster for each tile."""
    check_ctas(COVERING[covering].case, ctas, n=400, rows=300, k=256, blocks=2, b_scale_rows=4, max_ctas=sms)


# Faults. Each case takes more k tiles than stages, and, except with split-K, three tiles for each CTA.

FAULTY = {
    "token": Run(case("plain", "token", 16, FP32, "column"), (15,), 456, 448),
    "block": Run(case("counted", "block", 16, BF16, "expert"), (15, 0, 17), 72, 704),
    "pair": Run(case("plain", "token", 256, BF16, cta_group=2, stages=2), (516,), 136, 320, 2),
    "split": Run(case("plain", "token", 16, FP32, "one", split_k=2), (15,), 136, 1600),
}
UNFOUND: dict[str, dict[str, Unfound]] = {
    "token": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "zero stored": MISSING,
        "not multiplied by a scale": MISSING._replace(count=2),
    },
    "block": {
        "barrier of the CTA left out": TABLE_ENDS,
        "barrier of the warp left out": CONVERGED,
    },
    "pair": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "other count of arrivals": FOURTH_TILE,
    },
    "split": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=4),
        "arrival left out": ONE_TILE,
        "other count of arrivals": ONE_TILE,
        "fence before left out": ONE_TILE,
        "fence after left out": ACC_USED_ONCE,
        "sums stored elsewhere": MISSING,
        "not multiplied by a scale": MISSING,
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that faults are found: omitted or altered waits, arrivals, commits, fences, descriptors, copies, scales."""
    run = FAULTY[name]
    faulty = functools.partial(execute, run, late=True)
    check_faults(faulty, run.case.kernel, run.case.arch, UNFOUND[name], request, kinds=FP8_TCGEN05, least=30)
