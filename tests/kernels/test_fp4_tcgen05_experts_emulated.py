"""FP4 GEMM over experts by tcgen05, executed in the PTX emulator and compared with the CPU reference.

We had no GPU with these instructions, so these tests are the only evidence that the kernel's results are correct.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import CPU, INPUTS, WEIGHT, changed, poisoned, written_late
from support.host_grids import check_nothing_is_launched_on_overlap, gemm_call, grids
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, Tcgen05ExpertsCase
from support.ptx_faults import CONVERGED, LOADED_AT_ONCE, Edit, Unfound, check_faults

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.scale_layout import from_linear, to_linear
from torch_cute_ops.kernels import fp4_tcgen05_experts
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.runtime.arch import ARCHS


class Gemm(NamedTuple):
    """Launch of a GEMM of M, N and a number of experts.

    ``share`` is the fraction of all (token, expert) pairs that are routed. ``num_ctas`` CTAs share all work tiles.
    """

    case: Tcgen05ExpertsCase
    sizes: tuple[int, int, int]
    share: float = 0.5
    num_ctas: int = 1

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'x'.join(map(str, self.sizes))}-{self.num_ctas}"


def gemm(*case: Any, sizes: tuple[int, int, int], share: float = 0.5, num_ctas: int = 1, bias: Any = None) -> Gemm:
    """Return a launch. ``case`` is format, layout, tile_n, number of groups of experts, routed, dtype, width of an
    expert."""
    return Gemm(Tcgen05ExpertsCase(*case, stages=3, bias_dtype=bias), sizes, share, num_ctas)


# Launches with partial tiles along M, N and K; with experts of one k tile, or of several k tiles of which the last is
# partial; with more experts per group than a word has bits; with more k tiles than stages; and with at least three work
# tiles per CTA, some of them without experts
COVERING = [
    gemm(NVFP4, "128x4", 128, 1, False, BF16, 320, sizes=(130, 136, 3)),
    gemm(NVFP4, "128x4", 64, 2, True, FP16, 64, sizes=(5, 72, 70), share=0.02),
    gemm(NVFP4, "linear", 32, 5, True, FP32, 576, sizes=(33, 40, 5), share=0.03, num_ctas=2, bias=FP32),
    gemm(MXFP4, "128x4", 32, 2, False, FP32, 192, sizes=(9, 104, 7), num_ctas=3),
    gemm(MXFP4, "128x4", 128, 8, True, BF16, 320, sizes=(130, 24, 9), share=0.01, num_ctas=3, bias=BF16),
    gemm(MXFP4, "linear", 64, 1, True, FP16, 448, sizes=(5, 136, 4)),
]
MORE = [
    gemm(
        fmt,
        layout,
        tile_n,
        classes,
        routed,
        (BF16, FP16, FP32)[i % 3],
        width,
        sizes=sizes,
        share=share,
        num_ctas=num_ctas,
    )
    for i, (fmt, layout, tile_n) in enumerate(
        (fmt, layout, tile_n)
        for fmt in (NVFP4, MXFP4)
        for layout in ("128x4", "linear")
        for tile_n in ((32, 64, 128) if layout == "128x4" else (32, 64))
    )
    for classes, routed, width, sizes, share, num_ctas in (
        (1, False, 512, (300, 200, 4), 0.5, 2),
        (1, True, 64, (140, 264, 70), 0.01, 3),
        (2, False, 320, (17, 264, 8), 1.0, 1),
        (5, True, 704, (130, 136, 14), 0.02, 5),
        (8, False, 192, (9, 72, 26), 0.3, 4),
        (8, True, 256, (1, 72, 6), 0.5, 100),
    )
]


def workspace(case: Tcgen05ExpertsCase, m: int, n: int, experts: int) -> torch.Tensor | None:
    """Return a workspace full of NaN, so that reads of unwritten bytes are detected."""
    size = case.kernel.config.workspace_bytes(m, n, experts)
    return torch.full((size,), 0xFF, dtype=torch.uint8) if size else None


def multiply(one: Gemm, seed: int | None, edit: Edit | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; return the result and the reference's result.

    Activation scales are NaN where the factor is zero, and so are the biases of experts without tokens. With a seed,
    each kernel, including a simulated previous kernel, writes its output at the last moment.
    """
    (m, n, experts), case = one.sizes, one.case
    fmt, layout = case.format, SCALE_LAYOUTS[case.layout]
    k = experts * case.expert_k
    torch.manual_seed(k)
    (a, a_scale), (b, b_scale) = (
        random_matrix(rows, k, fmt, case.layout, CPU, POWERS[fmt.scale_format]) for rows in (m, n)
    )
    alpha = torch.randint(1, 9, (m, experts)) / 4 * (torch.rand(m, experts) < one.share)
    alpha[m // 2, 0] = 0.0
    alpha[0, -1], alpha[0, 0] = 1.5, -0.0
    bias = None
    if case.bias_dtype is not None:
        bias = torch.randint(-50, 51, (experts, n)).to(case.bias_dtype)
        bias[(alpha == 0).all(0)] = torch.nan
    nan = 0x7F if fmt == NVFP4 else 0xFF
    rows = to_linear(a_scale.view(torch.uint8), layout, m, k // fmt.block_size).clone()
    rows[(alpha == 0).repeat_interleave(case.expert_k // fmt.block_size, 1)] = nan
    placed = from_linear(rows, layout)
    exists = from_linear(torch.ones_like(rows), layout) != 0
    a_scale = torch.where(exists, placed, nan).view(fmt.scale_dtype)
    out = poisoned(m, n, dtype=case.out_dtype)
    given = fp4_tcgen05_experts.Arguments(
        a, a_scale, b.t(), b_scale, alpha, bias, out, workspace(case, m, n, experts), one.num_ctas
    )
    given, before = written_late(given, (*WEIGHT, *INPUTS)) if seed is not None else (given, None)
    max_steps = 1_000_000 if edit is None else 200_000  # with a fault, threads may wait forever
    how = {"seed": seed, "max_steps": max_steps, "strict": True, "edit": edit, "written_before": before}
    run_kernel(case.kernel, ARCHS[case.arch], *given, **how)
    return out, expert_gemm(a, a_scale, b, b_scale, alpha, bias, case.out_dtype, fmt, layout, layout)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more = metafunc.config.getoption("more_emulated")
    if "one" in metafunc.fixturenames:
        cases = COVERING + (MORE if more else [])
        metafunc.parametrize("one", [pytest.param(case, id=case.id) for case in cases])
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", FAULTY if more else ["routed"])


def test_gemm(one: Gemm) -> None:
    """Use inputs whose sums are exact, and check that the results equal the reference's bit for bit, in two orders of
    events. Scales that must not matter are NaN."""
    for seed in (None, 1):
        got, want = multiply(one, seed)
        assert want.isfinite().all() and torch.equal(got, want)


def test_nothing_is_routed() -> None:
    """Check a GEMM in which a single token is routed to two experts, so that most work tiles need no expert."""
    one = gemm(NVFP4, "128x4", 32, 3, True, FP32, 64, sizes=(3, 40, 7), share=0.0, num_ctas=3)
    got, want = multiply(one, 0)
    assert torch.equal(got, want) and not want[1:].any() and want[0].any()


def test_every_launch_waits_for_the_one_before() -> None:
    """Check that the waits for the previous kernel are needed in all three kernels: the search for experts that have
    tokens, the GEMM, and the addition of partial sums."""
    one = gemm(NVFP4, "128x4", 32, 3, True, FP32, 64, sizes=(3, 40, 7), share=0.5, num_ctas=3)
    wait = r"griddepcontrol\.wait"
    waits = re.findall(wait, compile_ptx(one.case.kernel, ARCHS[one.case.arch]).ptx)
    assert len(waits) == 5
    for number in range(len(waits)):
        with pytest.raises((EmulationError, AssertionError)):
            got, want = multiply(one, 0, changed(wait, number))
            assert torch.equal(got, want)


def test_compiles_without_spills(one: Gemm) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(one.case, one.case.kernel)


def test_nothing_is_launched_on_overlap() -> None:
    case = COVERING[4].case
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


@pytest.mark.parametrize(
    ("covering", "sms", "launched"),
    [
        # M = 300, N = 400, and 70 experts in 1, 2, 2, 8 and 1 groups. An m tile is 128 tokens, and an n tile 128, 64 or
        # 32 columns.
        (0, 7, [7]),
        (1, 148, [(4, 3), 3 * 7 * 2, 300 * 50 // 256 + 1]),
        (3, 148, [3 * 13 * 2, 300 * 50 // 256 + 1]),
        (4, 0, [(8, 3), 1, 300 * 50 // 256 + 1]),
        (5, 148, [(3, 3), 3 * 7]),
    ],
)
def test_ctas(covering: int, sms: int, launched: list[Any]) -> None:
    """Check the grid of each kernel.

    The GEMM launches at most one CTA per SM. The first kernel launches one CTA for each m tile and each 32 experts of a
    group. The last kernel launches enough threads for the result.
    """
    case = COVERING[covering].case
    dims = {"n": 400, "m": 300, "a_tile_rows": 3, "b_tile_rows": 4, "experts": 70, "alpha_stride": 70}
    call = gemm_call(case.kernel, **dims, num_ctas=sms)
    every = [(*one, 1) if isinstance(one, tuple) else (one, 1, 1) for one in launched]
    assert grids(case.kernel, ARCHS[case.arch], *call) == every


def test_factors_of_any_strides() -> None:
    """Check factors with any strides, and that a NaN factor makes the row of its token NaN."""
    m, n, experts, width = 4, 40, 3, 64
    case = Tcgen05ExpertsCase(NVFP4, "128x4", 32, 1, True, FP32, width)
    (a, a_scale), (b, b_scale) = (random_matrix(rows, experts * width, NVFP4, "128x4", CPU) for rows in (m, n))
    alpha = torch.zeros(2 * experts, 3 * m)
    alpha[::2, ::3] = torch.rand(experts, m)
    alpha = alpha[::2, ::3].t()
    alpha[2, 1] = torch.nan
    out = poisoned(m, n, dtype=FP32)
    given = (a, a_scale, b.t(), b_scale, alpha, None, out, workspace(case, m, n, experts), 2)
    run_kernel(case.kernel, ARCHS["sm_100a"], *given, strict=True)
    layout = SCALE_LAYOUTS["128x4"]
    want = expert_gemm(a, a_scale, b, b_scale, alpha, None, FP32, NVFP4, layout, layout)
    assert out[2].isnan().all() and want[2].isnan().all()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_sums_of_any_size_in_the_same_order() -> None:
    """Check that rounded sums are bitwise equal for any number of CTAs and any other tokens."""
    m, n, experts, width = 3, 40, 7, 64
    case = Tcgen05ExpertsCase(NVFP4, "linear", 32, 3, True, FP32, width)
    (a, a_scale), (b, b_scale) = (random_matrix(rows, experts * width, NVFP4, "linear", CPU) for rows in (m, n))
    alpha = torch.randn(m, experts)
    alpha[:, ::3] *= torch.eye(m)

    def results(rows: slice, ctas: int) -> torch.Tensor:
        out = poisoned(len(a[rows]), n, dtype=FP32)
        given = (a[rows], a_scale[rows], b.t(), b_scale, alpha[rows], None, out)
        given = (*given, workspace(case, len(out), n, experts), ctas)
        run_kernel(case.kernel, ARCHS[case.arch], *given, strict=True)
        return out

    every = results(slice(m), 1)
    layout = SCALE_LAYOUTS["linear"]
    want = expert_gemm(a, a_scale, b, b_scale, alpha, None, FP32, NVFP4, layout, layout)
    torch.testing.assert_close(every, want, rtol=1e-5, atol=1e-4)
    assert torch.equal(results(slice(m), 4), every)
    assert torch.equal(results(slice(1, 2), 2), every[1:2])


# Faults. In each case a CTA gets more k tiles than stages, three experts and several work tiles.

FAULTY = {
    "dense": gemm(NVFP4, "128x4", 64, 1, False, FP32, 320, sizes=(40, 72, 3)),
    "routed": gemm(MXFP4, "128x4", 32, 2, True, BF16, 320, sizes=(40, 40, 10), share=0.03, num_ctas=2, bias=FP32),
    "linear": gemm(NVFP4, "linear", 32, 1, False, FP32, 320, sizes=(40, 40, 3)),
}
UNFOUND: dict[str, dict[str, Unfound]] = {
    "dense": {"wait for loads left out": LOADED_AT_ONCE, "barrier of the warp left out": CONVERGED},
    "routed": {"barrier of the warp left out": CONVERGED},
    "linear": {
        "wait for the other phase": Unfound(1, "a warp that only counts may be a phase late"),
        "barrier of the warp left out": CONVERGED,
    },
}


def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that the emulator finds omitted or altered waits, arrivals, commits, fences, descriptors and copies."""
    one = FAULTY[name]
    run = functools.partial(multiply, one)
    check_faults(run, one.case.kernel, one.case.arch, UNFOUND[name], request)
