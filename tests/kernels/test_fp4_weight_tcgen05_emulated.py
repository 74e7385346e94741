"""GEMMs of 16-bit activations and an FP4 weight by tcgen05, run thread by thread in the PTX emulator and compared with
exact sums.

No GPU with these instructions was available: these tests are the only evidence of the kernel's results.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.emulated import poisoned, written_late
from support.epilogues import finished, operands
from support.fp8_runs import OPERANDS
from support.host_grids import check_nothing_is_launched_on_overlap, gemm_call, grids
from support.kernel_fit import check_emulated, check_machine_code, check_same_ptx
from support.kernel_grid import BF16, FP16, FP32, WeightTcgen05Case
from support.ptx_faults import (
    CONVERGED,
    LOOPS,
    NOTHING_READ,
    ONE_TILE,
    Q64,
    WEIGHT_TCGEN05,
    Edit,
    Unfound,
    check_faults,
)

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.kernels import fp4_weight_tcgen05
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp4_weight_tcgen05 import STREAM_K
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.runtime.arch import ARCHS

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
EXACT = {"nvfp4": (0, 0x30, 0x38, 0x40, 0xB8), "mxfp4": (126, 127, 128)}
"""Scale bytes, keyed by format, with which sums are exact: 1/2, 1 and 2, and for NVFP4 also 0 and -1."""
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF}
SPARE = 8
"""Number of weight rows that follow the weight. Their scales are NaN."""


class Run(NamedTuple):
    """A launch of the kernel.

    Attributes:
        case: kernel.
        m, n, k, max_ctas: sizes of the GEMM, and CTAs of the launch.
    """

    case: WeightTcgen05Case
    m: int
    n: int
    k: int
    max_ctas: int = 1

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.m}x{self.n}x{self.k}-{self.max_ctas}"


def arranged(linear: torch.Tensor, case: WeightTcgen05Case) -> torch.Tensor:
    """Arrange scale bytes (rows, blocks) in the case's layout. NaN follows the rows, and fills the tiles."""
    rows, blocks = linear.shape
    nan = NAN_SCALE[case.fmt.name]
    if case.layout == "linear":
        padded = torch.full((rows + SPARE, blocks), nan, dtype=torch.uint8)
        padded[:rows] = linear
        return padded[:rows].view(case.fmt.scale_dtype)
    padded = torch.full((-(-rows // 128) * 128, -(-blocks // 4) * 4), nan, dtype=torch.uint8)
    padded[:rows, :blocks] = linear
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
    return tiles.view(case.fmt.scale_dtype)


def decoded(codes: torch.Tensor, scales: torch.Tensor, fmt: FP4Format) -> torch.Tensor:
    """Return a weight in float64: its codes times its scales."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    numbers = E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    if fmt == NVFP4:
        factors = scales.view(torch.float8_e4m3fn).double()
    else:
        factors = torch.exp2(scales.double() - 127)
        factors[scales == NAN_SCALE["mxfp4"]] = torch.nan
    return numbers * factors.repeat_interleave(fmt.block_size, 1)


def launch(run: Run, a: torch.Tensor, codes: torch.Tensor, *rest: Any, late: bool = False, **how: Any) -> torch.Tensor:
    """Run the kernel. ``codes`` contains spare rows; ``rest`` contains linear scale bytes, alpha and bias."""
    scales, alpha, bias = rest
    out = poisoned(run.m, run.n, dtype=run.case.epilogue.out_dtype)
    kernel, workspace = run.case.kernel, None
    if run.case.split_k == STREAM_K:
        workspace = poisoned(kernel.config.workspace_bytes(run.m, run.max_ctas), dtype=torch.uint8)
    given = fp4_weight_tcgen05.Arguments(
        a=a,
        b=codes[: run.n].t(),
        a_scale=None,
        b_scale=arranged(scales, run.case),
        offsets=None,
        counts=None,
        alpha=alpha,
        bias=bias,
        out=out,
        prefetch=None,
        max_ctas=run.max_ctas,
        workspace=workspace,
    )
    given, before = written_late(given, OPERANDS) if late else (given, None)
    how = {"max_steps": 200_000, "strict": True, "scoped": True, **how}
    run_kernel(kernel, ARCHS[run.case.arch], *given, written_before=before, **how)
    return out


def random_codes(run: Run) -> torch.Tensor:
    return torch.randint(256, (run.n + SPARE, run.k // 2)).to(torch.uint8)


def execute(
    run: Run, seed: int | None = 0, edit: Edit | None = None, late: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's output and the expected output, computed in float64.

    Every sum is exact. NaN follows the scales of the weight. If ``late``, the previous kernel writes the operands at
    the last moment.
    """
    torch.manual_seed(run.n + run.k)
    case, fmt = run.case, run.case.fmt
    a = torch.randint(-4, 5, (run.m, run.k)).to(case.dtype)
    codes, choices = random_codes(run), torch.tensor(EXACT[fmt.name], dtype=torch.uint8)
    scales = choices[torch.randint(len(choices), (run.n, run.k // fmt.block_size))]
    alpha, bias = operands(case.epilogue, run.n)
    sums = a.double() @ decoded(codes[: run.n], scales, fmt).t()
    want = finished(sums.float(), case.epilogue, alpha, bias)
    return launch(run, a, codes, scales, alpha, bias, late=late, seed=seed, edit=edit), want


def case(
    dtype: torch.dtype,
    fmt: FP4Format,
    layout: str,
    tile_m: int,
    *epilogue: Any,
    split_k: int = 1,
    stages: int = 2,
) -> WeightTcgen05Case:
    return WeightTcgen05Case(dtype, fmt, layout, tile_m, split_k, Epilogue(*epilogue), stages=stages)


# Launches with partial tiles along M, N and K, more k tiles than stages, and, except with split-K, at least three tiles
# for each CTA
COVERING = [
    Run(case(BF16, NVFP4, "128x4", 16, BF16, "column", BF16), 5, 328, 608),
    Run(case(FP16, NVFP4, "linear", 16, FP16, "one", FP32, stages=6), 21, 264, 1088, 2),
    Run(case(BF16, MXFP4, "128x4", 32, FP32, "one", FP32, stages=4), 90, 136, 864, 2),
    Run(case(FP16, NVFP4, "128x4", 64, FP16, "column", FP16), 150, 136, 416),
    Run(case(BF16, MXFP4, "linear", 64, BF16, None, FP32), 150, 136, 640),
    Run(case(BF16, NVFP4, "linear", 128, BF16, "column", FP32), 150, 264, 448, 2),
    Run(case(FP16, NVFP4, "128x4", 128, FP32, stages=4), 300, 72, 736),
    Run(case(BF16, NVFP4, "128x4", 256, BF16, "one", stages=3), 300, 264, 544),
    Run(case(BF16, MXFP4, "128x4", 256, FP32, "column", FP32, stages=3), 520, 72, 480),
    Run(case(BF16, NVFP4, "128x4", 16, BF16, "column", BF16, split_k=8), 5, 72, 2592),
    Run(case(BF16, MXFP4, "linear", 32, FP32, split_k=4), 40, 72, 1920),
    Run(case(FP16, NVFP4, "linear", 64, FP32, "one", FP32, split_k=2), 70, 136, 1088),
    Run(case(BF16, MXFP4, "128x4", 128, FP16, "column", FP16, split_k=2), 130, 72, 1056),
    # Launches with stream-K: a CTA computes parts of four tiles, up to nine CTAs share a tile, and there are several m
    # tiles
    Run(case(BF16, NVFP4, "128x4", 16, BF16, "column", BF16, split_k=STREAM_K), 5, 1096, 480, 3),
    Run(case(FP16, NVFP4, "linear", 32, FP32, "one", FP32, split_k=STREAM_K, stages=4), 21, 264, 1088, 20),
    Run(case(BF16, MXFP4, "linear", 64, FP16, "column", FP16, split_k=STREAM_K), 150, 136, 640, 4),
    Run(case(BF16, NVFP4, "linear", 128, FP32, split_k=STREAM_K), 130, 264, 448, 5),
]
STREAM_K_RUN = 13
"""Index of the first run with stream-K."""
EVERY = [pytest.param(run, id=run.id) for run in COVERING]


@pytest.mark.parametrize("run", EVERY)
def test_gemm(run: Run) -> None:
    """Check that results equal the exact sums bit for bit, in two orders of events."""
    for seed in (None, 1):
        got, want = execute(run, seed, late=seed is not None)
        assert torch.equal(got, want)


@pytest.mark.parametrize("covering", [1, 2, 3, 4])
def test_every_scale(covering: int) -> None:
    """Check one-hot rows of activations with all scales (in MXFP4 up to 2^125): row m of the result is a column of the
    weight.

    Scales include negative numbers, zero, subnormal numbers and NaN. The result must equal the exact products, and the
    result of the CPU reference bit for bit.
    """
    run = COVERING[covering]._replace(m=40, n=136, k=320)
    run = run._replace(case=replace(run.case, epilogue=Epilogue(FP32)))
    if run.case.layout == "linear":
        run = run._replace(k=384)  # a whole number of words of scales
    torch.manual_seed(0)
    case, fmt = run.case, run.case.fmt
    at = torch.randint(run.k, (run.m,))
    a = torch.zeros(run.m, run.k, dtype=case.dtype)
    a[torch.arange(run.m), at] = 2.0
    # Numbers with larger MXFP4 scales may be infinite, and products of infinity and zero are NaN.
    choices = torch.arange(256) if fmt == NVFP4 else torch.tensor([*range(253), 255])
    scales = choices[torch.randint(len(choices), (run.n, run.k // fmt.block_size))].to(torch.uint8)
    codes = random_codes(run)
    got = launch(run, a, codes, scales, None, None)
    exact = decoded(codes[: run.n], scales, fmt)
    want = (2.0 * exact[:, at].t()).float()
    # A NaN scale makes all sums of its row NaN.
    want[:, exact.isnan().any(1)] = torch.nan
    layout = SCALE_LAYOUTS[case.layout]
    reference = fp4_gemm(
        a, None, codes[: run.n].contiguous(), arranged(scales, case).contiguous(), None, None, FP32, fmt, None, layout
    )
    assert want.isnan().any() and not want.isnan().all()
    for each in (want, reference):
        torch.testing.assert_close(got, each, rtol=0.0, atol=0.0, equal_nan=True)


def test_random_numbers() -> None:
    """Check sums of random numbers, which are rounded, against float64: one fp32 rounding per term suffices."""
    run = COVERING[0]._replace(m=16, n=128)
    run = run._replace(case=replace(run.case, epilogue=Epilogue(FP32)))
    torch.manual_seed(0)
    a, codes = torch.randn(run.m, run.k).to(BF16), random_codes(run)
    scales = torch.randint(0x20, 0x50, (run.n, run.k // 16)).to(torch.uint8)
    got = launch(run, a, codes, scales, None, None)
    weight = decoded(codes[: run.n], scales, NVFP4)
    bound = run.k * 2.0**-24 * (a.double().abs() @ weight.abs().t())
    assert ((got.double() - a.double() @ weight.t()).abs() <= bound).all()


def test_stream_k_sums_a_row_in_one_order() -> None:
    """Check that rounded sums of a row with stream-K depend neither on the number of rows nor on the order in which
    CTAs run."""
    few = COVERING[STREAM_K_RUN]
    few = few._replace(case=replace(few.case, epilogue=Epilogue(FP32)), n=264, max_ctas=5)
    torch.manual_seed(0)
    a, codes = torch.randn(20, few.k).to(BF16), random_codes(few)
    scales = torch.randint(0x20, 0x50, (few.n, few.k // 16)).to(torch.uint8)
    want = launch(few._replace(m=20), a, codes, scales, None, None)
    for seed in (None, 0, 1):
        assert torch.equal(launch(few, a[: few.m].contiguous(), codes, scales, None, None, seed=seed), want[: few.m])


@pytest.mark.parametrize("run", EVERY)
def test_compiles_without_spills(run: Run) -> None:
    """Check the registers and spills of kernels with these warp roles, which ``test_compile_kernels`` does not
    check."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize("covering", [0, 8, STREAM_K_RUN])
def test_other_gpus_have_the_same_ptx(covering: int) -> None:
    """Check that the emulator's results apply to sm_103a too."""
    check_same_ptx(COVERING[covering].case, "sm_103a")


@pytest.mark.parametrize(
    ("covering", "arch"), [(0, "sm_100a"), (3, "sm_103a"), (8, "sm_100a"), (9, "sm_103a"), (15, "sm_100a")]
)
def test_machine_code(covering: int, arch: str) -> None:
    """Check that the machine code multiplies on the tensor cores of tcgen05 (eight MMAs for a k tile), and not by
    warp-level MMAs."""
    check_machine_code(COVERING[covering].case, arch, {"UTCHMMA": 8})


@pytest.mark.parametrize("covering", [5, 9, STREAM_K_RUN])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    one = COVERING[covering].case
    check_nothing_is_launched_on_overlap(one.kernel, ARCHS[one.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "ctas"),
    [
        # Expected number of CTAs for M = 300 and N = 400: m tiles times n tiles times CTAs that split K
        (0, 148, 19 * 4),
        (0, 7, 7),
        (9, 7, 19 * 4 * 8),
        (7, 148, 2 * 4),
    ],
)
def test_ctas(covering: int, sms: int, ctas: int) -> None:
    """Check the number of CTAs: at most one for each SM; with split-K, a cluster for each tile."""
    one = COVERING[covering].case
    call = gemm_call(one.kernel, n=400, rows=300, k=256, max_ctas=sms)
    assert grids(one.kernel, ARCHS[one.arch], *call) == [(ctas, 1, 1)]


@pytest.mark.parametrize(("sms", "ctas"), [(148, 4 * 2), (7, 7)])
def test_ctas_of_stream_k(sms: int, ctas: int) -> None:
    """Check that each CTA multiplies at least one k tile, and that a second kernel, with a warp for each row and CTA,
    adds up partial sums."""
    one = COVERING[STREAM_K_RUN].case
    call = gemm_call(one.kernel, n=400, rows=300, k=256, max_ctas=sms)
    assert grids(one.kernel, ARCHS[one.arch], *call) == [(ctas, 1, 1), (ctas, 300 // 4, 1)]


# Faults. Each case computes more k tiles than it uses stages, and, except with split-K, three tiles for each CTA.

FAULTY = {
    "one": Run(case(BF16, NVFP4, "128x4", 16, FP32, "column"), 15, 264, 416),
    "linear": Run(case(BF16, MXFP4, "linear", 64, BF16), 130, 72, 384),
    "split": Run(case(FP16, NVFP4, "128x4", 16, FP32, "one", split_k=2), 15, 72, 1184),
    "stream": Run(case(BF16, NVFP4, "128x4", 16, FP32, "column", split_k=STREAM_K), 15, 520, 416, 3),
}
STREAM_K_FAULTS: dict[str, tuple[str, str]] = {
    "partial sum or result stored elsewhere": (
        r"(st\.global\.b32 \t)\[(%rd\d+)(\+\d+)?\]([^;]*;)",
        rf"{{{Q64}\2, 4; \1[q\3]\4}}",
    ),
    "partial sums loaded from elsewhere": (
        r"(ld\.global\.v4\.b32 \t\{[^}]*\}, )\[(%rd\d+)(\+\d+)?\];",
        rf"{{{Q64}\2, 16; \1[q\3];}}",
    ),
    "results not stored": (r"st\.global\.v4\.b32 [^;]*;", ""),
}
"""Faults of the stores of partial sums, and of the kernel that adds them up."""
MISSING = Unfound(1, "a token outside of the test's shape")
FOURTH_TILE = Unfound(1, "the fourth tile would wait for this accumulator")
UNFOUND: dict[str, dict[str, Unfound]] = {
    "one": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED,
        "other count of arrivals": FOURTH_TILE,
        "zero stored": MISSING,
    },
    "linear": {
        **LOOPS,
        "barrier of the warp left out": CONVERGED,
        "kernel before not waited for": NOTHING_READ,
        "other count of arrivals": FOURTH_TILE,
    },
    "split": {
        "barrier of the warp left out": CONVERGED._replace(count=3),
        "kernel before not waited for": Unfound(
            1, "alpha is read after the cluster's barrier, which follows other waits"
        ),
        "wait left out": ONE_TILE,
        "arrival left out": ONE_TILE,
        "other count of arrivals": ONE_TILE,
        "fence before left out": ONE_TILE,
        "sums stored elsewhere": MISSING,
    },
    "stream": {
        "barrier of the warp left out": CONVERGED,
        "other count of arrivals": FOURTH_TILE,
        "zero stored": MISSING._replace(count=2),
        "partial sum or result stored elsewhere": MISSING._replace(count=2),
        "partial sums loaded from elsewhere": Unfound(4, "the loop over four CTAs at once, which does not run here"),
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that faults are found: omitted or altered waits, arrivals, commits, fences, descriptors, copies, stores."""
    run = FAULTY[name]
    faulty = functools.partial(execute, run, late=True)
    kinds = WEIGHT_TCGEN05 | (STREAM_K_FAULTS if name == "stream" else {})
    check_faults(faulty, run.case.kernel, run.case.arch, UNFOUND[name], request, kinds=kinds, least=30)
