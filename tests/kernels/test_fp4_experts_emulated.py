"""Kernels of FP4 GEMMs over experts, executed in the PTX emulator and compared with the CPU reference."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import (
    BLACKWELL as DATA_CENTER,
)
from support.emulated import (
    CONSUMER as DESKTOP,
)
from support.emulated import (
    CPU,
    INPUTS,
    KERNEL_WAIT,
    PASSED,
    WAIT,
    WEIGHT,
    changed,
    check_in_orders,
    poisoned,
    written_late,
)
from support.fp4_activations import exact_activations
from support.host_grids import check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated, check_warp_mmas
from support.kernel_grid import BF16, FP16, FP32, ExpertsCase, WgmmaCase
from support.ptx_faults import ROUTED_CODES, Unfound, check_faults

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.kernels import fp4_experts, fp4_wgmma
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.runtime.arch import ARCHS

U8 = torch.uint8


class Experts(NamedTuple):
    """Launch of the kernels of an FP4 GEMM over experts. ``num_ctas`` is the number of CTAs for a ``WgmmaCase``, and
    the number of SMs for an ``ExpertsCase``."""

    case: ExpertsCase | WgmmaCase
    m: int
    n: int
    experts: int
    width: int
    routing: str
    seed: int | None = 0
    num_ctas: int = 0

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.m}x{self.n}-{self.experts}of{self.width}-{self.routing}"


def routed(routing: str, m: int, experts: int) -> torch.Tensor:
    """Return factors (M, E) that are powers of two, or zero of either sign."""
    alpha = torch.randint(-2, 3, (m, experts)).float().exp2() * torch.randint(0, 2, (m, experts)).sub(0.5).sign()
    if routing == "dense":
        return alpha
    if routing == "one":
        return alpha * (torch.arange(experts) == experts - 1)
    if routing in ("even", "odd"):
        return alpha * (torch.arange(experts) % 2 == ("even", "odd").index(routing))
    keys = torch.rand(m, experts)
    if routing == "hot":
        keys[:, experts // 4] = 2.0  # for each token except one
    chosen = torch.zeros(m, experts).scatter(1, keys.topk(min(2, experts)).indices, 1.0)
    chosen[m // 2] = 0.0
    return alpha * chosen


EXPERTS = [
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 8, 16, BF16), 5, 72, 6, 64, "few", None),
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "8x4", 8, 16, FP32), 20, 136, 5, 320, "few"),
    Experts(ExpertsCase(BF16, NVFP4, "128x4", None, 16, 64, FP32), 40, 200, 3, 512, "dense", 1),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", "128x4", 8, 64, FP16), 33, 72, 9, 128, "hot", 2),
    Experts(ExpertsCase(FP16, NVFP4, "linear", "linear", 24, 32, FP32), 70, 64, 2, 256, "one", 3),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 16, 64, BF16), 3, 8, 33, 128, "few", 4),
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 24, 512, FP32), 30, 72, 3, 768, "dense", 5),
    Experts(ExpertsCase(BF16, NVFP4, "128x4", None, 8, 512, BF16), 20, 64, 7, 320, "few", 6),
    Experts(ExpertsCase(FP16, NVFP4, "linear", "linear", 24, 512, FP32), 30, 72, 3, 512, "few", 2),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", "128x4", 16, 512, BF16), 20, 136, 5, 384, "few", 1),
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 8, 16, FP32, 8), 13, 136, 20, 256, "few", 7, 4),
    Experts(ExpertsCase(BF16, NVFP4, "linear", None, 16, 16, FP32), 12, 72, 5, 512, "dense", 9),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", "8x4", 8, 16, FP32, 8), 20, 72, 30, 128, "one", 10, 5),
    Experts(ExpertsCase(BF16, NVFP4, "128x4", None, 16, 32, FP32, 8), 40, 72, 9, 256, "dense", 8, 6),
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 8, 64, BF16, 8), 9, 64, 11, 320, "few", None, 5),
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 32, 64, FP32), 40, 72, 3, 320, "dense", 11),
    Experts(ExpertsCase(BF16, NVFP4, "linear", None, 32, 128, BF16, 8), 37, 72, 9, 512, "dense", 12, 5),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 16, 16, FP32, a_dtype=FP16), 9, 72, 3, 128, "few", 3),
    # A launch with more experts than the usual lists have room for
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 8, 16, FP32, 8, max_experts=1024), 3, 8, 520, 64, "few", 1, 3),
    # Cases with biases: one warp computes an m tile; several warps divide the k tiles of an m tile; several CTAs divide
    # an n tile.
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 8, 16, BF16, bias_dtype=FP32), 5, 72, 6, 64, "few", None),
    Experts(ExpertsCase(FP16, NVFP4, "linear", "linear", 24, 512, FP32, bias_dtype=FP32), 30, 72, 2, 512, "dense", 2),
    Experts(ExpertsCase(BF16, NVFP4, "128x4", None, 16, 32, BF16, 8, bias_dtype=BF16), 20, 72, 9, 64, "few", 8, 6),
    # Every second expert begins in the middle of a scale tile. A single warp or a warpgroup computes an m tile, with k
    # tiles of 256 or 128 elements. The last k tile of an expert is partial.
    Experts(ExpertsCase(BF16, MXFP4, "128x4", "8x4", 8, 16, FP32), 9, 8, 4, 192, "odd", 2),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 8, 16, BF16, 8, bias_dtype=BF16), 3, 8, 10, 192, "few", 7, 3),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", "128x4", 16, 64, FP16), 9, 72, 5, 320, "odd", 1),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 24, 512, FP32, bias_dtype=FP32), 9, 8, 3, 192, "even", 3),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", "128x4", 16, 512, BF16), 5, 8, 4, 192, "odd", None),
    Experts(WgmmaCase(FP16, NVFP4, "128x4", "8x4", 16, Epilogue(FP32), expert_k=256), 13, 392, 5, 256, "dense", 7, 3),
    Experts(WgmmaCase(BF16, NVFP4, "128x4", None, 32, Epilogue(BF16), expert_k=512), 40, 136, 3, 512, "few", 1, 2),
    Experts(WgmmaCase(BF16, MXFP4, "128x4", "128x4", 64, Epilogue(FP32), expert_k=256), 70, 40, 4, 256, "dense", 2, 1),
    Experts(
        WgmmaCase(FP16, NVFP4, "linear", "linear", 128, Epilogue(FP16), expert_k=512), 20, 136, 2, 512, "one", 3, 4
    ),
]

# Kernels for GPUs without wgmma. The ids do not show the shapes: on sm_120a, two or four warps divide the k of the same
# rows, with k tiles of 128 elements, or of 256 elements with linear scales or few tokens. A range may be a part of a
# block. Experts begin in the middle of a scale tile in the cases of MXFP4 with a width of 192 or 320 elements.
WARPS = [
    Experts(ExpertsCase(FP16, NVFP4, "128x4", "8x4", 16, 16, BF16, arch=DATA_CENTER), 20, 72, 5, 320, "few", 1),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 24, 32, FP16, 8, DATA_CENTER, FP16), 27, 72, 9, 192, "hot", 2, 5),
    Experts(
        ExpertsCase(FP16, NVFP4, "128x4", "128x4", 32, 512, FP32, arch=DATA_CENTER, bias_dtype=FP32),
        *(35, 72, 2, 320, "dense", 3),
    ),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 8, 32, BF16, 8, DESKTOP), 9, 72, 10, 192, "even", 4, 5),
    Experts(ExpertsCase(BF16, NVFP4, "128x4", None, 16, 128, FP32, arch=DESKTOP), 18, 72, 3, 320, "few", 5),
    Experts(ExpertsCase(FP16, NVFP4, "linear", None, 24, 64, FP32, arch=DESKTOP), 25, 40, 2, 256, "dense", 6),
    Experts(ExpertsCase(BF16, MXFP4, "128x4", None, 24, 16, FP32, arch=DESKTOP), 26, 8, 3, 320, "odd", 7),
    Experts(
        ExpertsCase(BF16, MXFP4, "128x4", None, 32, 256, FP16, arch=DESKTOP, bias_dtype=FP32),
        *(33, 72, 2, 192, "dense", 8),
    ),
    Experts(ExpertsCase(BF16, NVFP4, "128x4", None, 32, 256, FP32, arch=DESKTOP), 10, 8, 3, 192, "one", 9),
]

# Kernels for sm_120a whose MMAs multiply the codes of both operands. The ids do not show the shapes: four pipelines, or
# one or two pipelines in which two or four warps divide k, with k tiles of 256 or 128 elements. In the first two cases,
# each pipeline gets more k tiles than stages. The last k tile of an expert is partial in the cases with a width that is
# no multiple of 128. Experts begin in the middle of a scale tile in the cases of MXFP4 with a width of 192 or 320.
CODES = [
    Experts(ExpertsCase(U8, NVFP4, "128x4", "128x4", 8, 16, BF16, arch=DESKTOP), 13, 136, 7, 832, "few", 1),
    Experts(
        ExpertsCase(U8, MXFP4, "128x4", "8x4", 16, 16, FP16, 8, DESKTOP, bias_dtype=FP32), 20, 72, 30, 448, "hot", 4, 5
    ),
    Experts(ExpertsCase(U8, NVFP4, "linear", "linear", 8, 16, FP32, 8, DESKTOP), 13, 136, 20, 256, "few", 7, 4),
    Experts(ExpertsCase(U8, NVFP4, "linear", "linear", 24, 64, FP32, arch=DESKTOP), 25, 40, 2, 512, "dense", 6),
    Experts(ExpertsCase(U8, MXFP4, "128x4", "128x4", 24, 16, FP32, arch=DESKTOP), 26, 8, 3, 320, "odd", 7),
    Experts(ExpertsCase(U8, MXFP4, "128x4", "128x4", 32, 128, BF16, arch=DESKTOP), 130, 72, 4, 320, "hot", 2),
    Experts(ExpertsCase(U8, NVFP4, "128x4", "128x4", 16, 128, FP16, 8, DESKTOP), 100, 72, 9, 384, "few", 3, 5),
    Experts(ExpertsCase(U8, NVFP4, "128x4", "128x4", 8, 256, FP32, 8, DESKTOP), 40, 72, 9, 320, "few", 10, 4),
    Experts(ExpertsCase(U8, NVFP4, "linear", "linear", 16, 256, BF16, arch=DESKTOP), 30, 72, 3, 768, "few", 11),
    Experts(
        ExpertsCase(U8, MXFP4, "128x4", "8x4", 32, 256, FP16, arch=DESKTOP, bias_dtype=FP32),
        *(33, 72, 2, 192, "dense", 8),
    ),
    Experts(ExpertsCase(U8, NVFP4, "128x4", "8x4", 32, 256, FP32, arch=DESKTOP), 10, 8, 3, 192, "one", 9),
    Experts(
        ExpertsCase(U8, MXFP4, "128x4", "128x4", 8, 256, FP32, arch=DESKTOP, max_experts=1024),
        *(3, 8, 520, 64, "few", None),
    ),
]
EVERY = (*EXPERTS, *WARPS, *CODES)


def kernel_for(one: Experts) -> Any:
    """Return the kernel of the GEMM."""
    return one.case.kernel_for(one.width) if isinstance(one.case, ExpertsCase) else one.case.kernel


def poison_scales(scale: torch.Tensor, fmt: FP4Format, layout: str, counts: torch.Tensor, width: int) -> None:
    """Set an operand's scales to NaN for the experts that a row does not need. ``counts`` (rows, experts) is True for
    needed experts."""
    blocks = (~counts).repeat_interleave(width // fmt.block_size, 1).to(torch.uint8)
    scale.view(torch.uint8)[from_linear(blocks, SCALE_LAYOUTS[layout]).bool()] = 0xFF if fmt == MXFP4 else 0x7F


def multiply_experts(one: Experts, edit: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; return their result and the reference's result.

    Operands that a factor of zero excludes are NaN: activations, and the weights and biases of experts without a token.
    A simulated previous kernel writes the operands at the last moment, and the first kernel writes the lists of tokens.
    """
    torch.manual_seed(one.n)
    case, k = one.case, one.experts * one.width
    by_warpgroups = isinstance(case, WgmmaCase)
    kernel = kernel_for(one)
    alpha = routed(one.routing, one.m, one.experts)
    a, a_scale = exact_activations(case, one.m, k)
    if case.a_layout is None:
        a.view(one.m, one.experts, -1)[alpha == 0] = torch.nan
    b, scale = random_matrix(one.n, k, case.format, case.layout, CPU, POWERS[case.format.scale_format])
    scale = scale.view(case.format.scale_dtype)
    if not by_warpgroups:
        if a_scale is not None:
            poison_scales(a_scale, case.format, case.a_layout, alpha != 0, one.width)
        poison_scales(scale, case.format, case.layout, (alpha != 0).any(0).expand(one.n, -1), one.width)
    out_dtype = case.epilogue.out_dtype if by_warpgroups else case.out_dtype
    out = poisoned(one.m, one.n, dtype=out_dtype)
    shares = by_warpgroups and one.num_ctas > -(-one.n // 256)
    factors, bias = alpha.t().contiguous().t(), None
    given: tuple[Any, ...]
    if by_warpgroups:
        size = -(-one.m // case.tile_m) * kernel.config.workspace_bytes(k, one.num_ctas, has_partial_sums=shares)
        workspace = poisoned(size, dtype=torch.uint8)
        shared = None, one.num_ctas, int(shares)
        given = fp4_wgmma.Arguments(a, a_scale, b.t(), scale, factors, None, None, out, workspace, *shared)
    else:
        bias_dtype = kernel.config.bias_dtype
        if bias_dtype is not None:
            bias = torch.randint(-50, 51, (one.experts, one.n)).to(bias_dtype)
            bias[(alpha == 0).all(0)] = torch.nan
        num_ctas = kernel.config.num_ctas(one.n, one.num_ctas)
        workspace = poisoned(kernel.config.workspace_bytes(one.m, one.experts, num_ctas), dtype=torch.uint8)
        given = fp4_experts.Arguments(a, a_scale, b.t(), scale, factors, bias, out, workspace, num_ctas)
    given, before = written_late(given, (*WEIGHT, *INPUTS))
    # Kernels in which a single warp decodes and multiplies are checked less strictly.
    strict = by_warpgroups or not kernel.config.by_warp or kernel.config.operands.by_codes
    run_kernel(kernel, ARCHS[case.arch], *given, seed=one.seed, strict=strict, edit=edit, written_before=before)
    layouts = None if case.a_layout is None else SCALE_LAYOUTS[case.a_layout], SCALE_LAYOUTS[case.layout]
    numbers = a if a_scale is not None else a.to(case.dtype)
    return out, expert_gemm(numbers, a_scale, b, scale, alpha, bias, out_dtype, case.format, *layouts)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in EVERY])
def test_gemm_over_experts(one: Experts) -> None:
    """Use operands whose sums are exact, with NaN wherever a factor of zero excludes them. Check that the results equal
    the reference's bit for bit."""
    got, want = multiply_experts(one)
    assert torch.equal(got, want)


# First a kernel whose CTAs copy weights before the lists are complete, and share n tiles; then a kernel whose CTAs do
# neither; then a wgmma kernel that copies weights before its factors are ready. The other kernels differ in size.
AWAITED = [EXPERTS[10], EXPERTS[7], EXPERTS[-4]]
MORE_AWAITED = [EXPERTS[i] for i in (0, 1, 3, 19, 21, -3, -2)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "awaited" in metafunc.fixturenames:
        some = AWAITED + (MORE_AWAITED if metafunc.config.getoption("more_emulated") else [])
        metafunc.parametrize("awaited", [pytest.param(one, id=one.id) for one in some])


def test_experts_wait_for_the_previous_kernel(awaited: Experts) -> None:
    """Check that each wait for a previous kernel is needed: the wait of the first kernel, and the waits of the GEMM's
    producer and consumer warps, or of all its threads."""
    kernel, arch = kernel_for(awaited), awaited.case.arch
    waits = range(len(re.findall(KERNEL_WAIT, compile_ptx(kernel, ARCHS[arch]).ptx)))
    assert len(waits) == (3 if isinstance(awaited.case, WgmmaCase) or kernel.config.scans else 2)
    for number in waits:
        with pytest.raises((EmulationError, AssertionError)):
            got, want = multiply_experts(awaited, changed(KERNEL_WAIT, number))
            assert torch.equal(got, want)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in EVERY])
def test_compiles_without_spills(one: Experts) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(one.case, kernel_for(one))


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in (*WARPS, *CODES)])
def test_warps_read_a_weight_once(one: Experts) -> None:
    """Check that a kernel for GPUs without wgmma contains one mma.sync per eight tokens of an m tile and 16 elements of
    k, or 64 elements if codes are multiplied, also if several warps divide k."""
    config = kernel_for(one).config
    loops = 2 if config.classes > 1 else 1
    copies = loops, loops * config.expert_k_tiles
    check_warp_mmas(kernel_for(one), one.case.arch, config.k_tile // config.k_warps, copies)


@pytest.mark.parametrize("case", [pytest.param(one.case, id=one.case.id) for one in (EXPERTS[1], EXPERTS[-2])])
def test_nothing_is_launched_on_overlap(case: ExpertsCase | WgmmaCase) -> None:
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


# Each of four pipelines gets more k tiles than it has stages. The kernel waits for an empty stage (in two places,
# because an m tile consists of two k tiles and their loop is unrolled), for a full stage, and for the previous m tile's
# accumulators. A warp synchronises after finding m tiles, after reading a k tile, after reading an m tile, and after
# adding to the accumulators.
M_TILES = Experts(ExpertsCase(FP16, NVFP4, "128x4", "128x4", 16, 16, FP32), 13, 64, 10, 320, "dense")
FACTORS = Experts(
    WgmmaCase(FP16, NVFP4, "128x4", "8x4", 16, Epilogue(FP32), expert_k=256), 13, 136, 8, 256, "dense", 0, 1
)


@pytest.mark.parametrize(
    ("one", "edit"),
    [
        pytest.param(M_TILES, changed(WAIT, 0, PASSED), id="stage empty for an m tile"),
        pytest.param(M_TILES, changed(WAIT, 2, PASSED), id="m tile full"),
        pytest.param(M_TILES, changed(WAIT, 3, PASSED), id="previous accumulators added"),
        pytest.param(M_TILES, changed(r"bar\.warp\.sync", 1), id="k tile of an m tile read"),
        pytest.param(M_TILES, changed(r"bar\.warp\.sync", 2), id="m tile read"),
        pytest.param(M_TILES, changed(r"bar\.warp\.sync", 3), id="accumulators added"),
        pytest.param(M_TILES, changed(r"fence\.proxy\.async", 2), id="tokens of an m tile loaded"),
        pytest.param(M_TILES, changed(r"wgmma\.wait_group\.sync\.aligned\s+1", None), id="MMAs of a k tile done"),
        pytest.param(M_TILES, changed(r"wgmma\.wait_group\.sync\.aligned\s+0"), id="MMAs of an m tile done"),
        pytest.param(FACTORS, changed(WAIT, 3, PASSED), id="factors full"),
        pytest.param(FACTORS, changed(r"bar\.warp\.sync", 0), id="codes read before release with factors"),
        pytest.param(FACTORS, changed(r"bar\.warp\.sync", 1), id="factors read"),
        pytest.param(FACTORS, changed(r"fence\.proxy\.async"), id="factors loaded"),
    ],
)
def test_synchronisation_of_a_gemm_over_experts_is_needed(one: Experts, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of events, if ``edit`` removes a wait,
    fence or barrier."""
    with pytest.raises((EmulationError, AssertionError)):
        check_in_orders(multiply_experts, one, 6, edit)


@pytest.mark.parametrize("one", [M_TILES, FACTORS, WARPS[4], CODES[0], CODES[3], CODES[9]])
def test_synchronisation_of_a_gemm_over_experts_is_enough(one: Experts) -> None:
    check_in_orders(multiply_experts, one, 2)


# Kernels that multiply codes. In the first, each of four pipelines gets several m tiles, and more k tiles than stages.
# In the second, two warps divide the k of one pipeline.
FAULTY = {
    "pipelines": Experts(ExpertsCase(U8, NVFP4, "128x4", "128x4", 8, 16, FP32, arch=DESKTOP), 5, 8, 9, 832, "dense"),
    "one pipeline": CODES[9],
}
ONCE = Unfound(1, "the emulator's warps converge before they list m tiles", dead=False)
BEYOND = Unfound(1, "the last MMA multiplies elements beyond the expert's width, which are zero")
FENCE = Unfound(1, "emulated copies do not overtake the stores that clear the stages", dead=False)
UNFOUND: dict[str, dict[str, Unfound]] = {
    "pipelines": {
        "barrier of the warp left out": ONCE,
        "proxy fence left out": FENCE,
        "accumulators of nothing": Unfound(1, "the first MMA begins with zeros"),
        "scales exchanged": BEYOND,
        "weight's scales of other blocks": BEYOND,
        "activations' scales of other blocks": BEYOND,
        "matrices from 16 bytes on": BEYOND,
    },
    "one pipeline": {
        "barrier of the warp left out": ONCE,
        "proxy fence left out": FENCE,
        "bulk copy from the next tile": Unfound(1, "the pairs of an m tile are read only with its last k tile"),
        "accumulators of nothing": Unfound(4, "the first MMA of eight tokens begins with zeros"),
    },
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found_where_codes_are_multiplied(name: str, request: pytest.FixtureRequest) -> None:
    """Check that the emulator finds omitted or altered copies, waits, arrivals, fences, loads and MMAs in kernels that
    multiply FP4 codes."""
    one = FAULTY[name]

    def run(seed: int | None, edit: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return multiply_experts(one._replace(seed=seed), edit)

    check_faults(run, kernel_for(one), one.case.arch, UNFOUND[name], request, kinds=ROUTED_CODES, least=25)
