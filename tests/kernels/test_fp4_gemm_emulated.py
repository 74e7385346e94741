"""Kernels of FP4 GEMMs without experts, executed in the PTX emulator and compared with the CPU references."""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import (
    ACQUIRE,
    BLACKWELL,
    CONSUMER,
    CPU,
    HOPPER,
    INPUTS,
    PASSED,
    WAIT,
    WEIGHT,
    changed,
    check_in_orders,
    check_prefetched,
    equal,
    is_static,
    poisoned,
    to_prefetch,
    written_late,
)
from support.epilogues import finished, operands, row_scales
from support.fp4_activations import exact_activations
from support.host_grids import check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, MmaCase, WgmmaCase
from support.ptx_faults import BLOCK_SCALED_MMA, Unfound, check_faults

from ptx_emulator import EmulationError
from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.kernels import activation_tiles, fp4_mma, fp4_wgmma
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

fp4_dequantize = OPS["fp4_dequantize"].reference


class Mma(NamedTuple):
    """Launch of an FP4 GEMM by mma.sync.

    Attributes:
        case: the kernel.
        sizes: M, N and K.
        seed: seed of the order of threads, or None for the order of their indices.
    """

    case: MmaCase
    sizes: tuple[int, int, int]
    seed: int | None

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'x'.join(map(str, self.sizes))}"


def mma(
    *operands: Any,
    epilogue: tuple[Any, ...],
    sizes: tuple[int, int, int],
    seed: Any,
    arch: str = HOPPER,
    a_layout: str | None = None,
) -> Any:
    """Return a launch as a pytest parameter. ``operands`` are the dtype, format, layout, tile_m and split_k."""
    one = Mma(MmaCase(*operands, Epilogue(*epilogue), arch, a_layout=a_layout), sizes, seed)
    return pytest.param(one, id=one.id)


MMAS = [
    # Launches with whole tiles, with partial tiles along M, N and K, and with fewer k tiles than CTAs
    mma(FP16, NVFP4, "128x4", 8, 1, epilogue=(FP32,), sizes=(8, 128, 256), seed=0),
    mma(BF16, NVFP4, "128x4", 8, 1, epilogue=(BF16, "one"), sizes=(5, 136, 544), seed=1),
    mma(BF16, MXFP4, "128x4", 16, 1, epilogue=(FP16, "one", FP32), sizes=(19, 72, 288), seed=2),
    mma(FP16, NVFP4, "linear", 16, 2, epilogue=(BF16, "column", BF16), sizes=(11, 200, 832), seed=0),
    mma(BF16, NVFP4, "linear", 32, 2, epilogue=(FP32, "column", FP32), sizes=(33, 64, 1600), seed=1),
    mma(BF16, MXFP4, "linear", 8, 4, epilogue=(BF16, None, FP32), sizes=(3, 8, 384), seed=0),
    mma(FP16, NVFP4, "128x4", 64, 2, epilogue=(FP32, "column"), sizes=(65, 24, 800), seed=None),
    mma(BF16, NVFP4, "128x4", 16, 8, epilogue=(FP32,), sizes=(16, 40, 2080), seed=3, arch=BLACKWELL),
    mma(FP16, NVFP4, "128x4", 8, 3, epilogue=(FP16, None, FP16), sizes=(9, 136, 512), seed=1),
]


def native(fmt: FP4Format, a_layout: str, *rest: Any, **kwargs: Any) -> Any:
    """Return a launch with FP4 activations whose codes are multiplied without decoding."""
    layout = weight_layout(SCALE_LAYOUTS[a_layout]).name
    return mma(torch.uint8, fmt, layout, *rest, arch=CONSUMER, a_layout=a_layout, **kwargs)


# Launches with whole tiles, partial tiles along M, N and K, more k tiles than stages, and several 8x4 tiles
NATIVE_MMAS = [
    native(NVFP4, "128x4", 8, 1, epilogue=(FP32,), sizes=(8, 128, 256), seed=None),
    native(NVFP4, "128x4", 16, 2, epilogue=(BF16, "one", FP32), sizes=(21, 200, 544), seed=0),
    native(NVFP4, "128x4", 64, 1, epilogue=(FP32, "column"), sizes=(140, 136, 1888), seed=1),
    native(NVFP4, "linear", 32, 1, epilogue=(FP16, None, FP16), sizes=(37, 72, 320), seed=2),
    native(NVFP4, "8x4", 16, 3, epilogue=(FP32, "one"), sizes=(27, 264, 1056), seed=3),
    native(MXFP4, "128x4", 32, 1, epilogue=(BF16, "column", FP32), sizes=(70, 136, 608), seed=0),
    native(MXFP4, "128x4", 8, 1, epilogue=(FP32,), sizes=(9, 128, 2080), seed=1),
    native(MXFP4, "linear", 16, 2, epilogue=(FP32, "one"), sizes=(19, 200, 640), seed=2),
]


# Launches whose epilogue multiplies each row by a scale, before alpha
ROW_SCALED_MMAS = [
    mma(FP16, NVFP4, "128x4", 8, 1, epilogue=(FP32, None, None, True), sizes=(5, 136, 544), seed=0),
    mma(FP16, NVFP4, "linear", 16, 2, epilogue=(BF16, "column", BF16, True), sizes=(19, 200, 832), seed=1),
    mma(BF16, MXFP4, "128x4", 32, 1, epilogue=(FP16, "one", FP32, True), sizes=(37, 72, 288), seed=2, arch=BLACKWELL),
    native(NVFP4, "128x4", 16, 2, epilogue=(FP32, "one", FP32, True), sizes=(21, 200, 544), seed=0),
    native(NVFP4, "linear", 64, 1, epilogue=(BF16, "column", None, True), sizes=(70, 72, 320), seed=1),
    native(MXFP4, "8x4", 8, 1, epilogue=(FP32, None, None, True), sizes=(9, 136, 608), seed=2),
]


def multiply(one: Mma, edit: Any = None, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result.

    With a seed, a simulated previous kernel writes the operands at the last moment. If ``exact``, all sums are exact.
    """
    m, n, k = one.sizes
    torch.manual_seed(k)
    case, arch = one.case, ARCHS[one.case.arch]
    scales = POWERS[case.format.scale_format] if exact else None
    a_layout, a_scale = None, None
    if case.a_layout is not None:
        a, a_scale = random_matrix(m, k, case.format, case.a_layout, CPU, scales)
        a_layout, a_scale = SCALE_LAYOUTS[case.a_layout], a_scale.view(case.format.scale_dtype)
    else:
        a = torch.randint(-8, 9, (m, k)) if exact else torch.randn(m, k)
        a = a.to(case.dtype)
    b, scale = random_matrix(n, k, case.format, case.layout, CPU, scales)
    scale = scale.view(case.format.scale_dtype)
    alpha, bias = operands(case.epilogue, n)
    row_scale = row_scales(case.epilogue, m)
    out = poisoned(m, n, dtype=case.epilogue.out_dtype)
    given = fp4_mma.Arguments(a, a_scale, b.t(), scale, alpha, bias, row_scale, out)
    given, before = written_late(given, (*WEIGHT, *INPUTS)) if one.seed is not None else (given, None)
    strict = case.a_layout is not None
    run_kernel(case.kernel, arch, *given, seed=one.seed, strict=strict, edit=edit, written_before=before)
    sums = fp4_gemm(a, a_scale, b, scale, None, None, FP32, case.format, a_layout, SCALE_LAYOUTS[case.layout])
    return out, finished(sums, case.epilogue, alpha, bias, row_scale=row_scale)


@pytest.mark.parametrize("one", [*MMAS, *NATIVE_MMAS, *ROW_SCALED_MMAS])
def test_gemm(one: Mma) -> None:
    """Use inputs whose sums are exact, and check that the results equal the reference's bit for bit. Scales beyond the
    matrix are NaN, and alpha and bias end after N elements.

    Kernels whose MMAs take FP4 codes directly run in two orders of threads, because they never ran on a GPU.
    """
    for seed in (one.seed,) if one.case.a_layout is None else (one.seed, 5):
        got, want = multiply(one._replace(seed=seed), exact=True)
        assert torch.equal(got, want), seed


UNFOUND = {"copies not waited for": Unfound(1, "after the last k tile, when no copies are left")}


def test_faults_are_found_where_codes_are_multiplied(request: pytest.FixtureRequest) -> None:
    """Check that the emulator finds missing or altered copies, waits, barriers, loads and block-scaled MMAs in kernels
    that multiply FP4 codes.

    K is divided between two CTAs, and each pipeline gets more k tiles than stages.
    """
    (one,) = native(NVFP4, "128x4", 16, 2, epilogue=(FP32, "one"), sizes=(16, 128, 2112), seed=0).values

    def run(seed: int | None, edit: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return multiply(one._replace(seed=seed), edit, exact=True)

    check_faults(run, one.case.kernel, CONSUMER, UNFOUND, request, kinds=BLOCK_SCALED_MMA, least=13)


@pytest.mark.parametrize("one", MMAS[:3])
def test_gemm_of_any_numbers(one: Mma) -> None:
    """Check that results of random numbers are close to the reference's."""
    got, want = multiply(one)
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * torch.finfo(want.dtype).eps, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "fmt"), [(FP16, NVFP4), (BF16, NVFP4), (BF16, MXFP4)], ids=["fp16-nvfp4", "bf16-nvfp4", "bf16-mxfp4"]
)
def test_gemm_decodes_every_scale(dtype: torch.dtype, fmt: FP4Format) -> None:
    """Multiply unit vectors, which must return the columns of the weight: every code with every scale, including
    NaN."""
    k, n = 256, 256
    blocks = k // fmt.block_size
    codes = torch.arange(16, dtype=torch.uint8).repeat(n, k // 16)
    b = codes[:, ::2] | codes[:, 1::2] << 4
    scale = torch.arange(n, dtype=torch.uint8)[:, None].expand(n, blocks).contiguous()
    out = poisoned(16, n, dtype=FP32)
    case = MmaCase(dtype, fmt, "linear", 16, 1, Epilogue(FP32), HOPPER)
    scale = scale.view(fmt.scale_dtype)
    given = fp4_mma.Arguments(torch.eye(k)[:16].to(dtype), None, b.t(), scale, None, None, None, out)
    run_kernel(case.kernel, ARCHS[HOPPER], *given, seed=0)
    want = fp4_dequantize(b, scale, block_size=fmt.block_size, scale_layout="linear", out_dtype=FP32)[:, :16].t()
    # A NaN makes a whole sum NaN. So does infinity times zero, which occurs if 6 times the scale exceeds float32's
    # largest number.
    usable = ~want.isnan().any(0) & (scale[:, 0].view(torch.uint8) < 253 if fmt == MXFP4 else True)
    assert out[:, ~usable].isnan().all() and (~usable).sum() == (3 if fmt == MXFP4 else 2)
    # The kernel's sums are never negative zero: + 0.0 turns -0 into +0.
    equal("results", out[:, usable], want[:, usable] + 0.0)


@pytest.mark.parametrize(("by_warp", "k_tile"), [(False, 256), (False, 128), (True, 256), (True, 128)])
@pytest.mark.parametrize(("m", "k"), [(1, 256), (3, 96), (11, 544), (24, 1024)])
@pytest.mark.parametrize(
    ("a_dtype", "dtype", "fmt", "a_layout"),
    [
        (BF16, BF16, NVFP4, None),
        (FP16, FP16, NVFP4, None),
        (FP16, BF16, MXFP4, None),
        (torch.uint8, FP16, NVFP4, "128x4"),
        (torch.uint8, FP16, NVFP4, "linear"),
        (torch.uint8, BF16, MXFP4, "8x4"),
        (torch.uint8, BF16, MXFP4, "linear"),
    ],
)
def test_activation_tiles(
    a_dtype: torch.dtype,
    dtype: torch.dtype,
    fmt: FP4Format,
    a_layout: str | None,
    m: int,
    k: int,
    by_warp: bool,
    k_tile: int,
) -> None:
    """Check that each activation is stored where the MMA expects it, in the order in which lanes decode the weight's
    codes."""
    groups, k_tiles, k_groups = -(-m // 8) + 1, -(-k // k_tile), k_tile // 32
    tiles, flags = poisoned(k_tiles * groups * 16 * k_tile, dtype=torch.uint8), poisoned(5, dtype=torch.int32)
    if a_layout is None:
        # The numbers include float16's largest and smallest. Ties are rounded to even bfloat16 numbers.
        a, scale = (torch.randn(m, k) * 2.0 ** torch.randint(-24, 14, (m, k))).to(a_dtype), None
        numbers = a.to(dtype).float()
    else:
        a, scale = random_matrix(m, k, fmt, a_layout, CPU, POWERS[fmt.scale_format])
        scale = scale.view(fmt.scale_dtype)
        numbers = fp4_dequantize(a, scale, block_size=fmt.block_size, scale_layout=a_layout, out_dtype=FP32)
        numbers *= 2.0**-8 if fmt == NVFP4 else 1.0
    layout = None if a_layout is None else SCALE_LAYOUTS[a_layout]
    config = activation_tiles.Config(a_dtype, dtype, fmt, layout, by_warp, k_tile, True)
    assert config.reason_unsupported() is None
    kernel = activation_tiles.ActivationTilesKernel(config)
    run_kernel(kernel, ARCHS[HOPPER], a, scale, tiles, flags, None, None, seed=0)
    assert not flags.any()
    numbers = torch.nn.functional.pad(numbers, (0, k_tiles * k_tile - k))
    # Dimensions if ``by_warp``: (k tile, group, token, k group, quarter, element). Dimensions otherwise: (k tile, 64
    # positions, group, token, 16-byte chunk, element).
    shape = (k_tiles, groups, 8, k_groups, 4, 8) if by_warp else (k_tiles, k_groups // 2, groups, 8, 8, 8)
    got = tiles.view(dtype).view(shape)
    # Elements that share a word: (0, 2), (1, 3), ... in float16, (0, 4), (1, 5), ... in bfloat16.
    pairs = [(0, 2), (1, 3), (4, 6), (5, 7)] if dtype == FP16 else [(0, 4), (1, 5), (2, 6), (3, 7)]
    for token in range(m):
        for step in range(2 * k_groups):
            for position in range(16):
                high, quad, e = position // 8, position % 8 // 2, position % 2
                element = quad * (k_tile // 4) + step // 2 * 8 + pairs[step % 2 * 2 + high][e]
                if by_warp:
                    at = step % 2 * 4 + high * 2 + e
                    found = got[:, token // 8, token % 8, step // 2 ^ token % 2, quad, at]
                else:
                    place = (step % 4 * 2 + high) ^ (token % 8)
                    found = got[:, step // 4, token // 8, token % 8, place, position % 8]
                assert torch.equal(found.float(), numbers[token, element::k_tile]), (token, step, position)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda: changed(r"cp\.async\.wait_group"), id="k tile arrived"),
        pytest.param(lambda: changed(r"bar\.sync\s+0", 0), id="k tile visible to all"),
        pytest.param(lambda: changed(r"bar\.sync\s+0", 1), id="stages read before partial sums"),
        pytest.param(lambda: changed(r"barrier\.cluster\.wait", 0), id="partial sums complete"),
    ],
)
@pytest.mark.parametrize("codes", [False, True], ids=["decoded", "codes"])
def test_each_wait_is_needed(edit: Any, codes: bool) -> None:
    """Check that the emulator finds a race if ``edit`` removes a wait. Partial sums overwrite the last k tile in shared
    memory."""
    one = Mma(MmaCase(FP16, NVFP4, "128x4", 8, 2, Epilogue(FP32), HOPPER), (8, 128, 3584), 0)
    if codes:
        case = MmaCase(torch.uint8, NVFP4, "128x4", 8, 2, Epilogue(FP32), CONSUMER, a_layout="128x4")
        one = Mma(case, (8, 128, 3072), 0)
    with pytest.raises(EmulationError):
        multiply(one, edit())


# GEMMs by warpgroups


class Wgmma(NamedTuple):
    """Launch of an FP4 GEMM by wgmma.

    Attributes:
        case: the kernel.
        sizes: M, N and K.
        num_ctas: number of CTAs per m tile, or 0 with clusters.
        has_partial_sums: True if the CTAs exchange partial sums.
        seed: seed of the order of threads, or None for the order of their indices.
    """

    case: WgmmaCase
    sizes: tuple[int, int, int]
    num_ctas: int
    has_partial_sums: bool
    seed: int | None

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'x'.join(map(str, self.sizes))}-{self.num_ctas or self.case.split_k}"


def wgmma(
    *operands: Any,
    epilogue: tuple[Any, ...],
    sizes: tuple[int, int, int],
    split_k: int = 0,
    num_ctas: int = 0,
    has_partial_sums: bool = False,
    seed: Any = 0,
    a_dtype: Any = None,
    tile_n: int | None = None,
    prologue_gate: Gate | None = None,
    prefetches: bool = False,
) -> Any:
    """Return a launch as a pytest parameter.

    ``operands`` are dtype, format, layouts of the weight and the activations, and tile_m. Other arguments are fields of
    ``WgmmaCase`` and ``Wgmma``.
    """
    case = WgmmaCase(
        *operands,
        Epilogue(*epilogue),
        split_k,
        a_dtype=a_dtype,
        tile_n=tile_n,
        prologue_gate=prologue_gate,
        prefetches=prefetches,
    )
    one = Wgmma(case, sizes, num_ctas, has_partial_sums, seed)
    return pytest.param(one, id=one.id)


# Launches with partial tiles along M, N and K, CTAs that compute parts of several tiles, and more k tiles than stages
WGMMAS = [
    wgmma(FP16, NVFP4, "128x4", None, 8, epilogue=(FP32, "one"), sizes=(3, 264, 544), num_ctas=2, seed=None),
    wgmma(BF16, MXFP4, "128x4", None, 16, epilogue=(BF16, "column", FP32), sizes=(5, 40, 288), num_ctas=1),
    wgmma(
        FP16,
        NVFP4,
        "128x4",
        "8x4",
        8,
        epilogue=(FP32, "one", FP32),
        sizes=(9, 504, 1088),
        num_ctas=4,
        has_partial_sums=True,
    ),
    wgmma(
        *(FP16, NVFP4, "linear", None, 16),
        epilogue=(FP16, "one"),
        sizes=(9, 520, 512),
        num_ctas=3,
        has_partial_sums=True,
        seed=3,
    ),
    wgmma(
        *(BF16, NVFP4, "128x4", None, 64),
        epilogue=(FP32, "column", FP32),
        sizes=(70, 136, 800),
        num_ctas=2,
        has_partial_sums=True,
        seed=1,
    ),
    wgmma(BF16, MXFP4, "128x4", "128x4", 128, epilogue=(BF16, None, BF16), sizes=(130, 136, 544), num_ctas=2, seed=2),
    wgmma(FP16, NVFP4, "linear", "linear", 256, epilogue=(FP32,), sizes=(20, 136, 256), num_ctas=2, seed=None),
    wgmma(FP16, NVFP4, "128x4", "8x4", 8, epilogue=(BF16, "one", BF16), sizes=(3, 264, 2592), split_k=1),
    wgmma(BF16, NVFP4, "128x4", None, 32, epilogue=(FP32, "column", FP32), sizes=(40, 136, 800), split_k=2, seed=1),
    wgmma(BF16, MXFP4, "128x4", "128x4", 16, epilogue=(FP16, None, FP16), sizes=(9, 296, 1088), split_k=5, seed=2),
    wgmma(BF16, NVFP4, "linear", None, 64, epilogue=(BF16,), sizes=(70, 264, 768), split_k=3, seed=3),
    wgmma(BF16, MXFP4, "128x4", "128x4", 128, epilogue=(FP16, "column"), sizes=(30, 136, 800), split_k=3, seed=5),
    # Launches with tiles that begin in the middle of a scale tile (the last tile is partial), with warps that divide k
    # tiles, and with more k tiles than stages
    wgmma(FP16, NVFP4, "128x4", "8x4", 8, epilogue=(FP32, "column"), sizes=(3, 520, 800), split_k=2, tile_n=224),
    wgmma(
        BF16, MXFP4, "128x4", None, 8, epilogue=(BF16, None, BF16), sizes=(9, 328, 2080), split_k=1, tile_n=160, seed=1
    ),
    wgmma(
        FP16, NVFP4, "128x4", None, 8, epilogue=(BF16, "one"), sizes=(8, 424, 2336), split_k=1, tile_n=208, seed=None
    ),
    wgmma(FP16, NVFP4, "linear", None, 8, epilogue=(FP16, "one"), sizes=(5, 200, 512), split_k=1, tile_n=192, seed=2),
    # Launches in which copies of k tiles arrive out of order, for three times as many k tiles as stages. A warp
    # multiplies every second or fourth k tile.
    *(
        wgmma(
            FP16,
            NVFP4,
            "128x4",
            "128x4",
            8,
            epilogue=(FP32,),
            sizes=(2, tile_n, k),
            split_k=1,
            tile_n=tile_n,
            seed=seed,
        )
        for tile_n, k in ((224, 3840), (208, 4608))
        for seed in (4, 5)
    ),
    wgmma(BF16, NVFP4, "128x4", "128x4", 16, epilogue=(FP32,), sizes=(9, 400, 544), split_k=3, tile_n=192, seed=3),
    # Launches with tiles of one row: three kinds of activations, warps that divide k tiles, more k tiles than stages,
    # and clusters
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(BF16, "one"), sizes=(1, 264, 2080), split_k=1),
    wgmma(FP16, NVFP4, "linear", None, 1, epilogue=(FP32, "column", FP32), sizes=(2, 200, 768), split_k=3, seed=None),
    wgmma(FP16, NVFP4, "128x4", "8x4", 1, epilogue=(BF16, "one", BF16), sizes=(3, 520, 1568), split_k=2, seed=1),
    wgmma(FP16, NVFP4, "128x4", "128x4", 1, epilogue=(FP32,), sizes=(1, 224, 3840), split_k=1, tile_n=224, seed=4),
    wgmma(FP16, NVFP4, "128x4", "128x4", 1, epilogue=(FP32,), sizes=(1, 256, 3840), split_k=1, seed=4),
    wgmma(
        BF16,
        NVFP4,
        "linear",
        "linear",
        1,
        epilogue=(FP16, "one"),
        sizes=(2, 392, 1536),
        split_k=3,
        tile_n=192,
        seed=None,
    ),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(FP32,), sizes=(1, 208, 4608), split_k=1, tile_n=208, seed=5),
    wgmma(BF16, NVFP4, "linear", None, 1, epilogue=(FP16,), sizes=(1, 328, 512), split_k=2, tile_n=160, seed=2),
    # Launches with float16 activations that are rounded to bfloat16, by the kernel before the GEMM or by the GEMM's
    # CTAs
    wgmma(BF16, MXFP4, "128x4", None, 16, epilogue=(FP32,), sizes=(5, 40, 288), num_ctas=1, a_dtype=FP16),
    wgmma(BF16, MXFP4, "128x4", None, 8, epilogue=(FP16, "one"), sizes=(3, 136, 544), split_k=2, a_dtype=FP16),
    # Two launches that prefetch. Then launches with a gate as prologue: the GEMM's CTAs gate tiles of one row and of
    # eight rows (with a partial last k tile and more k tiles than stages), and tiles of more rows; or the kernel before
    # the GEMM gates the rows.
    wgmma(FP16, NVFP4, "128x4", "linear", 1, epilogue=(FP32,), sizes=(1, 264, 2080), split_k=2, prefetches=True),
    wgmma(BF16, NVFP4, "128x4", None, 8, epilogue=(FP32,), sizes=(9, 264, 2080), split_k=1, seed=1, prefetches=True),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(BF16, "one"), sizes=(1, 264, 2080), split_k=1, prologue_gate="silu"),
    wgmma(
        FP16,
        NVFP4,
        "linear",
        None,
        1,
        epilogue=(FP32,),
        sizes=(2, 200, 768),
        split_k=3,
        seed=None,
        prologue_gate="silu",
    ),
    wgmma(
        BF16,
        NVFP4,
        "128x4",
        None,
        1,
        epilogue=(FP16,),
        sizes=(1, 208, 4640),
        split_k=2,
        tile_n=208,
        seed=5,
        prologue_gate="silu",
    ),
    wgmma(
        BF16,
        NVFP4,
        "128x4",
        None,
        8,
        epilogue=(BF16, "one"),
        sizes=(9, 264, 2080),
        split_k=1,
        seed=1,
        prologue_gate="silu",
    ),
    wgmma(
        FP16,
        NVFP4,
        "128x4",
        None,
        8,
        epilogue=(FP32,),
        sizes=(8, 424, 2336),
        split_k=2,
        tile_n=208,
        prologue_gate="silu",
    ),
    wgmma(
        BF16,
        MXFP4,
        "128x4",
        None,
        8,
        epilogue=(FP32,),
        sizes=(3, 136, 544),
        split_k=2,
        a_dtype=FP16,
        prologue_gate="silu",
    ),
    wgmma(
        BF16, MXFP4, "128x4", None, 16, epilogue=(BF16, "one"), sizes=(9, 296, 1088), split_k=5, prologue_gate="silu"
    ),
    wgmma(
        BF16, NVFP4, "128x4", None, 32, epilogue=(FP32,), sizes=(40, 136, 800), split_k=2, seed=1, prologue_gate="silu"
    ),
    wgmma(
        FP16,
        NVFP4,
        "128x4",
        None,
        64,
        epilogue=(BF16,),
        sizes=(70, 136, 800),
        num_ctas=2,
        has_partial_sums=True,
        prologue_gate="silu",
    ),
]


def gated_rows(up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of gate and up, and their SwiGLU. The silu of each gate value is exactly the value itself, or
    zero."""
    gate = torch.tensor([0.0, 32.0, 64.0, -200.0])[torch.randint(4, up.shape)]
    return torch.cat((gate.to(up.dtype), up), 1), (gate.clamp(min=0) * up.float()).to(up.dtype)


def multiply_by_warpgroups(
    one: Wgmma, edit: Any = None, late: tuple[str, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; return their result and the expected result.

    ``late`` names the arguments that a simulated previous kernel writes at the last moment.
    """
    m, n, k = one.sizes
    torch.manual_seed(k)
    case = one.case
    a, a_scale = exact_activations(case, m, k)
    passed, a = gated_rows(a) if case.prologue_gate else (a, a)
    b, scale = random_matrix(n, k, case.format, case.layout, CPU, POWERS[case.format.scale_format])
    scale = scale.view(case.format.scale_dtype)
    alpha, bias = operands(case.epilogue, n)
    row_scale = row_scales(case.epilogue, m)
    out = poisoned(m, n, dtype=case.epilogue.out_dtype)
    config = case.kernel.config
    size = -(-m // case.tile_m) * config.workspace_bytes(k, one.num_ctas, has_partial_sums=one.has_partial_sums)
    workspace = None if config.rearranges else poisoned(size, dtype=torch.uint8)
    prefetched = to_prefetch(case)
    shared = workspace, prefetched, one.num_ctas, int(one.has_partial_sums)
    given = fp4_wgmma.Arguments(passed, a_scale, b.t(), scale, alpha, bias, row_scale, out, *shared)
    given, written = written_late(given, late or ())
    before = None if late is None else written
    how = {"seed": one.seed, "strict": True, "scoped": True, "edit": edit, "written_before": before}
    check_prefetched(run_kernel(case.kernel, ARCHS[case.arch], *given, **how), prefetched)
    layouts = None if case.a_layout is None else SCALE_LAYOUTS[case.a_layout], SCALE_LAYOUTS[case.layout]
    sums = fp4_gemm(a, a_scale, b, scale, None, None, FP32, case.format, *layouts)
    return out, finished(sums, case.epilogue, alpha, bias, row_scale=row_scale)


# Launches whose epilogue multiplies each row by a scale, before alpha: in clusters that send or read partial sums, with
# partial sums in the workspace, in large tiles, and in tiles of one row
ROW_SCALED_WGMMAS = [
    wgmma(
        *(FP16, NVFP4, "128x4", "8x4", 8),
        epilogue=(FP32, "one", FP32, True),
        sizes=(9, 504, 1088),
        num_ctas=4,
        has_partial_sums=True,
    ),
    wgmma(
        *(FP16, NVFP4, "128x4", "128x4", 64),
        epilogue=(BF16, "column", BF16, True),
        sizes=(70, 136, 800),
        num_ctas=2,
        has_partial_sums=True,
        seed=1,
    ),
    wgmma(FP16, NVFP4, "128x4", "128x4", 128, epilogue=(BF16, None, None, True), sizes=(131, 136, 544), num_ctas=2),
    wgmma(FP16, NVFP4, "linear", "linear", 256, epilogue=(FP32, "one", None, True), sizes=(21, 136, 256), num_ctas=2),
    wgmma(BF16, MXFP4, "128x4", "128x4", 16, epilogue=(FP16, None, FP16, True), sizes=(9, 296, 1088), split_k=5),
    wgmma(BF16, MXFP4, "128x4", "128x4", 128, epilogue=(FP16, "column", None, True), sizes=(30, 136, 800), split_k=3),
    wgmma(
        FP16,
        NVFP4,
        "128x4",
        "8x4",
        8,
        epilogue=(FP32, "column", None, True),
        sizes=(3, 520, 800),
        split_k=2,
        tile_n=224,
    ),
    wgmma(FP16, NVFP4, "128x4", "128x4", 32, epilogue=(FP32, "one", FP32, True), sizes=(40, 136, 800), split_k=2),
    wgmma(FP16, NVFP4, "128x4", "128x4", 1, epilogue=(FP32, None, None, True), sizes=(3, 256, 3840), split_k=1, seed=4),
    wgmma(FP16, NVFP4, "128x4", "8x4", 1, epilogue=(BF16, "one", BF16, True), sizes=(3, 520, 1568), split_k=2, seed=1),
]


@pytest.mark.parametrize("one", [*WGMMAS, *ROW_SCALED_WGMMAS])
def test_gemm_by_warpgroups(one: Wgmma) -> None:
    """Use inputs whose sums are exact, and check that the results equal the reference's bit for bit. Elements beyond
    the matrices must not affect the results."""
    got, want = multiply_by_warpgroups(one, edit=None)
    assert torch.equal(got, want)


# Launches of a cluster with several tiles, and with more k tiles than stages
STATIC = [
    wgmma(FP16, NVFP4, "128x4", "8x4", 8, epilogue=(BF16, "one", BF16), sizes=(3, 136, 1824), split_k=1),
    wgmma(BF16, MXFP4, "128x4", None, 8, epilogue=(FP16, "one"), sizes=(9, 136, 544), split_k=2, a_dtype=FP16),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(FP16, "one"), sizes=(2, 136, 2080), split_k=1),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(FP16, "one"), sizes=(1, 136, 2080), split_k=1, prologue_gate="silu"),
    wgmma(FP16, NVFP4, "128x4", None, 8, epilogue=(BF16, "one"), sizes=(3, 136, 2336), split_k=2, prologue_gate="silu"),
]


@pytest.mark.parametrize("one", STATIC)
def test_a_static_weight(one: Wgmma) -> None:
    """Check that a static weight is read before the wait for the previous kernel, and that no other argument is."""
    got, want = multiply_by_warpgroups(is_static(one), late=INPUTS)
    assert torch.equal(got, want)


def test_only_a_static_weight_is_read_before_the_wait() -> None:
    """Check that a weight that is not static is not read before the wait."""
    (one,) = STATIC[1].values
    got, want = multiply_by_warpgroups(one, late=(*WEIGHT, *INPUTS))
    assert torch.equal(got, want)
    for name in WEIGHT:
        got, want = multiply_by_warpgroups(is_static(one), late=(name,))
        assert not torch.equal(got, want), name


def test_a_static_weight_is_one_more_kernel_only_where_it_is_read_ahead() -> None:
    """Check that ``static_weight`` leads to a separate kernel only if the kernel reads the weight before its wait.
    Otherwise one kernel serves both settings."""
    for tile_m, split_k, differs in ((8, 2, True), (32, 1, True), (8, 0, False), (64, 3, False)):
        case = WgmmaCase(BF16, NVFP4, "128x4", None, tile_m, Epilogue(BF16), split_k)
        assert (case.kernel.config != replace(case, static_weight=True).kernel.config) == differs
        operands, arch = case.kernel.config.operands, ARCHS[case.arch]
        given = {"operands": operands, "epilogue": case.epilogue, "tile_m": tile_m, "split_k": split_k, "arch": arch}
        assert fp4_wgmma.plan(**given, pdl=False, static_weight=True) == fp4_wgmma.plan(**given, pdl=False)


@pytest.mark.parametrize(("tile_m", "split_k", "static", "ahead"), [
    pytest.param(8, 2, False, 0, id="not static"),
    pytest.param(1, 2, True, None, id="static, one row"),
    pytest.param(8, 2, True, None, id="static"),
    pytest.param(16, 2, True, 1, id="static, decoding is the limit"),
    pytest.param(32, 1, True, 1, id="static, 32 rows"),
    pytest.param(16, 0, False, "stages", id="after a kernel of the op"),
    pytest.param(64, 3, False, 1, id="after a kernel, decoding is the limit"),
    pytest.param(256, 0, False, 1, id="after a kernel, 256 rows"),
])  # fmt: skip
def test_how_much_is_copied_before_the_wait(tile_m: int, split_k: int, static: bool, ahead: int | str | None) -> None:
    """Check how much the producer copies before the wait: nothing, one k tile, or one k tile per stage."""
    case = WgmmaCase(BF16, NVFP4, "128x4", None, tile_m, Epilogue(BF16), split_k, static_weight=static)
    config = case.kernel.config
    assert config.ahead == (config.stages if ahead == "stages" else ahead)


@pytest.mark.parametrize("one", [*MMAS, *NATIVE_MMAS, *ROW_SCALED_MMAS, *WGMMAS, *ROW_SCALED_WGMMAS])
def test_compiles_without_spills(one: Mma | Wgmma) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(one.case, one.case.kernel)


OVERLAPPING = [MMAS[3].values[0].case, *(WGMMAS[i].values[0].case for i in (4, 7))]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in OVERLAPPING])
def test_nothing_is_launched_on_overlap(case: MmaCase | WgmmaCase) -> None:
    """Check that nothing is launched if the output overlaps an operand."""
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


def freed_early(ptx: str) -> str:
    """Edit PTX so that a stage of codes is released as soon as the loads from it are issued, before they are
    performed."""
    warps_meet = r"bar\.warp\.sync[^;]*;(?:(?!bar\.warp)[\s\S])*?mbarrier\.arrive[^;]*;\}"
    free = list(re.finditer(warps_meet, ptx))[1]
    ptx = ptx[: free.start()] + ptx[free.end() :]
    last = list(re.finditer(r"ld\.shared\.b32[^;]*;", ptx))[-1]
    return f"{ptx[: last.end()]}\n{free[0]}\n{ptx[last.end() :]}"


def unmet(number: int) -> Any:
    """Return an edit of PTX that removes the ``number``-th barrier of the cluster."""
    edits = [changed(rf"barrier\.cluster\.{part}", number) for part in ("arrive", "wait")]
    return lambda ptx: edits[1](edits[0](ptx))


def half_a_group(ptx: str) -> str:
    """Edit PTX so that a stage of activations becomes full when only one warp of a pair of decoders arrives."""
    (two,) = re.findall(r"mov\.b32\s+(%r\d+), 2;", ptx)
    ptx, count = re.subn(rf"(mbarrier\.init\S+\s+\[[^\]]+\]), {two};", r"\1, 1;", ptx)
    assert count
    return ptx


MMAS_UNAWAITED = changed(r"wgmma\.wait_group\.sync\.aligned\s+1", None)
STAGES_AGAIN = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 64, Epilogue(FP32)), (64, 128, 1024), 1, False, None)
PARTIAL_SUMS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32)), (8, 256, 1024), 3, True, None)
# A CTA multiplies more k tiles than its pipelines have stages. The kernel waits, in this order from the end of the PTX,
# for the other CTAs' partial sums, for activations, for codes, and for an empty stage of activations. A warp
# synchronises after rearranging activations, after reading codes, and after reading activations. The consumers
# synchronise after rearranging the first activations, after reading all codes, and after storing partial sums.
WARPS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32), 2), (8, 136, 3072), 0, False, None)
STREAM_K = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32)), (8, 136, 2560), 1, False, None)
WARPGROUPS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 32, Epilogue(FP32), 2), (32, 136, 2560), 0, False, None)
PAIRS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 16, Epilogue(FP32), 2), (16, 136, 2560), 0, False, None)
CODES = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", "128x4", 1, Epilogue(FP32), 2), (1, 136, 3584), 0, False, None)
# A CTA lacks room to receive partial sums, so it reads the partial sums in the other CTAs' shared memory.
SUMS_READ = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 64, Epilogue(FP32), 2), (64, 136, 1024), 0, False, None)


@pytest.mark.parametrize(
    ("one", "edit"),
    [
        pytest.param(STAGES_AGAIN, MMAS_UNAWAITED, id="MMAs ended"),
        pytest.param(STAGES_AGAIN, changed(WAIT, None, PASSED), id="copies complete"),
        pytest.param(STAGES_AGAIN, changed(r"bar\.sync\s+0", None), id="barriers initialised"),
        pytest.param(
            PARTIAL_SUMS,
            changed(r"ld\.acquire\.gpu\.global\.u32\s+(%r\d+),", None, r"mov.b32 \1, 1;"),
            id="partial sums of CTAs complete",
        ),
        pytest.param(WARPS, changed(WAIT, -4, PASSED), id="stage of activations empty"),
        pytest.param(WARPS, changed(r"bar\.sync\s+1", 0), id="first activations rearranged"),
        pytest.param(WARPS, changed(r"bar\.warp\.sync", 0), id="activations rearranged"),
        pytest.param(WARPS, changed(WAIT, -2, PASSED), id="activations complete"),
        pytest.param(WARPS, changed(r"bar\.warp\.sync", 1), id="codes read"),
        pytest.param(WARPS, changed(r"fence\.proxy\.async", 0), id="codes loaded"),
        pytest.param(STREAM_K, changed(r"fence\.proxy\.async", 0), id="codes loaded, stream-K"),
        pytest.param(STREAM_K, changed(r"fence\.proxy\.async", 1), id="activations loaded, stream-K"),
        pytest.param(WARPS, changed(r"bar\.warp\.sync", 2), id="activations read"),
        pytest.param(WARPS, changed(r"bar\.sync\s+1", 1), id="codes read before partial sums"),
        pytest.param(WARPS, changed(r"bar\.sync\s+1", 2), id="partial sums stored"),
        pytest.param(WARPS, unmet(0), id="mbarriers of the cluster initialised"),
        pytest.param(WARPS, changed(WAIT, -1, PASSED), id="partial sums received"),
        pytest.param(WARPGROUPS, changed(WAIT, -4, PASSED), id="stage of activations empty, warpgroups"),
        pytest.param(WARPGROUPS, changed(r"fence\.proxy\.async", 0), id="activations fenced"),
        pytest.param(WARPGROUPS, changed(r"bar\.warp\.sync", 0), id="activations rearranged, warpgroups"),
        pytest.param(WARPGROUPS, changed(WAIT, -2, PASSED), id="activations complete, warpgroups"),
        pytest.param(WARPGROUPS, changed(r"bar\.warp\.sync", 1), id="codes read, warpgroups"),
        pytest.param(WARPGROUPS, freed_early, id="codes loaded, warpgroups"),
        pytest.param(WARPGROUPS, MMAS_UNAWAITED, id="MMAs of a cluster ended"),
        pytest.param(WARPGROUPS, changed(WAIT, -1, PASSED), id="partial sums received, warpgroups"),
        pytest.param(WARPS, changed(ACQUIRE), id="partial sums received, acquired"),
        pytest.param(WARPGROUPS, changed(ACQUIRE), id="partial sums received, acquired, warpgroups"),
        pytest.param(PAIRS, half_a_group, id="activations of both decoders complete"),
        pytest.param(CODES, changed(WAIT, -4, PASSED), id="stage of activations empty, codes"),
        pytest.param(CODES, changed(r"fence\.proxy\.async", 1), id="activations fenced, codes"),
        pytest.param(CODES, changed(r"bar\.warp\.sync", 0), id="activations rearranged, codes"),
        pytest.param(CODES, changed(WAIT, -2, PASSED), id="activations complete, codes"),
        pytest.param(CODES, changed(r"fence\.proxy\.async", -1), id="codes loaded, codes"),
        pytest.param(CODES, changed(r"bar\.warp\.sync", -2), id="codes read, codes"),
        pytest.param(CODES, changed(r"bar\.warp\.sync", -1), id="factors read, codes"),
        pytest.param(CODES, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs ended, codes"),
        pytest.param(SUMS_READ, unmet(0), id="partial sums stored by the cluster"),
        pytest.param(SUMS_READ, unmet(1), id="partial sums read by the cluster"),
    ],
)
def test_each_wait_of_wgmma_is_needed(one: Wgmma, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes a wait."""
    with pytest.raises((EmulationError, AssertionError)):
        check_in_orders(multiply_by_warpgroups, one, 6, edit)


@pytest.mark.parametrize("one", [STAGES_AGAIN, PARTIAL_SUMS, WARPS, STREAM_K, WARPGROUPS, PAIRS, CODES, SUMS_READ])
def test_the_waits_of_wgmma_are_enough(one: Wgmma) -> None:
    """Check that the unedited kernels are free of races and give correct results."""
    check_in_orders(multiply_by_warpgroups, one, 2)
