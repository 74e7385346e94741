"""Kernels of the gated FP4 GEMM over experts, executed in the PTX emulator."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cancelling import cancelling_matrix
from support.emulated import BLACKWELL as DATA_CENTER
from support.emulated import CONSUMER as DESKTOP
from support.emulated import HOPPER, KERNEL_WAIT, PASSED, WAIT, changed
from support.gated_gemm import Gated, Operands, check, decoded, expected, operands, results, routed
from support.host_grids import call_apart, grids
from support.kernel_fit import check_emulated, check_warp_mmas
from support.kernel_grid import BF16, FP16, FP32, GatedExpertsCase
from support.ptx_faults import ROUTED_CODES, Unfound, check_faults

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.scale_layout import from_linear, to_linear
from torch_cute_ops.runtime.arch import ARCHS

U8 = torch.uint8
LINEAR, TILED, SMALL = SCALE_LAYOUTS["linear"], SCALE_LAYOUTS["128x4"], SCALE_LAYOUTS["8x4"]


def gated(
    *case: Any, epilogue: tuple[Any, ...], a_dtype: Any = None, split_k: int = 1, arch: str = HOPPER, **rest: int
) -> GatedExpertsCase:
    return GatedExpertsCase(*case, epilogue, arch, a_dtype, split_k, **rest)


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

# Kernels for GPUs without wgmma. On sm_120a, k tiles have 128 elements, or a CTA has half of the usual consumer warps.
WARPS = [
    Gated(
        gated(
            *(FP16, NVFP4, "128x4", "128x4", 64, 16, 32),
            epilogue=(NVFP4, TILED, "expert", FP32, "expert", "swiglu", True),
            **{"split_k": 2, "arch": DATA_CENTER},
        ),
        *(18, 1056, 2, 64, "dense", 3, 1),
    ),
    Gated(
        gated(
            *(BF16, MXFP4, "128x4", None, 256, 32, 64),
            epilogue=(BF16, None, "expert_half", FP32, None, "swiglu"),
            **{"a_dtype": FP16, "arch": DATA_CENTER},
        ),
        *(34, 800, 2, 128, "one", 2, 2),
    ),
    Gated(
        gated(
            *(FP16, NVFP4, "linear", "linear", 128, 24, 64),
            epilogue=(NVFP4, LINEAR, None, FP32, "one", "swiglu"),
            **{"split_k": 4, "arch": DATA_CENTER},
        ),
        *(26, 1024, 2, 64, "hot", 3, 3),
    ),
    Gated(
        gated(
            *(BF16, NVFP4, "128x4", None, 32, 8, 32), epilogue=(BF16, None, None, None, None, "swiglu"), arch=DESKTOP
        ),
        *(3, 672, 35, 64, "few", 5, 4),
    ),
    Gated(
        gated(
            *(BF16, MXFP4, "128x4", None, 64, 32, 64),
            epilogue=(BF16, None, "expert", BF16, None, "swiglu"),
            arch=DESKTOP,
        ),
        *(35, 576, 2, 64, "hot", 2, 5),
    ),
    Gated(
        gated(
            *(BF16, NVFP4, "128x4", None, 128, 16, 32),
            epilogue=(BF16, None, "expert", FP32, None, "swiglu"),
            **{"split_k": 4, "arch": DESKTOP},
        ),
        *(17, 1056, 2, 64, "few", 4, 6),
    ),
    Gated(
        gated(
            *(BF16, MXFP4, "128x4", None, 256, 16, 32),
            epilogue=(BF16, None, None, BF16, None, "swiglu"),
            **{"split_k": 4, "arch": DESKTOP},
        ),
        *(17, 800, 1, 128, "dense", 3, 7),
    ),
    Gated(
        gated(
            *(FP16, NVFP4, "linear", None, 128, 24, 64),
            epilogue=(FP16, None, None, None, None, "swiglu"),
            arch=DESKTOP,
        ),
        *(25, 512, 2, 64, "dense", 2, 8),
    ),
    # 24 warps with 80 registers each; the widest tile with 16 warps; 8 consumer warps with setmaxnreg
    Gated(
        gated(
            *(BF16, MXFP4, "128x4", None, 32, 8, 32),
            epilogue=(BF16, None, None, None, None, "swiglu"),
            arch=DESKTOP,
        ),
        *(3, 576, 3, 64, "few", 2, 9),
    ),
    Gated(
        gated(
            *(BF16, NVFP4, "128x4", None, 256, 32, 32),
            epilogue=(BF16, None, "expert", None, None, "swiglu"),
            arch=DESKTOP,
        ),
        *(32, 544, 1, 128, "dense", 2, 10),
    ),
    Gated(
        gated(
            *(FP16, NVFP4, "linear", None, 64, 32, 32),
            epilogue=(FP16, None, None, None, None, "swiglu"),
            arch=DATA_CENTER,
        ),
        *(32, 512, 2, 64, "dense", 2, 11),
    ),
]

# Kernels for sm_120a whose MMAs multiply the codes of both operands, with every number of pipelines, k tiles of 256 and
# 128 elements, and 8 and 16 consumer warps. In the first three cases, each pipeline gets more k tiles than stages. The
# last k tile is partial, and in four cases its last MMA is partial too.
CODES = [
    Gated(
        gated(
            *(U8, NVFP4, "128x4", "128x4", 256, 8, 32),
            epilogue=(NVFP4, TILED, "expert_half", FP32, "expert", "swiglu"),
            arch=DESKTOP,
        ),
        *(5, 1120, 3, 128, "few", 2, 3),
    ),
    Gated(
        gated(
            *(U8, MXFP4, "128x4", "128x4", 128, 32, 64),
            epilogue=(MXFP4, TILED, "expert", BF16, None, "swiglu", True),
            arch=DESKTOP,
        ),
        *(35, 1312, 2, 64, "hot", 2, 5),
    ),
    Gated(
        gated(
            *(U8, NVFP4, "128x4", "128x4", 128, 16, 32),
            epilogue=(NVFP4, TILED, "expert", FP32, None, "swiglu", True),
            **{"split_k": 4, "arch": DESKTOP},
        ),
        *(17, 2080, 2, 64, "few", 4, 6),
    ),
    Gated(
        gated(U8, NVFP4, "128x4", "8x4", 32, 8, 32, epilogue=(NVFP4, SMALL, None, None, "one", "swiglu"), arch=DESKTOP),
        *(3, 672, 35, 64, "few", 5, 4),
    ),
    Gated(
        gated(
            *(U8, NVFP4, "linear", "linear", 64, 16, 32),
            epilogue=(NVFP4, LINEAR, "expert", FP32, "one", "swiglu"),
            **{"split_k": 2, "arch": DESKTOP},
        ),
        *(18, 1280, 2, 64, "dense", 3, 1),
    ),
    Gated(
        gated(
            *(U8, NVFP4, "linear", "linear", 128, 8, 64),
            epilogue=(NVFP4, LINEAR, None, None, "expert", "swiglu"),
            arch=DESKTOP,
        ),
        *(40, 512, 3, 64, "few", 3, 8),
    ),
    Gated(
        gated(
            *(U8, MXFP4, "128x4", "8x4", 256, 16, 32),
            epilogue=(MXFP4, SMALL, "expert_half", FP32, None, "swiglu"),
            **{"split_k": 4, "arch": DESKTOP},
        ),
        *(17, 800, 2, 128, "one", 2, 2),
    ),
    Gated(
        gated(U8, MXFP4, "128x4", "128x4", 64, 24, 512, epilogue=(BF16, None, None, None, None, "silu"), arch=DESKTOP),
        *(30, 352, 2, 64, "dense", 2, None),
    ),
]
EVERY = (*GATED, *WARPS, *CODES)


def is_strict(one: Gated) -> bool:
    """Return True if the emulator checks all rules. Kernels in which a single warp decodes and multiplies are checked
    less strictly."""
    config = one.case.kernel_for(one.k).config
    return not config.by_warp or config.operands.by_codes


def checked(one: Gated, edit: Any = None) -> None:
    """Check that the outputs are bitwise equal to the expected outputs."""
    check(one, edit, is_strict(one))


def computed(one: Gated, given: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernels, and return the outputs."""
    return results(one, given, strict=is_strict(one))


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in EVERY])
def test_gated_gemm(one: Gated) -> None:
    """Check that the results equal the reference's bit for bit. This is possible because every step before the rounding
    is exact, or rounded as in the reference."""
    checked(one)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in EVERY])
def test_compiles_without_spills(one: Gated) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(one.case, one.case.kernel_for(one.k))


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in (*WARPS, *CODES)])
def test_warps_read_a_weight_once(one: Gated) -> None:
    """Check that a kernel for GPUs without wgmma contains one mma.sync per eight tokens of an m tile and 16 elements of
    k, or 64 elements if codes are multiplied."""
    kernel = one.case.kernel_for(one.k)
    check_warp_mmas(kernel, one.case.arch, kernel.config.k_tile)


# A kernel whose CTAs copy weights before the lists are complete, and a kernel whose CTAs do not; then split-K, and
# other sizes.
AWAITED = [GATED[0], GATED[3]]
MORE_AWAITED = [GATED[i] for i in (1, 2, 4, 6, 10, 11)]


# (tile_n, tile_m, split_k, architecture, format or dtype of the result, dtype of the MMAs' operands) of kernels by
# warpgroups, by warps in tiles of more than eight tokens, and by warps that multiply codes
WORK_TILES = [
    (128, 16, 4, HOPPER, (NVFP4, TILED), BF16),
    (64, 24, 2, HOPPER, (BF16, None), BF16),
    (64, 16, 2, DESKTOP, (BF16, None), BF16),
    (128, 8, 4, DESKTOP, (NVFP4, TILED), U8),
]
MORE_WORK_TILES = [
    (128, 24, 4, HOPPER, (NVFP4, TILED), BF16),
    (128, 32, 4, HOPPER, (BF16, None), BF16),
    (256, 16, 4, HOPPER, (BF16, None), BF16),
    (256, 24, 4, HOPPER, (NVFP4, TILED), BF16),
    (128, 32, 4, DATA_CENTER, (NVFP4, TILED), BF16),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more = metafunc.config.getoption("more_emulated")
    if "awaited" in metafunc.fixturenames:
        some = AWAITED + (MORE_AWAITED if more else [])
        metafunc.parametrize("awaited", [pytest.param(one, id=one.id) for one in some])
    if "tiles" in metafunc.fixturenames:
        cases = WORK_TILES + (MORE_WORK_TILES if more else [])
        metafunc.parametrize("tiles", cases, ids=lambda case: "-".join(map(str, case[:4])))


def test_gated_kernels_wait_for_the_previous_kernel(awaited: Gated) -> None:
    """Check that each wait for a previous kernel is needed: in the kernel that lists tokens, in producer warps, and in
    consumer warps."""
    kernel = awaited.case.kernel_for(awaited.k)
    waits = re.findall(KERNEL_WAIT, compile_ptx(kernel, ARCHS[awaited.case.arch]).ptx)
    assert len(waits) == (3 if kernel.config.scans else 2)
    for number in range(len(waits)):
        with pytest.raises((EmulationError, AssertionError)):
            checked(awaited, changed(KERNEL_WAIT, number))


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
            checked(one._replace(seed=seed), edit)


def test_synchronisation_of_a_gated_gemm_is_enough() -> None:
    for seed, one in enumerate((ORDERED, SHORT, SHARED, CODES[1], CODES[2])):
        checked(one._replace(seed=seed))


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
    (codes, scales), (want, want_scales) = computed(one, given), expected(one, given)
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
    tile_n, tile_m, split_k, arch, out, dtype = tiles
    m, k, columns = tile_m + 1, 1280, max(64, tile_n // 2)
    token_block = 32 if m <= 32 else 64
    case = gated(
        *(dtype, NVFP4, "128x4", "128x4" if dtype == U8 else None, tile_n, tile_m, token_block),
        epilogue=(*out, "expert", None, None),
        **{"split_k": split_k, "arch": arch},
    )
    some = Gated(case, m, k, 1, columns, "dense", 3)
    given = cancelling(some)
    chosen = [1, tile_m]
    alone = given._replace(a=given.a[chosen], routing=given.routing[chosen])
    if given.a_scale is not None:
        alone = alone._replace(a_scale=from_linear(to_linear(given.a_scale, TILED, m, k // 16)[chosen], TILED))
    among, both = computed(some, given), computed(some._replace(m=2, num_ctas=1, seed=1), alone)
    assert torch.equal(among[0][chosen], both[0])
    assert among[0][chosen].unique().numel() > 30
    if among[1] is not None:
        scales = [to_linear(scale, out[1], len(y), columns // 16) for y, scale in (among, both)]
        assert torch.equal(scales[0][chosen].view(torch.uint8), scales[1].view(torch.uint8))


def cancelling(one: Gated) -> Operands:
    """Return operands whose results depend on the order of the sums over k. Activations are FP4 if MMAs multiply
    codes."""
    torch.manual_seed(one.k + one.m)
    fmt, layout = one.case.format, SCALE_LAYOUTS[one.case.layout]
    codes, scale = cancelling_matrix(one.m, one.k, fmt, 5, takes_away=False)
    a, a_scale = codes, from_linear(scale, TILED)
    if one.case.a_layout is None:
        a, a_scale = decoded(codes, scale.view(fmt.scale_dtype), fmt, "linear").to(one.case.dtype), None
    b, b_scale = cancelling_matrix(one.experts * 2 * one.columns, one.k, fmt, 5, takes_away=True)
    alpha = torch.full((one.experts,), 2.0**4)
    routing = routed(one.routing, one.m, one.experts)
    return Operands(routing, a, a_scale, b, from_linear(b_scale, layout), alpha, None, None)


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
    among, _ = computed(some, given)
    single, _ = computed(some._replace(m=1, num_ctas=1, seed=1), alone)
    assert torch.equal(among[8:], single)
    assert torch.allclose(single.float(), expected(some, given)[0][8:].float(), rtol=2e-3, atol=1e-2)


# A kernel that multiplies codes. Each pipeline gets more k tiles than stages, and a CTA computes several work tiles.
FAULTY = {
    "pipelines": Gated(
        gated(
            *(U8, NVFP4, "128x4", "128x4", 128, 8, 32),
            epilogue=(NVFP4, TILED, None, None, None, "swiglu"),
            arch=DESKTOP,
        ),
        *(3, 1568, 3, 64, "dense", 2),
    ),
}
UNFOUND: dict[str, dict[str, Unfound]] = {
    "pipelines": {
        "barrier of the CTA left out": Unfound(1, "the stages of the next work tile order the warps, too"),
        "barrier of the warp left out": Unfound(2, "the emulator's warps converge", dead=False),
        "proxy fence left out": Unfound(
            1, "emulated copies do not overtake the stores that clear the stages", dead=False
        ),
    }
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found_where_codes_are_multiplied(name: str, request: pytest.FixtureRequest) -> None:
    """Check that the emulator finds omitted or altered copies, waits, arrivals, fences, loads and MMAs in kernels that
    multiply FP4 codes."""
    one = FAULTY[name]
    given = operands(one)
    want = together(expected(one, given))

    def run(seed: int | None, edit: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return together(results(one._replace(seed=seed), given, edit)), want

    kernel = one.case.kernel_for(one.k)
    check_faults(run, kernel, DESKTOP, UNFOUND[name], request, kinds=ROUTED_CODES, least=25)


def together(outputs: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Return the bytes of all outputs in one tensor."""
    return torch.cat([each.view(torch.uint8).flatten() for each in outputs if each is not None])
