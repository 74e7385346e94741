"""Kernels of the gated FP4 GEMM over experts, executed in the PTX emulator."""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.cancelling import cancelling_matrix
from support.emulated import CPU, HOPPER, KERNEL_WAIT, PASSED, POISON, WAIT, changed, poisoned, written_late
from support.host_grids import call_apart, grids
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, GatedExpertsCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.scale_layout import from_linear, to_linear
from torch_cute_ops.kernels import fp4_gated_experts
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

fp4_dequantize = OPS["fp4_dequantize"].reference

LINEAR, TILED, SMALL = SCALE_LAYOUTS["linear"], SCALE_LAYOUTS["128x4"], SCALE_LAYOUTS["8x4"]
HALF = (0.0, 0.75, 20.0)
"""Parameters with which the gate's sigmoid is 1/2, so that results are exact. Some values reach the clamps."""


class Gated(NamedTuple):
    """Launch of a case's kernels. ``columns`` is the number of result columns of an expert."""

    case: GatedExpertsCase
    m: int
    k: int
    experts: int
    columns: int
    routing: str
    num_ctas: int
    seed: int | None = 0
    gate: tuple[float, float, float] = HALF

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.m}x{self.k}-{self.experts}of{self.columns}-{self.routing}"


def routed(routing: str, m: int, experts: int) -> torch.Tensor:
    """Return a routing (M, E): every number except zero routes a token to an expert. NaN and zeros of either sign
    occur."""
    if routing == "none":
        return torch.zeros(m, experts)
    weights = torch.randn(m, experts)
    if routing == "one":
        weights = weights * (torch.arange(experts) == 1)
    if routing in ("few", "hot"):
        keys = torch.rand(m, experts)
        if routing == "hot":
            keys[:, 1] = 2.0  # for each token
        chosen = torch.zeros(m, experts).scatter(1, keys.topk(min(2, experts)).indices, 1.0)
        weights = weights * chosen
        weights[0] = torch.where(chosen[0] > 0, torch.nan, -0.0)
    return weights


class Operands(NamedTuple):
    """Operands of a launch."""

    routing: torch.Tensor
    a: torch.Tensor
    a_scale: torch.Tensor | None
    b: torch.Tensor
    b_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    global_scale: torch.Tensor | None
    row_scale: torch.Tensor | None = None


def operands(one: Gated, is_exact: bool = True) -> Operands:
    """Return random operands, with exact sums if ``is_exact``. The bias, factor and scale of experts without tokens are
    NaN."""
    torch.manual_seed(one.k + one.m)
    case, epilogue = one.case, fp4_gated_experts.GatedEpilogue(*one.case.epilogue)
    m, k, experts, columns = one.m, one.k, one.experts, one.columns
    powers = POWERS[case.format.scale_format] if is_exact else None
    routing = routed(one.routing, m, experts)
    a_scale = None
    if case.a_layout is None:
        a = (torch.randint(-4, 5, (m, k)) if is_exact else torch.randn(m, k)).to(case.a_dtype or case.dtype)
    else:
        a, a_scale = random_matrix(m, k, case.format, case.a_layout, CPU, powers)
    b, b_scale = random_matrix(experts * 2 * columns, k, case.format, case.layout, CPU, powers)
    alpha = bias = scale = None
    if epilogue.alpha is not None:
        alpha = torch.randint(1, 8, (experts,) if epilogue.alpha == "expert" else (experts, 2)) / 64
    if epilogue.bias_dtype is not None:
        bias = (torch.randn(experts, 2 * columns) * 8).to(epilogue.bias_dtype)
    if epilogue.global_scale is not None:
        scale = torch.randint(1, 5, (experts,) if epilogue.global_scale == "expert" else (1,)) / 4
    for terms in (alpha, bias, scale):
        if terms is not None and len(terms) == experts:
            terms[(routing == 0).all(0)] = torch.nan
    row_scale = None
    if epilogue.has_row_scale:
        row_scale = torch.randint(1, 8, (m,)) / 4
        row_scale[(routing == 0).all(1)] = torch.nan
    return Operands(routing, a, a_scale, b, b_scale, alpha, bias, scale, row_scale)


def results(one: Gated, given: Operands, edit: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernels on poisoned outputs, and return the outputs.

    A simulated previous kernel writes the operands at the last moment, and the first kernel writes the lists of tokens.
    """
    case, epilogue = one.case, fp4_gated_experts.GatedEpilogue(*one.case.epilogue)
    kernel, width = case.kernel_for(one.k), one.experts * one.columns
    y_scale = None
    if isinstance(epilogue.out, FP4Format):
        assert epilogue.out_layout is not None
        y = poisoned(one.m, width // 2, dtype=torch.uint8)
        padded = from_linear(
            torch.empty(one.m, width // epilogue.out.block_size, dtype=torch.uint8), epilogue.out_layout
        )
        y_scale = torch.full_like(padded, POISON).view(epilogue.out.scale_dtype)
    else:
        y = poisoned(one.m, width, dtype=epilogue.out)
    gate = one.gate if epilogue.has_gate_parameters else (None,) * 3
    b_scale = given.b_scale.view(case.format.scale_dtype)
    arguments = fp4_gated_experts.Arguments(
        a=given.a,
        a_scale=None if given.a_scale is None else given.a_scale.view(case.format.scale_dtype),
        b=given.b.view(one.experts, 2 * one.columns, -1).mT,
        b_scale=b_scale.view(one.experts, 2 * one.columns, -1) if case.layout == "linear" else b_scale,
        routing=given.routing.t().contiguous().t(),
        alpha=given.alpha,
        bias=given.bias,
        global_scale=given.global_scale,
        row_scale=given.row_scale,
        y=y,
        scale=y_scale,
        workspace=poisoned(kernel.config.workspace_bytes(one.m, one.experts, one.num_ctas), dtype=torch.uint8),
        swiglu_alpha=gate[0],
        swiglu_beta=gate[1],
        swiglu_limit=gate[2],
        num_ctas=one.num_ctas,
    )
    arguments, before = written_late(arguments, Operands._fields)
    # Kernels in which a single warp multiplies an m tile are checked less strictly; docs/limits.md explains why.
    strict = not kernel.config.by_warp
    run_kernel(kernel, ARCHS[case.arch], *arguments, seed=one.seed, strict=strict, edit=edit, written_before=before)
    return y, y_scale


def decoded(codes: torch.Tensor, scale: torch.Tensor, fmt: FP4Format, layout: str) -> torch.Tensor:
    return fp4_dequantize(codes, scale, None, fmt.block_size, fmt.scale_format, layout, FP32).double()


def expected(one: Gated, given: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the expected outputs. Elements of tokens that are not routed keep their poison; padding of scales is
    zero."""
    case, epilogue = one.case, fp4_gated_experts.GatedEpilogue(*one.case.epilogue)
    experts, columns = one.experts, one.columns
    numbers = given.a.double()
    if given.a_scale is not None:
        assert case.a_layout is not None
        numbers = decoded(given.a, given.a_scale, case.format, case.a_layout)
    weight = decoded(given.b, given.b_scale, case.format, case.layout).view(experts, 2 * columns, one.k)
    sums = torch.einsum("mk,enk->men", numbers, weight).float()
    if given.row_scale is not None:
        sums = sums * given.row_scale[:, None, None]
    if given.alpha is not None:
        sums = sums * given.alpha.view(experts, -1).expand(experts, 2).repeat_interleave(columns, 1)
    if given.bias is not None:
        sums = sums + given.bias.float()
    gate = one.gate if epilogue.has_gate_parameters else (1.0, 0.0, None, epilogue.gate)
    value = silu_mul_rows(sums, *gate)
    is_routed = (given.routing != 0)[:, :, None]
    if not isinstance(epilogue.out, FP4Format):
        return torch.where(is_routed, value.to(epilogue.out), poisoned(1, dtype=epilogue.out)).flatten(1), None
    scale = given.global_scale
    if scale is not None:
        scale = scale.expand(experts)
    parts = [
        quantize_rows(value[:, e], epilogue.out, None if scale is None else scale[e], "linear") for e in range(experts)
    ]
    codes, scales = (
        torch.where(is_routed, torch.stack([part[i].view(torch.uint8) for part in parts], 1), POISON) for i in range(2)
    )
    assert epilogue.out_layout is not None
    return codes.to(torch.uint8).flatten(1), from_linear(scales.to(torch.uint8).flatten(1), epilogue.out_layout)


def check(one: Gated, edit: Any = None) -> None:
    """Check that the outputs are bitwise equal to the expected outputs."""
    given = operands(one)
    got, want = results(one, given, edit), expected(one, given)
    for ours, theirs in zip(got, want, strict=True):
        if theirs is not None:
            assert ours is not None
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def gated(
    *case: Any, epilogue: tuple[Any, ...], a_dtype: Any = None, split_k: int = 1, **rest: int
) -> GatedExpertsCase:
    return GatedExpertsCase(*case, epilogue, HOPPER, a_dtype, split_k, **rest)


GATED = [
    # Launches with more experts than a warp has lanes, with an expert whose columns end inside a scale tile, and with
    # partial k tiles
    Gated(
        gated(
            FP16, NVFP4, "128x4", "128x4", 64, 8, 16, epilogue=(NVFP4, TILED, "expert_half", FP32, "expert", "swiglu")
        ),
        *(5, 1120, 3, 64, "few", 3),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "8x4", 32, 8, 16, epilogue=(NVFP4, SMALL, "expert", None, "expert", "swiglu")),
        *(1, 2080, 35, 64, "few", 5, 1),
    ),
    Gated(
        gated(BF16, NVFP4, "128x4", None, 64, 8, 16, epilogue=(BF16, None, None, None, None, "silu"), max_experts=1024),
        *(2, 64, 520, 64, "few", 3, 1),
    ),
    Gated(
        gated(BF16, NVFP4, "128x4", None, 128, 16, 16, epilogue=(BF16, None, "expert", BF16, None, "swiglu")),
        *(18, 800, 2, 128, "dense", 2, 2),
    ),
    Gated(
        gated(BF16, MXFP4, "128x4", "128x4", 128, 24, 64, epilogue=(MXFP4, TILED, "expert_half", FP32, None, "swiglu")),
        *(33, 576, 3, 64, "hot", 2, 3),
    ),
    Gated(
        gated(FP16, NVFP4, "linear", "linear", 64, 24, 32, epilogue=(NVFP4, LINEAR, None, FP32, "one", "swiglu")),
        *(27, 1280, 2, 128, "one", 2, 4),
    ),
    Gated(
        gated(BF16, MXFP4, "128x4", None, 64, 8, 128, epilogue=(BF16, None, None, None, None, "swiglu"), a_dtype=FP16),
        *(12, 256, 4, 64, "few", 4, None),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 128, 32, 512, epilogue=(NVFP4, TILED, None, None, None, "swiglu")),
        *(40, 288, 2, 64, "one", 1, 5),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 64, 16, 16, epilogue=(NVFP4, TILED, None, None, None, "swiglu")),
        *(3, 320, 2, 64, "none", 2, 6),
    ),
    # Launches in which all warps multiply the same k tiles
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 256, 8, 64, epilogue=(NVFP4, TILED, "expert", None, "one", "swiglu")),
        *(10, 1568, 3, 128, "few", 2, 7),
    ),
    Gated(
        gated(BF16, MXFP4, "128x4", None, 256, 24, 32, epilogue=(BF16, None, None, FP32, None, "gelu_tanh")),
        *(26, 1312, 2, 256, "one", 1, 8),
    ),
    # Split-K: two CTAs share a work tile, in some cases next to work tiles that write to the same scale tiles. One
    # launch has more CTAs than ranges of K.
    Gated(
        gated(
            FP16, NVFP4, "128x4", "128x4", 64, 8, 16, epilogue=(NVFP4, TILED, "expert", None, None, "swiglu"), split_k=2
        ),
        *(2, 1056, 2, 64, "one", 6, 9),
    ),
    Gated(
        gated(BF16, NVFP4, "128x4", None, 128, 16, 16, epilogue=(BF16, None, None, FP32, None, "swiglu"), split_k=4),
        *(17, 1056, 2, 128, "few", 4, 10),
    ),
    Gated(
        gated(
            FP16, NVFP4, "128x4", "128x4", 128, 8, 32, epilogue=(NVFP4, TILED, None, None, None, "swiglu"), split_k=4
        ),
        *(12, 1056, 3, 64, "dense", 5, 11),
    ),
    Gated(
        gated(FP16, NVFP4, "linear", None, 256, 8, 64, epilogue=(FP16, None, None, None, None, "gelu"), split_k=4),
        *(9, 1024, 3, 128, "dense", 3, 12),
    ),
    Gated(
        gated(BF16, NVFP4, "linear", None, 256, 8, 64, epilogue=(BF16, None, None, None, None, "relu2"), split_k=4),
        *(9, 1024, 3, 128, "dense", 3, 12),
    ),
    # Launches whose epilogue multiplies each row by a scale
    Gated(
        gated(
            *(FP16, NVFP4, "128x4", "128x4", 64, 8, 16),
            epilogue=(NVFP4, TILED, "expert_half", FP32, "expert", "swiglu", True),
        ),
        *(5, 1120, 3, 64, "few", 3),
    ),
    Gated(
        gated(BF16, MXFP4, "128x4", "8x4", 128, 24, 64, epilogue=(MXFP4, SMALL, None, None, None, "swiglu", True)),
        *(33, 576, 3, 64, "hot", 2, 3),
    ),
    Gated(
        gated(
            FP16, NVFP4, "linear", "linear", 64, 32, 32, epilogue=(NVFP4, LINEAR, "expert", None, None, "swiglu", True)
        ),
        *(27, 1280, 2, 128, "dense", 2, 4),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 256, 8, 64, epilogue=(NVFP4, TILED, None, None, "one", "swiglu", True)),
        *(10, 1568, 3, 128, "few", 2, 7),
    ),
    Gated(
        gated(
            *(FP16, NVFP4, "128x4", "128x4", 128, 16, 32),
            epilogue=(NVFP4, TILED, "expert", FP32, None, "swiglu", True),
            split_k=4,
        ),
        *(12, 1056, 3, 64, "dense", 5, 11),
    ),
]


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in GATED])
def test_gated_gemm(one: Gated) -> None:
    """Check that the results equal the reference's bit for bit. This is possible because every step before the rounding
    is exact, or rounded as in the reference."""
    check(one)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in GATED])
def test_compiles_without_spills(one: Gated) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(one.case, one.case.kernel_for(one.k))


# A kernel whose CTAs copy weights before the lists are complete, and a kernel whose CTAs do not; then split-K, and
# other sizes.
AWAITED = [GATED[0], GATED[3]]
MORE_AWAITED = [GATED[i] for i in (1, 2, 4, 6, 10, 11)]


# (tile_n, tile_m, split_k, format or dtype of the result) of kernels by warpgroups
WORK_TILES = [(128, 16, 4, (NVFP4, TILED)), (64, 24, 2, (BF16, None))]
MORE_WORK_TILES = [
    (128, 24, 4, (NVFP4, TILED)),
    (128, 32, 4, (BF16, None)),
    (256, 16, 4, (BF16, None)),
    (256, 24, 4, (NVFP4, TILED)),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more = metafunc.config.getoption("more_emulated")
    if "awaited" in metafunc.fixturenames:
        some = AWAITED + (MORE_AWAITED if more else [])
        metafunc.parametrize("awaited", [pytest.param(one, id=one.id) for one in some])
    if "tiles" in metafunc.fixturenames:
        cases = WORK_TILES + (MORE_WORK_TILES if more else [])
        metafunc.parametrize("tiles", cases, ids=lambda case: "-".join(map(str, case[:3])))


def test_gated_kernels_wait_for_the_previous_kernel(awaited: Gated) -> None:
    """Check that each wait for a previous kernel is needed: in the kernel that lists tokens, in producer warps, and in
    consumer warps."""
    kernel = awaited.case.kernel_for(awaited.k)
    waits = re.findall(KERNEL_WAIT, compile_ptx(kernel, ARCHS[awaited.case.arch]).ptx)
    assert len(waits) == (3 if kernel.config.scans else 2)
    for number in range(len(waits)):
        with pytest.raises((EmulationError, AssertionError)):
            check(awaited, changed(KERNEL_WAIT, number))


# Each of two pipelines gets one k tile of a work tile per stage. A producer signals the activations of a k tile when it
# starts the next k tile, or when no stage is empty. The kernel tests if a stage is empty, and waits for a full stage
# and for the previous warp's accumulator. A warp synchronises after finding m tiles, after copying activations (in
# three places), after reading a k tile, after reading the last k tile (which the end of its MMAs orders, too), and
# after adding its accumulator.
ORDERED = Gated(
    gated(FP16, NVFP4, "128x4", "128x4", 128, 16, 16, epilogue=(NVFP4, TILED, None, None, None, "swiglu")),
    *(9, 1344, 2, 64, "dense", 1),
)
# A launch in which two CTAs share a work tile
SHARED = Gated(
    gated(FP16, NVFP4, "128x4", "128x4", 128, 16, 16, epilogue=(NVFP4, TILED, None, None, None, "swiglu"), split_k=4),
    *(3, 1056, 1, 64, "dense", 2),
)
# A launch with four pipelines of two stages each
SHORT = ORDERED._replace(case=replace(ORDERED.case, tile_n=64))


@pytest.mark.parametrize(
    ("one", "edit"),
    [
        pytest.param(ORDERED, changed(WAIT, 1, PASSED), id="stage empty"),
        pytest.param(ORDERED, changed(WAIT, 2, PASSED), id="k tile full"),
        pytest.param(ORDERED, changed(WAIT, 3, PASSED), id="previous accumulators added"),
        pytest.param(ORDERED, changed(r"cp\.async\.wait_group", 0), id="activations there before a wait"),
        pytest.param(ORDERED, changed(r"cp\.async\.wait_group", 1), id="activations there"),
        pytest.param(ORDERED, changed(r"cp\.async\.wait_group", 2), id="last activations there"),
        pytest.param(ORDERED, changed(r"fence\.proxy\.async", 1), id="activations fenced"),
        pytest.param(ORDERED, changed(r"bar\.warp\.sync", 1), id="activations copied"),
        pytest.param(ORDERED, changed(r"bar\.warp\.sync", 4), id="k tile read"),
        pytest.param(ORDERED, changed(r"bar\.warp\.sync", 6), id="accumulators added"),
        pytest.param(ORDERED, changed(r"wgmma\.wait_group\.sync\.aligned\s+1", None), id="MMAs of a k tile done"),
        pytest.param(ORDERED, changed(r"wgmma\.wait_group\.sync\.aligned\s+0"), id="MMAs of a work tile done"),
        pytest.param(
            SHARED,
            changed(r"ld\.acquire\.gpu\.global\.u32\s+(%r\d+),", None, r"mov.b32 \1, 1;"),
            id="partial sums of the other CTA there",
        ),
        pytest.param(ORDERED, changed(r"bar\.sync\s+1", 0), id="results there"),
        pytest.param(ORDERED, changed(r"bar\.sync\s+1", 1), id="results read"),
    ],
)
def test_synchronisation_of_a_gated_gemm_is_needed(one: Gated, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of events, if ``edit`` removes a wait,
    fence or barrier."""
    with pytest.raises((EmulationError, AssertionError)):
        for seed in range(6):
            check(one._replace(seed=seed), edit)


def test_synchronisation_of_a_gated_gemm_is_enough() -> None:
    for seed, one in enumerate((ORDERED, SHORT, SHARED)):
        check(one._replace(seed=seed))


@pytest.mark.parametrize("name", ["b_stride", "b_scale_stride"])
def test_nothing_is_launched_for_experts_apart(name: str) -> None:
    """Check that the host function launches nothing if there are gaps between experts, because the kernel reads all
    experts as one matrix."""
    kernel = gated(FP16, NVFP4, "linear", "linear", 64, 24, 32, epilogue=(NVFP4, LINEAR, None, FP32, "one", "swiglu"))
    kernel = kernel.kernel_for(512)
    sizes = {"m": 24, "experts": 2, "rows": 128, "k_bytes": 256, "blocks": 32, "a_bytes": 256, "a_scale_rows": 24}
    sizes |= {"a_blocks": 32, "b_stride": 128 * 256, "b_scale_stride": 128 * 32, "alpha_stride": 2}
    sizes |= {"alpha_column_stride": 1, "y_width": 64, "y_scale_rows": 24, "y_blocks": 8, "workspace_bytes": 1 << 20}
    numbers = {"num_ctas": 3, "swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": 1.0}
    usual = grids(kernel, ARCHS["sm_90a"], *call_apart(kernel, sizes, numbers))
    assert len(usual) == 2 and all(0 not in grid for grid in usual)
    apart = grids(kernel, ARCHS["sm_90a"], *call_apart(kernel, sizes | {name: 2 * sizes[name]}, numbers))
    assert len(apart) == 1 and 0 in apart[0]


def test_silu_and_nan() -> None:
    """Check the default gate, and that NaN in a token's activations affects only this token's results."""
    case = gated(BF16, NVFP4, "128x4", None, 64, 8, 16, epilogue=(NVFP4, TILED, "expert", None, None))
    one = Gated(case, 4, 512, 2, 64, "dense", 2)
    given = operands(one)
    given.a[2, 7] = torch.nan
    given.alpha.fill_(2.0**-10)
    (codes, scales), (want, want_scales) = results(one, given), expected(one, given)
    # The exponential is approximate, but none of the 512 elements is near a rounding boundary.
    assert torch.equal(codes, want) and torch.equal(scales.view(torch.uint8), want_scales)
    assert (codes[2] == 0).all() and (to_linear(scales, TILED, 4, 8)[2].view(torch.uint8) == 0x7F).all()
    assert len(want[:2].unique()) > 50


def test_results_do_not_depend_on_other_tokens_of_an_m_tile(tiles: tuple[Any, ...]) -> None:
    """Check that a token's results are bitwise equal among other tokens and alone: for a token of a full m tile, and
    for the only token of the next m tile.

    The operands are chosen so that results depend on the order of additions. Warps divide several k tiles, and CTAs
    share a work tile.
    """
    tile_n, tile_m, split_k, out = tiles
    m, k, columns = tile_m + 1, 1280, max(64, tile_n // 2)
    token_block = 32 if m <= 32 else 64
    case = gated(
        BF16, NVFP4, "128x4", None, tile_n, tile_m, token_block, epilogue=(*out, "expert", None, None), split_k=split_k
    )
    some = Gated(case, m, k, 1, columns, "dense", 3)
    given = cancelling(some)
    chosen = [1, tile_m]
    alone = given._replace(a=given.a[chosen], routing=given.routing[chosen])
    among, both = results(some, given), results(some._replace(m=2, num_ctas=1, seed=1), alone)
    assert torch.equal(among[0][chosen], both[0])
    assert among[0][chosen].unique().numel() > 30
    if among[1] is not None:
        scales = [to_linear(scale, out[1], len(y), columns // 16) for y, scale in (among, both)]
        assert torch.equal(scales[0][chosen].view(torch.uint8), scales[1].view(torch.uint8))


def cancelling(one: Gated) -> Operands:
    """Return operands whose results depend on the order of the sums over k. Activations are not FP4."""
    torch.manual_seed(one.k + one.m)
    fmt, layout = one.case.format, SCALE_LAYOUTS[one.case.layout]
    codes, scale = cancelling_matrix(one.m, one.k, fmt, 5, takes_away=False)
    a = decoded(codes, scale.view(fmt.scale_dtype), fmt, "linear").to(one.case.dtype)
    b, b_scale = cancelling_matrix(one.experts * 2 * one.columns, one.k, fmt, 5, takes_away=True)
    alpha = torch.full((one.experts,), 2.0**4)
    routing = routed(one.routing, one.m, one.experts)
    return Operands(routing, a, None, b, from_linear(b_scale, layout), alpha, None, None)


@pytest.mark.parametrize("split_k", [1, 4])
def test_results_of_a_token_do_not_depend_on_others(split_k: int) -> None:
    """Check that a token's results are bitwise equal alone and in the second m tile of experts with other tokens,
    however CTAs divide k.

    The sums are rounded, so that another order of additions would give other results.
    """
    tile_n = 64 if split_k == 1 else 128
    case = gated(BF16, NVFP4, "128x4", None, tile_n, 8, 16, epilogue=(FP16, None, None, None, None), split_k=split_k)
    some = Gated(case, 9, 576 if split_k == 1 else 1312, 2, 64, "dense", 3)
    given = operands(some, is_exact=False)
    alone = given._replace(a=given.a[8:], routing=given.routing[8:])
    among, _ = results(some, given)
    single, _ = results(some._replace(m=1, num_ctas=1, seed=1), alone)
    assert torch.equal(among[8:], single)
    assert torch.allclose(single.float(), expected(some, given)[0][8:].float(), rtol=2e-3, atol=1e-2)
