"""FP4 GEMM by tcgen05, executed in the PTX emulator and compared with the CPU reference.

We had no GPU with these instructions, so these tests are the only evidence that the kernel's results are correct.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import CPU, INPUTS, WEIGHT, poisoned, run_strictly
from support.epilogues import finished, operands, row_scales
from support.host_grids import check_ctas, check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated, check_same_ptx
from support.kernel_grid import BF16, FP16, FP32, MmaCase, Tcgen05Case, Tcgen05ExpertsCase
from support.ptx_faults import CONVERGED, LOOPS, NO_K_TILES, NOTHING_READ, Edit, Unfound, check_faults

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels import fp4_tcgen05
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.runtime.arch import ARCHS


class Gemm(NamedTuple):
    """Launch of a GEMM of M, N and K. ``num_ctas`` CTAs share all tiles."""

    case: Tcgen05Case
    sizes: tuple[int, int, int]
    num_ctas: int = 1

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'x'.join(map(str, self.sizes))}-{self.num_ctas}"


def gemm(
    *case: Any, epilogue: tuple[Any, ...], sizes: tuple[int, int, int], num_ctas: int = 1, stages: int = 3
) -> Gemm:
    """Return a launch. ``case`` is format, layout, tile_m, CTAs per MMA, split_k; ``sizes`` is M, N, K."""
    return Gemm(Tcgen05Case(*case, Epilogue(*epilogue), stages=stages), sizes, num_ctas)


# Launches with partial tiles along M, N and K, with at least three tiles per CTA (except with split-K), and with more k
# tiles than stages
COVERING = [
    gemm(NVFP4, "128x4", 8, 1, 1, epilogue=(BF16, "one", BF16), sizes=(5, 328, 1088)),
    gemm(NVFP4, "128x4", 16, 1, 1, epilogue=(FP16, "column", FP32), sizes=(70, 136, 1088), num_ctas=3),
    gemm(MXFP4, "128x4", 32, 1, 1, epilogue=(FP32, "one", FP32), sizes=(90, 136, 1344), num_ctas=2),
    gemm(NVFP4, "linear", 64, 1, 1, epilogue=(BF16, "one"), sizes=(150, 24, 1088)),
    gemm(MXFP4, "linear", 16, 1, 1, epilogue=(FP16, None, FP16), sizes=(9, 264, 1152)),
    gemm(NVFP4, "128x4", 128, 1, 1, epilogue=(BF16, "column", FP32), sizes=(150, 264, 832), num_ctas=2),
    gemm(NVFP4, "128x4", 256, 1, 1, epilogue=(BF16, "one"), sizes=(300, 136, 1088)),
    gemm(NVFP4, "128x4", 8, 1, 4, epilogue=(BF16, "column", BF16), sizes=(5, 136, 3648)),
    gemm(MXFP4, "128x4", 64, 1, 2, epilogue=(FP32, "one", FP32), sizes=(70, 136, 2112)),
    gemm(NVFP4, "linear", 128, 1, 2, epilogue=(FP16, "one"), sizes=(130, 72, 2112)),
    gemm(NVFP4, "128x4", 256, 2, 1, epilogue=(BF16, "one", BF16), sizes=(300, 264, 1088), num_ctas=2),
    gemm(MXFP4, "linear", 256, 2, 1, epilogue=(FP32, "column"), sizes=(700, 136, 640), num_ctas=2, stages=2),
]
ROW_SCALED = [
    gemm(NVFP4, "128x4", 8, 1, 1, epilogue=(FP32, None, None, True), sizes=(5, 328, 1088)),
    gemm(NVFP4, "128x4", 16, 1, 1, epilogue=(FP16, "column", FP32, True), sizes=(70, 136, 1088), num_ctas=3),
    gemm(NVFP4, "linear", 64, 1, 1, epilogue=(BF16, "one", None, True), sizes=(150, 24, 1088)),
    gemm(NVFP4, "128x4", 256, 1, 1, epilogue=(BF16, "one", BF16, True), sizes=(301, 136, 1088)),
    gemm(NVFP4, "128x4", 256, 2, 1, epilogue=(FP32, "column", None, True), sizes=(300, 264, 1088), num_ctas=2),
    gemm(MXFP4, "128x4", 64, 1, 2, epilogue=(FP32, "one", FP32, True), sizes=(70, 136, 2112)),
    gemm(NVFP4, "128x4", 8, 1, 4, epilogue=(BF16, None, BF16, True), sizes=(5, 136, 3648)),
]
"""Launches whose epilogue multiplies each row by a scale, before alpha."""
MORE = [
    gemm(*kind, *tile, epilogue=(BF16, "column", FP32), sizes=sizes, num_ctas=num_ctas)
    for kind in ((NVFP4, "128x4"), (NVFP4, "linear"), (MXFP4, "128x4"), (MXFP4, "linear"))
    for tile, sizes, num_ctas in (
        ((8, 1, 1), (29, 264, 1152), 2),
        ((8, 1, 8), (21, 136, 2176), 1),
        ((16, 1, 2), (33, 264, 2176), 1),
        ((32, 1, 1), (140, 136, 1408), 2),
        ((32, 1, 4), (33, 136, 1408), 1),
        ((64, 1, 1), (200, 264, 1152), 3),
        ((64, 1, 8), (66, 136, 2176), 1),
        ((128, 1, 1), (400, 136, 1408), 2),
        ((128, 1, 4), (130, 136, 1408), 1),
        ((256, 1, 1), (520, 136, 1152), 2),
        ((256, 2, 1), (520, 392, 1408), 2),
        ((256, 2, 1), (520, 776, 384), 4),
    )
]


def multiply(one: Gemm, seed: int | None, edit: Edit | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result.

    With a seed, a simulated previous kernel writes the operands at the last moment.
    """
    m, n, k = one.sizes
    torch.manual_seed(k)
    case = one.case
    fmt, layout = case.format, SCALE_LAYOUTS[case.layout]
    (a, a_scale), (b, b_scale) = (
        random_matrix(rows, k, fmt, case.layout, CPU, POWERS[fmt.scale_format]) for rows in (m, n)
    )
    alpha, bias = operands(case.epilogue, n)
    row_scale = row_scales(case.epilogue, m)
    out = poisoned(m, n, dtype=case.epilogue.out_dtype)
    given = fp4_tcgen05.Arguments(a, a_scale, b.t(), b_scale, alpha, bias, row_scale, out, one.num_ctas)
    run_strictly(case, given, None if seed is None else (*WEIGHT, *INPUTS), seed=seed, edit=edit)
    sums = fp4_gemm(a, a_scale, b, b_scale, None, None, FP32, fmt, layout, layout)
    return out, finished(sums, case.epilogue, alpha, bias, row_scale=row_scale)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more = metafunc.config.getoption("more_emulated")
    if "one" in metafunc.fixturenames:
        cases = COVERING + ROW_SCALED + (MORE if more else [])
        metafunc.parametrize("one", [pytest.param(case, id=case.id) for case in cases])


def test_gemm(one: Gemm) -> None:
    """Use inputs whose sums are exact, and check that the results equal the reference's bit for bit, in two orders of
    events. Scales outside of the matrices are NaN and must not matter."""
    for seed in (None, 1):
        got, want = multiply(one, seed)
        assert torch.equal(got, want)


def test_compiles_without_spills(one: Gemm) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(one.case, one.case.kernel)


@pytest.mark.parametrize("covering", [7, 11])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    case = COVERING[covering].case
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "ctas"),
    [
        # Numbers of CTAs for M = 300 and N = 400: n tiles, times m tiles, times the CTAs that divide K.
        (0, 148, 148),
        (3, 148, 4 * 5),
        (3, 7, 7),
        (8, 7, 4 * 5 * 2),
        (6, 148, 4 * 2),
        (10, 148, 2 * 2 * 2),
        (10, 7, 6),
        (10, 1, 2),
    ],
)
def test_ctas(covering: int, sms: int, ctas: int) -> None:
    """Check the number of CTAs: at most one per SM, in whole pairs; with split-K, a cluster per tile."""
    check_ctas(COVERING[covering].case, ctas, n=400, m=300, a_tile_rows=3, b_tile_rows=4, num_ctas=sms)


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (Tcgen05Case(NVFP4, "128x4", 256, 2, 1, Epilogue(BF16)), "sm_103a"),
        (Tcgen05ExpertsCase(MXFP4, "128x4", 32, 2, True, BF16, 320), "sm_103a"),
        (MmaCase(torch.uint8, NVFP4, "128x4", 16, 2, Epilogue(FP32), "sm_120a", a_layout="128x4"), "sm_121a"),
    ],
    ids=["tcgen05", "experts", "mma"],
)
def test_other_gpus_have_the_same_ptx(case: Any, other: str) -> None:
    """Check that a kernel has the same PTX on two GPUs, so that the emulator's results for one GPU apply to the other
    GPU."""
    check_same_ptx(case, other)


# Faults. In each case a CTA gets more k tiles than stages and, except with split-K, three tiles.

FAULTY = {
    "one": gemm(NVFP4, "128x4", 32, 1, 1, epilogue=(BF16, "one"), sizes=(70, 136, 1088)),
    "linear": gemm(MXFP4, "linear", 16, 1, 1, epilogue=(FP32,), sizes=(9, 520, 1152)),
    "pair": gemm(NVFP4, "128x4", 256, 2, 1, epilogue=(BF16, "one"), sizes=(520, 136, 1088), num_ctas=2),
    "split": gemm(NVFP4, "128x4", 8, 1, 2, epilogue=(FP32,), sizes=(8, 136, 3648)),
}

UNFOUND: dict[str, dict[str, Unfound]] = {
    "one": {**LOOPS, "barrier of the warp left out": CONVERGED},
    "linear": {
        **LOOPS,
        "wait for the other phase": Unfound(2, f"{NO_K_TILES.reason}; a warp that only counts may be a phase late"),
        "other count of arrivals": Unfound(1, "barrier of a second CTA of a pair, which does not exist"),
        "kernel before not waited for": NOTHING_READ,
        "zero stored": Unfound(7, "tokens outside of the test's shape"),
        "barrier of the warp left out": CONVERGED,
    },
    "pair": {**LOOPS, "barrier of the warp left out": CONVERGED},
    "split": {
        "kernel before not waited for": NOTHING_READ,
        "other stride of the activations": Unfound(4, "eight rows are one swizzle atom"),
        "other stride of scales": Unfound(4, "the activations' eight rows are one matrix"),
        "barrier of the warp left out": CONVERGED,
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that the emulator finds omitted or altered waits, arrivals, commits, fences, descriptors and copies."""
    one = FAULTY[name]
    run = functools.partial(multiply, one)
    check_faults(run, one.case.kernel, one.case.arch, UNFOUND[name], request)
