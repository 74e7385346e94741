"""The kernels of FP4 GEMMs but those over experts, executed thread for thread by the PTX emulator, against the CPU
references."""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import (
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
from support.epilogues import finished, operands
from support.fp4_activations import exact_activations
from support.host_grids import check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, MmaCase, WgmmaCase
from support.ptx_faults import BLOCK_SCALED_MMA, Unfound, check_faults

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.kernels import activation_tiles, fp4_mma, fp4_wgmma
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

fp4_dequantize = OPS["fp4_dequantize"].reference


class Mma(NamedTuple):
    """An FP4 GEMM by mma.sync and a launch of it, for M, N and K."""

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
    """``operands``: dtype, format, layout, tokens and split_k; ``sizes``: M, N, K."""
    one = Mma(MmaCase(*operands, Epilogue(*epilogue), arch, a_layout=a_layout), sizes, seed)
    return pytest.param(one, id=one.id)


MMAS = [
    # Whole tiles; rows, columns and k beyond which there is nothing; fewer chunks than CTAs.
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
    """One of codes by codes."""
    layout = weight_layout(SCALE_LAYOUTS[a_layout]).name
    return mma(torch.uint8, fmt, layout, *rest, arch=CONSUMER, a_layout=a_layout, **kwargs)


# Whole tiles; ragged rows, columns and k, in steps and in blocks; more chunks than stages; several tiles of 8x4.
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


def multiply(one: Mma, edit: Any = None, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel leaves in its output, and what the epilogue makes of the reference's sums. With a seed, the
    kernel before writes the operands at the last moment."""
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
    out = poisoned(m, n, dtype=case.epilogue.out_dtype)
    given = fp4_mma.Arguments(a, a_scale, b.t(), scale, alpha, bias, out)
    given, before = written_late(given, (*WEIGHT, *INPUTS)) if one.seed is not None else (given, None)
    strict = case.a_layout is not None
    run_kernel(case.kernel, arch, *given, seed=one.seed, strict=strict, edit=edit, written_before=before)
    sums = fp4_gemm(a, a_scale, b, scale, None, None, FP32, case.format, a_layout, SCALE_LAYOUTS[case.layout])
    return out, finished(sums, case.epilogue, alpha, bias)


@pytest.mark.parametrize("one", [*MMAS, *NATIVE_MMAS])
def test_gemm(one: Mma) -> None:
    """Bit for bit where sums are exact; scales beside the matrix are NaN, and alpha and bias end with the columns.

    Codes are multiplied, which no GPU has run, in two orders of threads."""
    for seed in (one.seed,) if one.case.a_layout is None else (one.seed, 5):
        got, want = multiply(one._replace(seed=seed), exact=True)
        assert torch.equal(got, want), seed


UNFOUND = {"copies not waited for": Unfound(1, "behind the last chunk, where there are none")}


def test_faults_are_found_where_codes_are_multiplied(request: pytest.FixtureRequest) -> None:
    """What is left out, or altered, of copies, waits, barriers, loads and block-scaled MMAs. There are more chunks than
    stages, and two CTAs that share k."""
    (one,) = native(NVFP4, "128x4", 16, 2, epilogue=(FP32, "one"), sizes=(16, 128, 2112), seed=0).values
    all_tried = request.config.getoption("more_emulated")
    ptx = compile_ptx(one.case.kernel, ARCHS[CONSUMER]).ptx
    check_faults(
        lambda seed, edit: multiply(one._replace(seed=seed), edit, exact=True),
        ptx,
        UNFOUND,
        all_tried=all_tried,
        kinds=BLOCK_SCALED_MMA,
        least=13,
    )


@pytest.mark.parametrize("one", MMAS[:3])
def test_gemm_of_any_numbers(one: Mma) -> None:
    got, want = multiply(one)
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * torch.finfo(want.dtype).eps, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "fmt"), [(FP16, NVFP4), (BF16, NVFP4), (BF16, MXFP4)], ids=["fp16-nvfp4", "bf16-nvfp4", "bf16-mxfp4"]
)
def test_gemm_decodes_every_scale(dtype: torch.dtype, fmt: FP4Format) -> None:
    """Unit vectors give the weight's columns: every code under every scale, subnormal, negative and NaN ones too."""
    k, n = 256, 256
    blocks = k // fmt.block_size
    codes = torch.arange(16, dtype=torch.uint8).repeat(n, k // 16)
    b = codes[:, ::2] | codes[:, 1::2] << 4
    scale = torch.arange(n, dtype=torch.uint8)[:, None].expand(n, blocks).contiguous()
    out = poisoned(16, n, dtype=FP32)
    case = MmaCase(dtype, fmt, "linear", 16, 1, Epilogue(FP32), HOPPER)
    scale = scale.view(fmt.scale_dtype)
    given = fp4_mma.Arguments(torch.eye(k)[:16].to(dtype), None, b.t(), scale, None, None, out)
    run_kernel(case.kernel, ARCHS[HOPPER], *given, seed=0)
    want = fp4_dequantize(b, scale, block_size=fmt.block_size, scale_layout="linear", out_dtype=FP32)[:, :16].t()
    # A NaN is in the whole sum, and so is infinity times zero, where 6 times the scale exceeds float32.
    usable = ~want.isnan().any(0) & (scale[:, 0].view(torch.uint8) < 253 if fmt == MXFP4 else True)
    assert out[:, ~usable].isnan().all() and (~usable).sum() == (3 if fmt == MXFP4 else 2)
    # A sum has no negative zero.
    equal("results", out[:, usable], want[:, usable] + 0.0)


@pytest.mark.parametrize(("by_warp", "chunk"), [(False, 256), (False, 128), (True, 256), (True, 128)])
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
    chunk: int,
) -> None:
    """Every activation is where the MMA with the weight's codes, as its lanes decode them, looks for it."""
    groups, chunks, pieces = -(-m // 8) + 1, -(-k // chunk), chunk // 32
    tiles, flags = poisoned(chunks * groups * 16 * chunk, dtype=torch.uint8), poisoned(5, dtype=torch.int32)
    if a_layout is None:
        # To float16's largest and smallest numbers; halves of a bfloat16 step are rounded to even.
        a, scale = (torch.randn(m, k) * 2.0 ** torch.randint(-24, 14, (m, k))).to(a_dtype), None
        numbers = a.to(dtype).float()
    else:
        a, scale = random_matrix(m, k, fmt, a_layout, CPU, POWERS[fmt.scale_format])
        scale = scale.view(fmt.scale_dtype)
        numbers = fp4_dequantize(a, scale, block_size=fmt.block_size, scale_layout=a_layout, out_dtype=FP32)
        numbers *= 2.0**-8 if fmt == NVFP4 else 1.0
    layout = None if a_layout is None else SCALE_LAYOUTS[a_layout]
    config = activation_tiles.Config(a_dtype, dtype, fmt, layout, by_warp, chunk, True)
    assert config.reason_unsupported() is None
    kernel = activation_tiles.ActivationTilesKernel(config)
    run_kernel(kernel, ARCHS[HOPPER], a, scale, tiles, flags, None, None, seed=0)
    assert not flags.any()
    numbers = torch.nn.functional.pad(numbers, (0, chunks * chunk - k))
    # chunk, 64 positions, group, token, 16 bytes, element; or chunk, group, token, piece, quarter, element
    shape = (chunks, groups, 8, pieces, 4, 8) if by_warp else (chunks, pieces // 2, groups, 8, 8, 8)
    got = tiles.view(dtype).view(shape)
    # Which elements of a word a decoder pairs: (0, 2), (1, 3), ... in fp16, (0, 4), (1, 5), ... in bf16.
    pairs = [(0, 2), (1, 3), (4, 6), (5, 7)] if dtype == FP16 else [(0, 4), (1, 5), (2, 6), (3, 7)]
    for token in range(m):
        for step in range(2 * pieces):
            for position in range(16):
                high, quad, e = position // 8, position % 8 // 2, position % 2
                element = quad * (chunk // 4) + step // 2 * 8 + pairs[step % 2 * 2 + high][e]
                if by_warp:
                    at = step % 2 * 4 + high * 2 + e
                    found = got[:, token // 8, token % 8, step // 2 ^ token % 2, quad, at]
                else:
                    place = (step % 4 * 2 + high) ^ (token % 8)
                    found = got[:, step // 4, token // 8, token % 8, place, position % 8]
                assert torch.equal(found.float(), numbers[token, element::chunk]), (token, step, position)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda: changed(r"cp\.async\.wait_group"), id="chunk arrived"),
        pytest.param(lambda: changed(r"bar\.sync\s+0", 0), id="chunk there for all"),
        pytest.param(lambda: changed(r"bar\.sync\s+0", 1), id="stages free for sums"),
        pytest.param(lambda: changed(r"barrier\.cluster\.wait", 0), id="parts complete"),
    ],
)
@pytest.mark.parametrize("codes", [False, True], ids=["decoded", "codes"])
def test_what_orders_a_gemm_is_needed(edit: Any, codes: bool) -> None:
    """Without one of the waits the emulator finds a race. The last chunk lies where the sums will."""
    one = Mma(MmaCase(FP16, NVFP4, "128x4", 8, 2, Epilogue(FP32), HOPPER), (8, 128, 3584), 0)
    if codes:
        case = MmaCase(torch.uint8, NVFP4, "128x4", 8, 2, Epilogue(FP32), CONSUMER, a_layout="128x4")
        one = Mma(case, (8, 128, 3072), 0)
    with pytest.raises(EmulationError):
        multiply(one, edit())


# GEMMs by warpgroups


class Wgmma(NamedTuple):
    """An FP4 GEMM by wgmma and a launch of it, for M, N, K; ``workers`` share a tile's sums, or not; 0: clusters do."""

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
    prologue_gate: bool = False,
    prefetches: bool = False,
) -> Any:
    """``operands``: dtype, format, layouts of the weight and the activations, and tokens; ``sizes``: M, N, K; ``rows``:
    of the weight's tile, ``None`` for the most; ``gated``: whether the activations are SwiGLU of what is given."""
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


# Rows, columns and k beyond which there is nothing; parts of several tiles; more chunks than stages.
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
    # Tiles that begin in the middle of a tile of scales, the last one short; warps that take chunks in turn, and more
    # chunks than stages
    wgmma(FP16, NVFP4, "128x4", "8x4", 8, epilogue=(FP32, "column"), sizes=(3, 520, 800), split_k=2, tile_n=224),
    wgmma(
        BF16, MXFP4, "128x4", None, 8, epilogue=(BF16, None, BF16), sizes=(9, 328, 2080), split_k=1, tile_n=160, seed=1
    ),
    wgmma(
        FP16, NVFP4, "128x4", None, 8, epilogue=(BF16, "one"), sizes=(8, 424, 2336), split_k=1, tile_n=208, seed=None
    ),
    wgmma(FP16, NVFP4, "linear", None, 8, epilogue=(FP16, "one"), sizes=(5, 200, 512), split_k=1, tile_n=192, seed=2),
    # Chunks that arrive out of order, three times as many as stages, of which a warp has every second or fourth
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
    # Tiles of one row: of three kinds of activations; warps that take chunks in turn; more chunks than stages; clusters
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
    # Activations in float16 that are rounded to bfloat16: by a kernel of their own, and by the CTAs
    wgmma(BF16, MXFP4, "128x4", None, 16, epilogue=(FP32,), sizes=(5, 40, 288), num_ctas=1, a_dtype=FP16),
    wgmma(BF16, MXFP4, "128x4", None, 8, epilogue=(FP16, "one"), sizes=(3, 136, 544), split_k=2, a_dtype=FP16),
    # A gate in front: of one row, and of eight, by the CTAs, the last chunk short, and more chunks than stages; of more
    # rows; and by a kernel of its own
    wgmma(FP16, NVFP4, "128x4", "linear", 1, epilogue=(FP32,), sizes=(1, 264, 2080), split_k=2, prefetches=True),
    wgmma(BF16, NVFP4, "128x4", None, 8, epilogue=(FP32,), sizes=(9, 264, 2080), split_k=1, seed=1, prefetches=True),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(BF16, "one"), sizes=(1, 264, 2080), split_k=1, prologue_gate=True),
    wgmma(
        FP16, NVFP4, "linear", None, 1, epilogue=(FP32,), sizes=(2, 200, 768), split_k=3, seed=None, prologue_gate=True
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
        prologue_gate=True,
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
        prologue_gate=True,
    ),
    wgmma(
        FP16, NVFP4, "128x4", None, 8, epilogue=(FP32,), sizes=(8, 424, 2336), split_k=2, tile_n=208, prologue_gate=True
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
        prologue_gate=True,
    ),
    wgmma(BF16, MXFP4, "128x4", None, 16, epilogue=(BF16, "one"), sizes=(9, 296, 1088), split_k=5, prologue_gate=True),
    wgmma(
        BF16, NVFP4, "128x4", None, 32, epilogue=(FP32,), sizes=(40, 136, 800), split_k=2, seed=1, prologue_gate=True
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
        prologue_gate=True,
    ),
]


def behind_a_gate(up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of gate and up, and what SwiGLU makes of them: of gates whose silu is themselves, or nothing, to the bit."""
    gate = torch.tensor([0.0, 32.0, 64.0, -200.0])[torch.randint(4, up.shape)]
    return torch.cat((gate.to(up.dtype), up), 1), (gate.clamp(min=0) * up.float()).to(up.dtype)


def multiply_by_warpgroups(
    one: Wgmma, edit: Any = None, late: tuple[str, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels leave in their output, and what the epilogue makes of the reference's sums. ``late``: arguments
    that a kernel before them writes, which has not ended."""
    m, n, k = one.sizes
    torch.manual_seed(k)
    case = one.case
    a, a_scale = exact_activations(case, m, k)
    passed, a = behind_a_gate(a) if case.prologue_gate else (a, a)
    b, scale = random_matrix(n, k, case.format, case.layout, CPU, POWERS[case.format.scale_format])
    scale = scale.view(case.format.scale_dtype)
    alpha, bias = operands(case.epilogue, n)
    out = poisoned(m, n, dtype=case.epilogue.out_dtype)
    config = case.kernel.config
    size = -(-m // case.tile_m) * config.workspace_bytes(k, one.num_ctas, has_partial_sums=one.has_partial_sums)
    workspace = None if config.rearranges else poisoned(size, dtype=torch.uint8)
    prefetched = to_prefetch(case)
    shared = workspace, prefetched, one.num_ctas, int(one.has_partial_sums)
    given = fp4_wgmma.Arguments(passed, a_scale, b.t(), scale, alpha, bias, out, *shared)
    given, written = written_late(given, late or ())
    before = None if late is None else written
    how = {"seed": one.seed, "strict": True, "edit": edit, "written_before": before}
    check_prefetched(run_kernel(case.kernel, ARCHS[case.arch], *given, **how), prefetched)
    layouts = None if case.a_layout is None else SCALE_LAYOUTS[case.a_layout], SCALE_LAYOUTS[case.layout]
    sums = fp4_gemm(a, a_scale, b, scale, None, None, FP32, case.format, *layouts)
    return out, finished(sums, case.epilogue, alpha, bias)


@pytest.mark.parametrize("one", WGMMAS)
def test_gemm_by_warpgroups(one: Wgmma) -> None:
    """Bit for bit where sums are exact; what is beyond the matrices is not read, or counts for nothing."""
    got, want = multiply_by_warpgroups(one, edit=None)
    assert torch.equal(got, want)


# A cluster with several tiles, and more chunks than stages
STATIC = [
    wgmma(FP16, NVFP4, "128x4", "8x4", 8, epilogue=(BF16, "one", BF16), sizes=(3, 136, 1824), split_k=1),
    wgmma(BF16, MXFP4, "128x4", None, 8, epilogue=(FP16, "one"), sizes=(9, 136, 544), split_k=2, a_dtype=FP16),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(FP16, "one"), sizes=(2, 136, 2080), split_k=1),
    wgmma(BF16, NVFP4, "128x4", None, 1, epilogue=(FP16, "one"), sizes=(1, 136, 2080), split_k=1, prologue_gate=True),
    wgmma(FP16, NVFP4, "128x4", None, 8, epilogue=(BF16, "one"), sizes=(3, 136, 2336), split_k=2, prologue_gate=True),
]


@pytest.mark.parametrize("one", STATIC)
def test_a_static_weight(one: Wgmma) -> None:
    """Nothing but the weight is read before the wait: the kernel before may still write it."""
    got, want = multiply_by_warpgroups(is_static(one), late=INPUTS)
    assert torch.equal(got, want)


def test_whether_a_weight_is_read_before_the_wait() -> None:
    """Only one that is static."""
    (one,) = STATIC[1].values
    got, want = multiply_by_warpgroups(one, late=(*WEIGHT, *INPUTS))
    assert torch.equal(got, want)
    for name in WEIGHT:
        got, want = multiply_by_warpgroups(is_static(one), late=(name,))
        assert not torch.equal(got, want), name


def test_a_static_weight_is_one_more_kernel_only_where_it_is_read_ahead() -> None:
    """Else the configurations are equal, and one kernel serves both."""
    for tile_m, split_k, differs in ((8, 2, True), (32, 1, True), (8, 0, False), (64, 3, False)):
        case = WgmmaCase(BF16, NVFP4, "128x4", None, tile_m, Epilogue(BF16), split_k)
        assert (case.kernel.config != replace(case, static_weight=True).kernel.config) == differs
        operands, arch = case.kernel.config.operands, ARCHS[case.arch]
        given = {"operands": operands, "epilogue": case.epilogue, "tile_m": tile_m, "split_k": split_k, "arch": arch}
        assert fp4_wgmma.plan(**given, pdl=False, static_weight=True) == fp4_wgmma.plan(**given, pdl=False)


@pytest.mark.parametrize(("tile_m", "split_k", "static", "ahead"), [
    pytest.param(8, 2, False, 0, id="another may write it"),
    pytest.param(1, 2, True, None, id="static, one row"),
    pytest.param(8, 2, True, None, id="static"),
    pytest.param(16, 2, True, 1, id="static, decoding is the limit"),
    pytest.param(32, 1, True, 1, id="static, 32 rows"),
    pytest.param(16, 0, False, "stages", id="behind a kernel of the op"),
    pytest.param(64, 3, False, 1, id="behind one, decoding is the limit"),
    pytest.param(256, 0, False, 1, id="behind one, 256 rows"),
])  # fmt: skip
def test_how_much_is_copied_before_the_wait(tile_m: int, split_k: int, static: bool, ahead: int | str | None) -> None:
    """Nothing, a chunk, or as much as fits."""
    case = WgmmaCase(BF16, NVFP4, "128x4", None, tile_m, Epilogue(BF16), split_k, static_weight=static)
    config = case.kernel.config
    assert config.ahead == (config.stages if ahead == "stages" else ahead)


@pytest.mark.parametrize("one", [*MMAS, *NATIVE_MMAS, *WGMMAS])
def test_compiles_without_spills(one: Mma | Wgmma) -> None:
    """As ``test_compile_kernels`` checks, which leaves kernels with these roles to this test."""
    check_emulated(one.case, one.case.kernel)


OVERLAPPING = [MMAS[3].values[0].case, *(WGMMAS[i].values[0].case for i in (4, 7))]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in OVERLAPPING])
def test_nothing_is_launched_on_overlap(case: MmaCase | WgmmaCase) -> None:
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


def freed_early(ptx: str) -> str:
    """An edit of PTX: a stage of codes is free when loads from it have been started."""
    warps_meet = r"bar\.warp\.sync[^;]*;(?:(?!bar\.warp)[\s\S])*?mbarrier\.arrive[^;]*;\}"
    free = list(re.finditer(warps_meet, ptx))[1]
    ptx = ptx[: free.start()] + ptx[free.end() :]
    last = list(re.finditer(r"ld\.shared\.b32[^;]*;", ptx))[-1]
    return f"{ptx[: last.end()]}\n{free[0]}\n{ptx[last.end() :]}"


def unmet(number: int) -> Any:
    """An edit of PTX: a cluster does not meet, the ``number``-th time."""
    edits = [changed(rf"barrier\.cluster\.{part}", number) for part in ("arrive", "wait")]
    return lambda ptx: edits[1](edits[0](ptx))


def half_a_team(ptx: str) -> str:
    """An edit of PTX: a stage of activations is full when one warp of a pair has come."""
    (two,) = re.findall(r"mov\.b32\s+(%r\d+), 2;", ptx)
    ptx, count = re.subn(rf"(mbarrier\.init\S+\s+\[[^\]]+\]), {two};", r"\1, 1;", ptx)
    assert count
    return ptx


MMAS_UNAWAITED = changed(r"wgmma\.wait_group\.sync\.aligned\s+1", None)
STAGES_AGAIN = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 64, Epilogue(FP32)), (64, 128, 1024), 1, False, None)
SHARED_SUMS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32)), (8, 256, 1024), 3, True, None)
# A CTA has more chunks than stages. Its waits, from the end: for the peers' sums, for activations, for codes, for a
# stage to put activations in; its warps meet when they have put them in order, have read codes, and have read
# activations; its consumers when they have put the first activations in order, have read all codes, and have left sums.
WARPS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32), 2), (8, 136, 3072), 0, False, None)
PORTIONS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32)), (8, 136, 2560), 1, False, None)
WARPGROUPS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 32, Epilogue(FP32), 2), (32, 136, 2560), 0, False, None)
PAIRS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 16, Epilogue(FP32), 2), (16, 136, 2560), 0, False, None)
CODES = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", "128x4", 1, Epilogue(FP32), 2), (1, 136, 3584), 0, False, None)
# There is no room for sums that are sent.
SUMS_READ = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 64, Epilogue(FP32), 2), (64, 136, 1024), 0, False, None)


@pytest.mark.parametrize(
    ("one", "edit"),
    [
        pytest.param(STAGES_AGAIN, MMAS_UNAWAITED, id="MMAs done"),
        pytest.param(STAGES_AGAIN, changed(WAIT, None, PASSED), id="copies there"),
        pytest.param(STAGES_AGAIN, changed(r"bar\.sync\s+0", None), id="barriers initialised"),
        pytest.param(
            SHARED_SUMS,
            changed(r"ld\.acquire\.gpu\.global\.u32\s+(%r\d+),", None, r"mov.b32 \1, 1;"),
            id="sums of workers left",
        ),
        pytest.param(WARPS, changed(WAIT, -4, PASSED), id="stage free for activations"),
        pytest.param(WARPS, changed(r"bar\.sync\s+1", 0), id="first activations in order"),
        pytest.param(WARPS, changed(r"bar\.warp\.sync", 0), id="activations in order"),
        pytest.param(WARPS, changed(WAIT, -2, PASSED), id="activations there"),
        pytest.param(WARPS, changed(r"bar\.warp\.sync", 1), id="codes read"),
        pytest.param(WARPS, changed(r"fence\.proxy\.async", 0), id="codes loaded"),
        pytest.param(PORTIONS, changed(r"fence\.proxy\.async", 0), id="codes loaded, of portions"),
        pytest.param(PORTIONS, changed(r"fence\.proxy\.async", 1), id="activations loaded, of portions"),
        pytest.param(WARPS, changed(r"bar\.warp\.sync", 2), id="activations read"),
        pytest.param(WARPS, changed(r"bar\.sync\s+1", 1), id="codes free for sums"),
        pytest.param(WARPS, changed(r"bar\.sync\s+1", 2), id="sums left"),
        pytest.param(WARPS, unmet(0), id="barriers of peers initialised"),
        pytest.param(WARPS, changed(WAIT, -1, PASSED), id="sums of peers there"),
        pytest.param(WARPGROUPS, changed(WAIT, -4, PASSED), id="stage free for activations of warpgroups"),
        pytest.param(WARPGROUPS, changed(r"fence\.proxy\.async", 0), id="activations fenced"),
        pytest.param(WARPGROUPS, changed(r"bar\.warp\.sync", 0), id="activations of warpgroups in order"),
        pytest.param(WARPGROUPS, changed(WAIT, -2, PASSED), id="activations of warpgroups there"),
        pytest.param(WARPGROUPS, changed(r"bar\.warp\.sync", 1), id="codes read beside warpgroups"),
        pytest.param(WARPGROUPS, freed_early, id="codes loaded beside warpgroups"),
        pytest.param(WARPGROUPS, MMAS_UNAWAITED, id="MMAs of a cluster done"),
        pytest.param(WARPGROUPS, changed(WAIT, -1, PASSED), id="sums of peers of warpgroups there"),
        pytest.param(PAIRS, half_a_team, id="activations of both warps there"),
        pytest.param(CODES, changed(WAIT, -4, PASSED), id="stage free for codes of activations"),
        pytest.param(CODES, changed(r"fence\.proxy\.async", 1), id="codes of activations fenced"),
        pytest.param(CODES, changed(r"bar\.warp\.sync", 0), id="codes of activations in order"),
        pytest.param(CODES, changed(WAIT, -2, PASSED), id="codes of activations there"),
        pytest.param(CODES, changed(r"fence\.proxy\.async", -1), id="codes loaded"),
        pytest.param(CODES, changed(r"bar\.warp\.sync", -2), id="codes read beside those of activations"),
        pytest.param(CODES, changed(r"bar\.warp\.sync", -1), id="factors read"),
        pytest.param(CODES, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs of codes done"),
        pytest.param(SUMS_READ, unmet(0), id="sums left by peers"),
        pytest.param(SUMS_READ, unmet(1), id="sums read by peers"),
    ],
)
def test_what_orders_a_gemm_by_warpgroups_is_needed(one: Wgmma, edit: Any) -> None:
    """Without it the emulator finds a race, or the sums are wrong; in some order, where others may come out right."""
    with pytest.raises((EmulationError, AssertionError)):
        check_in_orders(multiply_by_warpgroups, one, 6, edit)


@pytest.mark.parametrize("one", [STAGES_AGAIN, SHARED_SUMS, WARPS, PORTIONS, WARPGROUPS, PAIRS, CODES, SUMS_READ])
def test_what_orders_a_gemm_by_warpgroups_is_enough(one: Wgmma) -> None:
    check_in_orders(multiply_by_warpgroups, one, 2)
