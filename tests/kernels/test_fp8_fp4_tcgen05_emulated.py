"""FP8 x FP4 GEMMs by tcgen05, run thread by thread in the PTX emulator and compared with exact sums.

No GPU with these instructions was available: these tests are the only evidence of the kernels' results.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.epilogues import operands
from support.fp8_runs import E4M3, activation_scales, expected, launch_rows, tiled, void_padding
from support.fp8_runs import ExpertRun as Run
from support.host_grids import check_ctas, check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated, check_machine_code, check_same_ptx
from support.kernel_grid import BF16, FP16, FP32, FP8FP4MmaCase, FP8FP4Tcgen05Case
from support.ptx_faults import (
    ACC_USED_ONCE,
    CONVERGED,
    FP8_TCGEN05,
    LOOPS,
    MISSING,
    NOTHING_READ,
    ONE_TILE,
    READ_LATE,
    TABLE_ENDS,
    Edit,
    Unfound,
    check_faults,
)

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.interleave import interleave_k
from torch_cute_ops.formats.prepared_scales import prepared_of_linear
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight
from torch_cute_ops.runtime.arch import ARCHS

LINEAR = SCALE_LAYOUTS["linear"]
EXACT = {"nvfp4": (0, 48, 56, 64), "mxfp4": (126, 127, 128)}
"""Scale bytes, keyed by format, with which sums are exact: 1/2, 1 and 2, and for NVFP4 also 0."""
NAN_SCALE = {"nvfp4": 127, "mxfp4": 255}
SPARE = 8
"""Number of weight rows that follow the weight of each expert."""


def execute(
    run: Run, seed: int | None = 0, edit: Edit | None = None, late: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's output and the expected output, which is poison in rows that no expert owns.

    Rows of activations that no expert owns hold NaN, and so do the scales of weight rows that follow an expert's weight
    and scales after the last block of a row. If ``late``, the previous kernel writes the operands at the last moment.
    """
    torch.manual_seed(run.n + run.k)
    case, fmt, has_blocks, experts = run.case, run.case.fmt, run.case.scales is not None, len(run.counts)
    rows = run.rows.total
    a = torch.randint(-4, 5, (rows, run.k)).float()
    if run.scales is not None:
        one = torch.randint(run.k, (rows, 1))
        a = torch.zeros(rows, run.k).scatter(1, one, 2.0)
    codes = torch.randint(256, (experts, run.n + SPARE, run.k // 2)).to(torch.uint8)
    choices = torch.tensor(EXACT[fmt.name] if run.scales is None else run.scales, dtype=torch.uint8)
    scale = choices[torch.randint(len(choices), (experts, run.n, run.k // fmt.block_size))]
    of_all = scale.flatten(0, 1).view(fmt.scale_dtype)
    weight, units = fp8_weight(codes[:, : run.n], of_all, fmt, LINEAR, by_row=not has_blocks)
    a_scale = activation_scales(run, has_blocks)
    terms = operands(case.epilogue, run.n, run.experts)
    want = expected(run, a, weight, a_scale, units, *terms)
    void_padding(run, a, a_scale)
    b = codes[:, : run.n].mT
    if not has_blocks:
        b_scale = prepared_of_linear(of_all, run.n, fmt, experts)
    elif case.scales == "128x4":
        # Tiles hold the rows of all experts without gaps, so this layout has no spare rows.
        b_scale = tiled(scale.flatten(0, 1), NAN_SCALE[fmt.name]).view(fmt.scale_dtype)
    else:
        padded = torch.full((experts, run.n + SPARE, scale.shape[2]), NAN_SCALE[fmt.name], dtype=torch.uint8)
        padded[:, : run.n] = scale
        b_scale = padded[:, : run.n].view(fmt.scale_dtype)
    a_codes = a.to(E4M3)
    if isinstance(case, FP8FP4MmaCase) and case.is_interleaved:
        a_codes = interleave_k(a_codes).flatten(-2)
    if run.experts is None:
        b, b_scale = b[0], b_scale if case.scales == "128x4" else b_scale[0]
    return launch_rows(run, a_codes, b, a_scale, b_scale, *terms, late=late, seed=seed, edit=edit), want


def case(
    layout: str, scales: str | None, fmt: FP4Format, tile_m: int, *epilogue: Any, split_k: int = 1, stages: int = 2
) -> FP8FP4Tcgen05Case:
    return FP8FP4Tcgen05Case(layout, scales, fmt, tile_m, split_k, Epilogue(*epilogue), stages=stages)


def mx(layout: str, scales: str | None, tile_m: int, *epilogue: Any, **given: int) -> FP8FP4Tcgen05Case:
    """Return a case of the kernel that does not decode the weight."""
    return replace(case(layout, scales, MXFP4, tile_m, *epilogue, **given), family="fp8_mxfp4_tcgen05")


# Launches with partial tiles along M, N and K, more k tiles than stages, and, except with split-K, at least three tiles
# for each CTA
COVERING = [
    Run(case("plain", None, NVFP4, 16, BF16, "column", BF16), (5,), 328, 576),
    Run(case("plain", None, MXFP4, 32, FP32, "one", FP32, stages=4), (90,), 136, 832, 2),
    Run(case("plain", None, NVFP4, 64, FP16, "column", FP16), (150,), 136, 576, has_one_scale=True),
    Run(case("plain", None, MXFP4, 128, BF16, "column", FP32), (150,), 264, 448, 2),
    Run(case("plain", None, NVFP4, 256, BF16, "one", stages=3), (300,), 136, 576),
    Run(case("plain", None, MXFP4, 16, BF16, "column", BF16, split_k=8), (5,), 72, 2624),
    Run(case("plain", None, NVFP4, 64, FP32, "one", FP32, split_k=2), (70,), 136, 1088),
    Run(case("offsets", None, MXFP4, 32, FP16, "expert_column"), (16, 0, 41), 136, 448),
    Run(case("counted", None, NVFP4, 64, FP32, "expert", FP32), (3, 0, 70), 200, 448, 2),
    Run(case("masked", None, NVFP4, 128, BF16, "expert_column", BF16), (3, 0, 130), 136, 448, room=132),
    Run(case("plain", "128x4", MXFP4, 16, FP32, "column", FP32, stages=4), (5,), 328, 1088),
    Run(case("plain", "linear", NVFP4, 32, BF16), (70,), 136, 1216, 2),
    Run(case("plain", "128x4", NVFP4, 64, FP16, "one", FP16, stages=3), (150,), 136, 576),
    Run(case("plain", "linear", MXFP4, 64, BF16, "column", FP32), (150,), 136, 576),
    Run(case("plain", "128x4", NVFP4, 16, FP32, None, FP32, split_k=4), (5,), 136, 1984),
    Run(case("plain", "linear", MXFP4, 64, BF16, "column", BF16, split_k=2), (70,), 72, 1088),
    Run(case("offsets", "128x4", NVFP4, 64, FP32, "expert_column", FP32), (70, 64, 3), 136, 448),
    Run(case("counted", "linear", MXFP4, 32, BF16, "expert"), (3, 0, 33), 264, 576, 2),
    Run(case("masked", "128x4", MXFP4, 16, FP16, "expert_column", FP16), (3, 0, 20), 136, 576, room=21),
    Run(case("counted", "linear", NVFP4, 32, FP32, "one", FP32), (40, 3), 136, 448),
    Run(mx("plain", None, 16, BF16, "column", BF16), (5,), 328, 640),
    Run(mx("plain", None, 64, FP32, "one", FP32, stages=4), (150,), 136, 640, has_one_scale=True),
    Run(mx("plain", None, 128, BF16, "column", FP32), (300,), 264, 384, 2),
    Run(mx("plain", None, 16, FP16, "column", FP16, split_k=8), (5,), 72, 3072),
    Run(mx("counted", None, 32, FP32, "expert", FP32), (3, 0, 70), 200, 384),
    Run(mx("masked", None, 64, BF16, "expert_column", BF16), (3, 0, 70), 136, 384, room=72),
    Run(mx("plain", "128x4", 16, FP32, "column", FP32, stages=4), (5,), 328, 1152),
    Run(mx("plain", "linear", 32, BF16), (70,), 136, 1152, 2),
    Run(mx("plain", "128x4", 128, FP16, "one", FP16), (300,), 136, 384),
    Run(mx("plain", "linear", 64, FP32, "column", FP32, split_k=2), (70,), 72, 1152),
    Run(mx("offsets", "128x4", 64, FP32, "expert_column", FP32), (70, 64, 3), 136, 384),
    Run(mx("masked", "linear", 16, FP16, "expert_column", FP16), (3, 0, 20), 136, 640, room=21),
]
# All scale bytes: negative and NaN scales, zeros, and blocks whose numbers are subnormal or zero in e4m3.
VALUES = [
    Run(case("plain", "128x4", NVFP4, 64, FP32), (64,), 136, 448, scales=tuple(range(256))),
    Run(case("plain", "linear", MXFP4, 64, FP32), (64,), 136, 448, scales=(0, *range(100, 130), 255)),
    Run(case("plain", None, NVFP4, 64, FP32), (64,), 136, 448, scales=tuple(range(128))),
    Run(case("plain", None, MXFP4, 64, FP32), (64,), 136, 448, scales=(0, *range(100, 130), 255)),
    # Undecoded numbers are not rounded to e4m3, unlike in the reference. So that results are equal, the largest scale
    # is at most 2^14 times the smallest.
    Run(mx("plain", "128x4", 64, FP32), (64,), 136, 384, scales=(*range(110, 123), 255)),
    Run(mx("plain", None, 64, FP32), (64,), 136, 384, scales=(*range(110, 123), 255)),
]
EVERY = [pytest.param(run, id=run.id) for run in (*COVERING, *VALUES)]


@pytest.mark.parametrize("run", EVERY)
def test_gemm(run: Run) -> None:
    """Check that results equal the exact sums bit for bit, in two orders of events. Padding rows are not used and not
    written."""
    for seed in (None, 1):
        got, want = execute(run, seed, late=seed is not None)
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in COVERING])
def test_compiles_without_spills(run: Run) -> None:
    """Check the registers and spills of kernels with these warp roles, which ``test_compile_kernels`` does not
    check."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize("covering", [10, 26])
def test_other_gpus_have_the_same_ptx(covering: int) -> None:
    """Check that the emulator's results apply to sm_103a too."""
    check_same_ptx(COVERING[covering].case, "sm_103a")


@pytest.mark.parametrize(
    ("covering", "arch"),
    [
        (0, "sm_100a"),
        (4, "sm_103a"),
        (10, "sm_100a"),
        (12, "sm_103a"),
        (17, "sm_100a"),
        (20, "sm_100a"),
        (28, "sm_103a"),
    ],
)
def test_machine_code(covering: int, arch: str) -> None:
    """Check that the machine code multiplies FP8 on the tensor cores of tcgen05 (four MMAs for a k tile), and not by
    warp-level MMAs of 16 bits."""
    check_machine_code(COVERING[covering].case, arch, {"UTCQMMA": 4})


@pytest.mark.parametrize("covering", [6, 8, 11, 24])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    one = COVERING[covering].case
    check_nothing_is_launched_on_overlap(one.kernel, ARCHS[one.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "ctas"),
    [
        # Expected number of CTAs for M = 300 and N = 400: m tiles times n tiles times CTAs that split K
        (0, 148, 19 * 4),
        (0, 7, 7),
        (5, 7, 19 * 4 * 8),
        (13, 148, 5 * 4),
    ],
)
def test_ctas(covering: int, sms: int, ctas: int) -> None:
    """Check the number of CTAs: at most one for each SM; with split-K, a cluster for each tile."""
    check_ctas(COVERING[covering].case, ctas, n=400, rows=300, k=256, max_ctas=sms)


# Faults. Each case computes more k tiles than it uses stages, and, except with split-K, three tiles for each CTA.

FAULTY = {
    "token": Run(case("plain", None, NVFP4, 16, FP32, "column"), (15,), 456, 448),
    "block": Run(case("counted", "linear", MXFP4, 16, BF16, "expert"), (15, 0, 17), 72, 704),
    "tiled": Run(case("plain", "128x4", NVFP4, 64, BF16, stages=3), (136,), 136, 640),
    "split": Run(case("plain", None, MXFP4, 16, FP32, "one", split_k=2), (15,), 136, 1600),
    "mx-token": Run(mx("plain", None, 16, FP32, "column"), (15,), 456, 512),
    "mx-block": Run(mx("counted", "linear", 16, BF16, "expert"), (15, 0, 17), 72, 768),
    "mx-split": Run(mx("plain", "128x4", 16, FP32, "one", split_k=2), (15,), 136, 4352),
}
NO_EXPERT = Unfound(1, "tiles of experts 128 and above, which do not exist")
ONES = Unfound(4, "all scales of the activations are 1, also those of tokens outside of the test's shape")
NEXT_WAITS = Unfound(7, "another wait for loads follows, and the emulator writes registers at once", dead=False)
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
        "scales loaded from elsewhere": NO_EXPERT,
    },
    "tiled": {
        "barrier of the warp left out": CONVERGED,
        "kernel before not waited for": NOTHING_READ,
        "wait for loads left out": NEXT_WAITS,
    },
    "split": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=5),
        "arrival left out": ONE_TILE,
        "other count of arrivals": ONE_TILE,
        "fence before left out": ONE_TILE,
        "fence after left out": ACC_USED_ONCE,
        "sums stored elsewhere": MISSING,
        "not multiplied by a scale": MISSING,
    },
    "mx-token": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "activations' scales a column on": ONES,
        "scales stored elsewhere": ONES._replace(count=17),
        "zero stored": MISSING,
        "not multiplied by a scale": MISSING._replace(count=2),
    },
    "mx-block": {
        "barrier of the CTA left out": TABLE_ENDS,
        "barrier of the warp left out": CONVERGED,
        "activations' scales a column on": ONES,
        "scales stored elsewhere": ONES._replace(count=16),
    },
    "mx-split": {
        "barrier of the warp left out": CONVERGED,
        "kernel before not waited for": READ_LATE,
        "activations' scales a column on": ONES,
        "scales stored elsewhere": ONES._replace(count=16),
        "sums stored elsewhere": MISSING,
        "product not added": MISSING,
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that faults are found: omitted or altered waits, arrivals, commits, fences, descriptors, copies, scales."""
    run = FAULTY[name]
    faulty = functools.partial(execute, run, late=True)
    check_faults(faulty, run.case.kernel, run.case.arch, UNFOUND[name], request, kinds=FP8_TCGEN05, least=30)
