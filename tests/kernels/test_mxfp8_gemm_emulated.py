"""The MXFP8 kernel of ``fp8_mma``, executed in the PTX emulator and compared with the reference."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from expected._fp8_gemm import Weight, assert_close, gemm, mx_factors, numbers
from samples.grouped_mm_fp8 import contiguous, masked, with_mx_scales
from samples.mm_fp8_block import mx_sample
from support.emulated import BLACKWELL, CONSUMER, CPU, HOPPER, changed
from support.epilogues import finished, finished_by_expert, operands
from support.kernel_grid import BF16, FP16, FP32, MXFP8GemmCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats.fp4 import UE8M0_NAN
from torch_cute_ops.gemm.backends.fp8_mma_sync import mx_words, mx_words_of
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp8_mma import SCALED_TILES, Arguments
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

mm_fp8_block = OPS["mm_fp8_block"].reference
grouped_mm_fp8 = OPS["grouped_mm_fp8"].reference
POISON = 777.0


class Run(NamedTuple):
    """Launch of the kernel: case, M, N, K, largest number of CTAs, and seed of the order of warps."""

    case: MXFP8GemmCase
    m: int
    n: int
    k: int
    max_ctas: int
    seed: int | None = 0


class GroupedRun(NamedTuple):
    """Launch of the kernel with experts: case, rows of each expert, N, K, largest number of CTAs, seed of the order of
    warps, and in the masked layout the rows that each expert has space for."""

    case: MXFP8GemmCase
    counts: tuple[int, ...]
    n: int
    k: int
    max_ctas: int
    seed: int | None = 0
    space: int = 0


def case(tile_m: int, arch: str, *epilogue: Any, layout: str = "plain", split_k: int = 1) -> MXFP8GemmCase:
    return MXFP8GemmCase(tile_m, Epilogue(*epilogue), arch, layout, split_k)


# On sm_120a, block-scaled MMAs apply the scales; elsewhere, each MMA's result is scaled and added in fp32.
RUNS = {
    "one-row": Run(case(16, HOPPER, BF16), 1, 8, 64, 2),
    "half-a-k-tile": Run(case(16, CONSUMER, FP32), 17, 136, 192, 2, 1),
    "many-k-tiles": Run(case(16, HOPPER, FP16, "one"), 5, 24, 896, 1, None),
    "large-tile": Run(case(32, BLACKWELL, FP32, "column", FP32), 70, 264, 384, 3),
    "large-tile-bf16": Run(case(32, CONSUMER, BF16, "column", BF16), 130, 128, 256, 1, 2),
    "persistent": Run(case(32, HOPPER, FP32), 129, 136, 128, 1, 3),
    "scaled-one-row": Run(case(16, CONSUMER, BF16, "one", BF16), 1, 8, 64, 2),
    "scaled-many-k-tiles": Run(case(16, CONSUMER, FP16, "column", FP16), 5, 24, 896, 1, None),
    "scaled-large-tile": Run(case(64, CONSUMER, FP32, "column", FP32), 70, 264, 384, 3, 1),
    "scaled-large-tile-bf16": Run(case(64, CONSUMER, BF16, None, FP32), 130, 128, 576, 2, 2),
    "scaled-large-tile-fp16": Run(case(64, CONSUMER, FP16, "one"), 33, 40, 64, 1),
    "scaled-persistent": Run(case(32, CONSUMER, FP32), 129, 136, 128, 1, 3),
    "split-k": Run(case(16, HOPPER, BF16, "column", BF16, split_k=2), 17, 136, 448, 4, 1),
    "scaled-split-k": Run(case(16, CONSUMER, FP32, split_k=4), 5, 24, 1216, 4, None),
    "scaled-split-k-persistent": Run(case(64, CONSUMER, BF16, "column", FP32, split_k=2), 130, 136, 576, 2, 2),
    "scaled-split-k-without-k-tiles": Run(case(32, CONSUMER, FP16, "one", split_k=8), 33, 40, 320, 8, 0),
}


def execute(run: Run, edit: Any = None, bad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result. All sums are exact. If ``bad``, some scales are
    NaN, 2^-127 or large."""
    torch.manual_seed(run.k)
    a, b, a_scale, b_scale = mx_sample("", run.m, run.n, run.k, CPU, exact=True, layout="linear").args
    if bad:
        a_scale[0, 0], a_scale[-1, -1] = UE8M0_NAN, 0
        b_scale[1, 1], b_scale[-1, 0] = UE8M0_NAN, 180
    alpha, bias = operands(run.case.epilogue, run.n)
    sums = mm_fp8_block(a, b, a_scale, b_scale, alpha=None, bias=None, out_dtype=FP32)
    want = finished(sums, run.case.epilogue, alpha, bias)
    return launch(run, (a, b, a_scale, b_scale), alpha, bias, edit), want


def launch(run: Run, matrices: tuple[torch.Tensor, ...], alpha: Any = None, bias: Any = None, edit: Any = None) -> Any:
    """Run the kernel for ``a``, ``b`` and their linear scales; return its result."""
    a, b, a_scale, b_scale = matrices
    out = torch.full((len(a), b.shape[1]), POISON, dtype=run.case.epilogue.out_dtype)
    scales = mx_words(a_scale, column_major=True), mx_words(b_scale)
    given = Arguments(a, b, *scales, None, None, alpha, bias, out, None, run.max_ctas)
    run_kernel(run.case.kernel, ARCHS[run.case.arch], *given, seed=run.seed, strict=True, scoped=True, edit=edit)
    return out


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_results(run: Run) -> None:
    """Check results bit for bit, for whole numbers and scales that are powers of two."""
    got, want = execute(run)
    assert torch.equal(got, want)


GROUPED_RUNS = {
    "offsets": GroupedRun(case(16, HOPPER, FP32, layout="offsets"), (5, 0, 19), 136, 192, 2),
    "counted": GroupedRun(case(32, HOPPER, BF16, "expert", BF16, layout="counted"), (3, 70, 0, 1), 72, 320, 3, 1),
    "masked": GroupedRun(case(16, BLACKWELL, FP16, "one", layout="masked"), (1, 0, 20), 24, 448, 1, None, 24),
    "masked-large-tile": GroupedRun(
        case(32, HOPPER, FP32, "expert_column", FP32, layout="masked"), (33, 40), 264, 128, 2, 3, 40
    ),
    "scaled-offsets": GroupedRun(case(16, CONSUMER, FP32, layout="offsets"), (5, 0, 19), 136, 192, 2, 2),
    "scaled-counted": GroupedRun(
        case(64, CONSUMER, BF16, "expert_column", FP32, layout="counted"), (3, 70, 0, 1), 72, 320, 3, 1
    ),
    "scaled-masked": GroupedRun(case(32, CONSUMER, FP16, "expert", layout="masked"), (1, 0, 20), 24, 448, 1, None, 24),
    "scaled-masked-large-tile": GroupedRun(
        case(64, CONSUMER, FP32, "one", FP32, layout="masked"), (65, 80), 264, 64, 2, 3, 80
    ),
}


def execute_grouped(run: GroupedRun, edit: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel with experts; return its result and the expected result, in which rows without an expert keep
    their old values. All sums are exact. Scales of these rows, and of experts without rows, are NaN."""
    torch.manual_seed(run.k)
    sizes, layout, epilogue = (run.n, run.k, CPU), run.case.layout, run.case.epilogue
    if layout == "masked":
        one = masked("", run.counts, run.space, *sizes, exact=True)
    else:
        one = contiguous("", run.counts, *sizes, alignment=4, spare=3, counted=layout == "counted", exact=True)
    one = with_mx_scales(one, "linear", exact=True)
    a, b, a_scale, b_scale, *rest = one.args
    offsets, counts = rest or (None, one.kwargs["counts"])
    alpha, bias = operands(epilogue, run.n, len(run.counts))
    sums = grouped_mm_fp8(a, b, a_scale, b_scale, offsets, counts, out_dtype=FP32)
    want = finished_by_expert(sums, offsets, counts, epilogue, alpha, bias, POISON)
    out = torch.full_like(want, POISON)
    scales = mx_words_of(a_scale, a.shape, column_major=True), mx_words_of(b_scale, b.mT.shape)
    given = Arguments(a, b, *scales, offsets, counts, alpha, bias, out, None, run.max_ctas)
    run_kernel(run.case.kernel, ARCHS[run.case.arch], *given, seed=run.seed, strict=True, scoped=True, edit=edit)
    return out, want


@pytest.mark.parametrize("run", GROUPED_RUNS.values(), ids=GROUPED_RUNS)
def test_results_of_experts(run: GroupedRun) -> None:
    """Check results of each expert's rows bit for bit, and that no other row is written."""
    got, want = execute_grouped(run)
    assert torch.equal(got, want) and (got == POISON).any() and (got != POISON).any()


@pytest.mark.parametrize("tile_m", SCALED_TILES)
def test_random_results_of_scaled_mmas(tile_m: int) -> None:
    """Check random numbers and scales against sums in float64. The emulator adds the exact products of each MMA to the
    accumulator, and rounds once."""
    m, n, k = 70, 72, 448
    torch.manual_seed(tile_m)
    a, b, a_scale, b_scale = matrices = mx_sample("", m, n, k, CPU, layout="linear").args
    weight = Weight(numbers(b.t()), mx_factors(b_scale, n, k))
    want = gemm(a, weight, torch.from_numpy(mx_factors(a_scale, m, k)), None, None, "cpu", 32)
    assert_close(launch(Run(case(tile_m, CONSUMER, FP32), m, n, k, 2), matrices), want, FP32)


@pytest.mark.parametrize("name", ["half-a-k-tile", "large-tile", "scaled-large-tile"])
def test_special_scales(name: str) -> None:
    """Check that a NaN scale makes its row or column NaN, and check the smallest and a large scale."""
    got, want = execute(RUNS[name], bad=True)
    assert want.isnan().any() and not want.isnan().all()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(("tile_m", "arch"), [(32, HOPPER), (16, CONSUMER), (64, CONSUMER)])
def test_each_block_takes_its_own_scale(tile_m: int, arch: str) -> None:
    """Check one-hot rows: element k of row k of ``a`` is 1, so row k of the result is row k of the weight, times the
    scales of the block of k."""
    k, n = 128, 40
    a = torch.eye(k).to(torch.float8_e4m3fn)
    weight = torch.randint(-3, 4, (n, k)).float()
    a_scale, b_scale = (torch.randint(120, 134, (rows, k // 32), dtype=torch.uint8) for rows in (k, n))
    want = torch.empty(k, n)
    for row in range(k):
        exponent = a_scale[row, row // 32].int() + b_scale[:, row // 32].int() - 254
        want[row] = weight[:, row] * 2.0**exponent
    run = Run(case(tile_m, arch, FP32), k, n, k, 2)
    assert torch.equal(launch(run, (a, weight.to(a.dtype).t(), a_scale, b_scale)), want)


def test_which_mmas_apply_the_scales() -> None:
    """Check that all MMAs of a kernel are block-scaled on sm_120a and sm_121a, and that none is elsewhere."""
    for name, arch in ARCHS.items():
        ptx = compile_ptx(case(32, name, FP32).kernel, arch).ptx
        scaled, every = ptx.count(".kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32."), ptx.count("mma.sync")
        assert (scaled, every) == ((16, 16) if arch.has_block_scaled_mma else (0, every)) and every


@pytest.mark.parametrize("arrive", [0, 1], ids=["accumulators stored", "accumulators read"])
def test_clusters_wait_twice(arrive: int) -> None:
    """Check that a race or a wrong result is found, in some order of threads, if the CTAs of a cluster do not wait for
    each other before or after rank 0 reads the accumulators."""

    def edit(ptx: str) -> str:
        for kind in ("arrive", "wait"):
            found = [*re.finditer(rf"barrier\.cluster\.{kind}[^;]*;", ptx)][arrive]
            ptx = ptx[: found.start()] + ptx[found.end() :]
        return ptx

    run = Run(case(16, CONSUMER, FP32, split_k=2), 40, 136, 448, 2)
    with pytest.raises((EmulationError, AssertionError)):
        for seed in (None, 0, 1, 2):
            got, want = execute(run._replace(seed=seed), edit)
            assert torch.equal(got, want)


SELECTORS = r"(mma\.sync[^;]*\}, \{%r\d+\}, )\{(\d), (\d)\}(, \{%r\d+\}, )\{(\d), (\d)\}"
"""Pattern of a block-scaled MMA, with the bytes and lanes of both scales as groups 2, 3, 5 and 6."""


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(changed(r"cp\.async\.wait_group", None), id="copies there"),
        pytest.param(changed(r"bar\.sync\s+0", 1), id="k tile and scales there for all"),
        pytest.param(changed(r"bar\.sync\s+0", 2), id="last k tile read"),
        pytest.param(changed(SELECTORS, 20, r"\1{0, \3}\4{\5, \6};"), id="byte of a"),
        pytest.param(changed(SELECTORS, 3, r"\1{\2, \3}\4{\5, 0};"), id="lanes of b"),
        pytest.param(changed(SELECTORS, 20, r"\1{\2, 0}\4{\5, \6};"), id="lanes of a"),
    ],
)
def test_what_scaled_mmas_need(edit: Any) -> None:
    """Check that a race or a wrong result is found, in some order of threads, if ``edit`` removes a wait or lets an MMA
    take another scale."""
    run = Run(case(64, CONSUMER, FP32), 70, 136, 576, 1)
    with pytest.raises((EmulationError, AssertionError)):
        for seed in (None, 0, 1):
            got, want = execute(run._replace(seed=seed), edit)
            assert torch.equal(got, want)
