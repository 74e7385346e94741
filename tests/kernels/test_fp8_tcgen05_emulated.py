"""FP8 GEMMs by tcgen05, run thread by thread in the PTX emulator and compared with exact sums.

No GPU with these instructions was available: these tests are the only evidence of the kernel's results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp8_gemm import NAN
from support.emulated import written_late
from support.epilogues import finished, operands
from support.expert_rows import ExpertRows
from support.host_grids import check_nothing_is_launched_on_overlap, gemm_call, grids
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, FP8Tcgen05Case
from support.ptx_faults import CONVERGED, FP8_TCGEN05, Edit, Unfound, check_faults
from test_fp4_tcgen05_emulated import LOOPS

from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.kernels import fp8_tcgen05
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

E4M3 = torch.float8_e4m3fn
BLOCK = 128
POISON = 777.0
"""Value that no kernel writes."""
OPERANDS = ("a", "b", "a_scale", "b_scale", "alpha", "bias", "offsets", "counts")


class Run(NamedTuple):
    """A launch of the kernel.

    Attributes:
        case: kernel.
        counts: rows of each expert.
        n, k, max_ctas: sizes of the GEMM, and CTAs of the launch.
        room: rows of an expert's part of the buffer in the masked layout.
        has_one_scale: True if all rows share one per-token scale, whose stride is 0.
    """

    case: FP8Tcgen05Case
    counts: tuple[int, ...]
    n: int
    k: int
    max_ctas: int = 1
    room: int = 0
    has_one_scale: bool = False

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'+'.join(map(str, self.counts))}x{self.n}x{self.k}-{self.max_ctas}"

    @property
    def rows(self) -> ExpertRows:
        return ExpertRows(self.case.layout, self.counts, self.room)


def powers(*shape: int) -> torch.Tensor:
    """Return random powers of two other than 1, so that scaled sums are exact."""
    return torch.exp2(torch.randint(1, 4, shape).float() * (2 * torch.randint(0, 2, shape) - 1))


def execute(
    run: Run, seed: int | None = 0, edit: Edit | None = None, late: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's output and the expected output, which is poison in rows that no expert owns.

    Operands are whole numbers and scales are powers of two, so that every sum is exact. Rows that no expert owns hold
    NaN, and NaN follows the weight of each expert. If ``late``, the previous kernel writes the operands at the last
    moment.
    """
    torch.manual_seed(run.n + run.k)
    case, layout, experts = run.case, run.case.layout, len(run.counts)
    is_plain, is_masked, blocks = layout == "plain", layout == "masked", -(-run.k // BLOCK)
    rows, owner = run.rows.total, run.rows.owner
    a = torch.randint(-4, 5, (rows, run.k)).float()
    weight = torch.randint(-3, 4, (experts, run.n, run.k)).float()
    if case.has_blocks:
        a_scale, b_scale = powers(blocks, rows).t(), powers(experts, -(-run.n // BLOCK), blocks)
    else:
        a_scale, b_scale = powers(1 if run.has_one_scale else rows, 1).expand(rows, 1), None
    alpha, bias = operands(case.epilogue, run.n, None if is_plain else experts)
    want = torch.full((rows, run.n), POISON, dtype=case.epilogue.out_dtype)
    for expert in range(experts):
        own, of_expert = owner == expert, None if is_plain else expert
        sums = scaled_product(a[own], weight[expert], a_scale[own], None if b_scale is None else b_scale[expert])
        want[own] = finished(sums.float(), case.epilogue, alpha, bias, of_expert)
    a[owner < 0] = torch.nan
    if not run.has_one_scale:
        a_scale[owner < 0] = torch.nan
    padded = torch.full((experts, run.n + 1, run.k), NAN, dtype=torch.uint8)
    padded[:, : run.n] = weight.to(E4M3).view(torch.uint8)
    b = padded.view(E4M3)[:, : run.n].mT
    lead = run.rows.lead
    if is_masked and case.has_blocks:
        a_scale = a_scale.t().view(blocks, *lead).movedim(0, -1)
    out = torch.full((*lead, run.n), POISON, dtype=case.epilogue.out_dtype)
    given = fp8_tcgen05.Arguments(
        a=a.to(E4M3).view(*lead, run.k),
        b=b[0] if is_plain else b,
        a_scale=a_scale,
        b_scale=b_scale[0] if is_plain and b_scale is not None else b_scale,
        **run.rows.tensors,
        alpha=alpha,
        bias=bias,
        out=out,
        prefetch=None,
        max_ctas=run.max_ctas,
    )
    given, before = written_late(given, OPERANDS) if late else (given, None)
    how = {"seed": seed, "max_steps": 200_000, "strict": True, "scoped": True, "edit": edit}
    run_kernel(case.kernel, ARCHS[case.arch], *given, written_before=before, **how)
    return out.view(rows, run.n), want


def scaled_product(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: Any) -> torch.Tensor:
    """Return the sums of a GEMM in float64, which are exact: with block scales, or with per-token scales if ``b_scale``
    is None."""
    if b_scale is None:
        return a.double() @ b.double().t() * a_scale.double()
    of_a = a_scale.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    of_b = b_scale.repeat_interleave(BLOCK, 0)[: len(b)].repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    return (a * of_a).double() @ (b * of_b).double().t()


def case(
    layout: str, scales: str, tile_m: int, *epilogue: Any, cta_group: int = 1, split_k: int = 1, stages: int = 3
) -> FP8Tcgen05Case:
    return FP8Tcgen05Case(layout, scales == "block", tile_m, cta_group, split_k, Epilogue(*epilogue), stages)


# Partial tiles along M, N and K; at least three tiles for each CTA, except with split-K; more k tiles than stages.
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
    """Check registers and spills. ``test_compile_kernels`` leaves kernels with these roles to this test."""
    check_emulated(run.case, run.case.kernel)


def test_other_gpus_have_the_same_ptx() -> None:
    """Check that the emulator's results apply to sm_103a too."""
    one = COVERING[10].case
    own, its = (
        compile_ptx(replace(one, arch=arch).kernel, ARCHS[arch]).ptx.replace(arch, "") for arch in (one.arch, "sm_103a")
    )
    assert own == its


@pytest.mark.parametrize(
    ("covering", "arch"), [(0, "sm_100a"), (10, "sm_100a"), (17, "sm_103a"), (20, "sm_103a"), (22, "sm_100a")]
)
def test_machine_code(covering: int, arch: str) -> None:
    """Check that the machine code multiplies FP8 on the tensor cores of tcgen05 (four MMAs for a k tile), and not by
    warp-level MMAs of 16 bits."""
    one = replace(COVERING[covering].case, arch=arch)
    assert compile_ptx(one.kernel, ARCHS[arch]).instructions == {"UTCQMMA": 4}


@pytest.mark.parametrize("covering", [6, 8, 16])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    one = COVERING[covering].case
    check_nothing_is_launched_on_overlap(one.kernel, ARCHS[one.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "ctas"),
    [
        # For 300 x 400: m tiles, times n tiles, times CTAs that split k
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
    one = COVERING[covering].case
    call = gemm_call(one.kernel, n=400, rows=300, k=256, blocks=2, b_scale_rows=4, max_ctas=sms)
    assert grids(one.kernel, ARCHS[one.arch], *call) == [(ctas, 1, 1)]


# Faults. Each case takes more k tiles than stages, and, except with split-K, three tiles for each CTA.

FAULTY = {
    "token": Run(case("plain", "token", 16, FP32, "column"), (15,), 456, 448),
    "block": Run(case("counted", "block", 16, BF16, "expert"), (15, 0, 17), 72, 704),
    "pair": Run(case("plain", "token", 256, BF16, cta_group=2, stages=2), (516,), 136, 320, 2),
    "split": Run(case("plain", "token", 16, FP32, "one", split_k=2), (15,), 136, 1600),
}
ONE_TILE = Unfound(1, "with split-K a CTA computes one tile, so nothing waits for an empty accumulator")
MISSING = Unfound(1, "a token outside of the test's shape")
UNFOUND: dict[str, dict[str, Unfound]] = {
    "token": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "zero stored": MISSING,
        "not multiplied by a scale": MISSING._replace(count=2),
    },
    "block": {
        "barrier of the CTA left out": Unfound(1, "the barriers that end the table of experts follow"),
        "barrier of the warp left out": CONVERGED,
    },
    "pair": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "other count of arrivals": Unfound(1, "the fourth tile would wait for this accumulator"),
    },
    "split": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED._replace(count=4),
        "arrival left out": ONE_TILE,
        "other count of arrivals": ONE_TILE,
        "fence before left out": ONE_TILE,
        "fence after left out": Unfound(1, "an accumulator is multiplied only once"),
        "sums stored elsewhere": MISSING,
        "not multiplied by a scale": MISSING,
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that faults are found: omitted or altered waits, arrivals, commits, fences, descriptors, copies, scales."""
    run = FAULTY[name]
    ptx = compile_ptx(run.case.kernel, ARCHS[run.case.arch]).ptx
    all_tried = request.config.getoption("more_emulated")
    tried = {"all_tried": all_tried, "kinds": FP8_TCGEN05, "least": 30}
    check_faults(lambda seed, edit: execute(run, seed, edit, late=True), ptx, UNFOUND[name], **tried)
