"""Kernels of the first FP4 GEMM of experts, with its gate, by tcgen05, executed in the PTX emulator.

We had no GPU with these instructions, so these tests are the only evidence that the kernels' results are correct.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.emulated import KERNEL_WAIT, changed
from support.gated_gemm import HALF, Gated, check, operands, results
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, Tcgen05GatedCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.runtime.arch import ARCHS

LINEAR, TILED, SMALL = SCALE_LAYOUTS["linear"], SCALE_LAYOUTS["128x4"], SCALE_LAYOUTS["8x4"]


def gated(*case: Any, epilogue: tuple[Any, ...], sizes: tuple[Any, ...], seed: int | None = 0) -> Gated:
    """Return a launch. ``case`` is format, layout and tile_n; ``sizes`` are M, K, experts, columns of an expert, kind
    of routing, and number of CTAs."""
    return Gated(Tcgen05GatedCase(*case, epilogue, stages=3), *sizes, seed, HALF)


# Launches with partial tiles along M and K; with several token blocks; with experts whose columns of up begin inside a
# scale tile; with more experts than a word has bits; with more k tiles than stages; and with at least three work tiles
# per CTA
COVERING = [
    gated(
        *(NVFP4, "128x4", 128),
        epilogue=(NVFP4, TILED, "expert_half", FP32, "expert", "swiglu"),
        sizes=(5, 1088, 3, 64, "few", 2),
    ),
    gated(
        *(NVFP4, "128x4", 64),
        epilogue=(NVFP4, SMALL, "expert", None, "one", "swiglu"),
        sizes=(2, 64, 70, 64, "few", 3),
        seed=1,
    ),
    gated(
        *(NVFP4, "linear", 256),
        epilogue=(NVFP4, LINEAR, None, FP32, "one", "swiglu", True),
        sizes=(130, 320, 3, 128, "hot", 2),
        seed=2,
    ),
    gated(
        *(MXFP4, "128x4", 64), epilogue=(MXFP4, TILED, None, BF16, None, "swiglu"), sizes=(40, 832, 2, 192, "one", 2)
    ),
    gated(
        *(MXFP4, "linear", 128), epilogue=(BF16, None, "expert", None, None, "relu2"), sizes=(3, 640, 4, 64, "few", 1)
    ),
    gated(*(NVFP4, "128x4", 64), epilogue=(FP16, None, None, None, None, "swiglu"), sizes=(1027, 64, 2, 64, "few", 3)),
    gated(*(NVFP4, "128x4", 64), epilogue=(NVFP4, TILED, None, None, None, "swiglu"), sizes=(3, 128, 2, 64, "none", 2)),
]
MORE = [
    gated(fmt, layout, tile_n, epilogue=(out, layout_of_out, alpha, bias, None, "swiglu"), sizes=sizes, seed=i)
    for i, (fmt, layout, tile_n) in enumerate(
        (fmt, layout, tile_n) for fmt in (NVFP4, MXFP4) for layout in ("128x4", "linear") for tile_n in (64, 128, 256)
    )
    for out, layout_of_out, alpha, bias in ((fmt, TILED, "expert", FP32), (BF16, None, None, None))
    for sizes in ((300, 640, 3, 256, "few", 5), (17, 1152, 5, 128, "dense", 3), (1, 256, 40, 128, "few", 148))
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "one" in metafunc.fixturenames:
        cases = COVERING + (MORE if metafunc.config.getoption("more_emulated") else [])
        metafunc.parametrize("one", [pytest.param(case, id=case.id) for case in cases])


def test_gated_gemm(one: Gated) -> None:
    """Check that the results equal the reference's bit for bit. Scales and biases of experts without a token are NaN,
    and results of pairs that are not routed stay unchanged."""
    check(one)


def test_compiles_without_spills(one: Gated) -> None:
    """Check that the kernels spill no registers and fit an SM. ``test_compile_kernels`` does not check the kernels that
    this file checks."""
    check_emulated(one.case, one.case.kernel)


def test_every_launch_waits_for_the_one_before() -> None:
    """Check that each role waits for the previous kernel, and that the tests notice if a wait is missing."""
    one = COVERING[0]
    waits = re.findall(KERNEL_WAIT, compile_ptx(one.case.kernel_for(one.k), ARCHS[one.case.arch]).ptx)
    assert len(waits) == 4  # the kernel of the lists; the producer, the MMA thread and the epilogue of the GEMM
    for number in range(len(waits)):
        with pytest.raises((EmulationError, AssertionError)):
            check(one, changed(KERNEL_WAIT, number))


def test_a_row_does_not_depend_on_the_others() -> None:
    """Check that a token's results equal those of the token alone, although all tokens of an m tile are multiplied."""
    one = COVERING[2]
    given = operands(one, is_exact=False)
    got = results(one, given)
    case = one.case
    alone = given._replace(
        routing=given.routing[7:8],
        a=given.a[7:8],
        a_scale=given.a_scale[7:8],
        row_scale=None if given.row_scale is None else given.row_scale[7:8],
    )
    single = results(one._replace(m=1, num_ctas=3, seed=3), alone)
    assert case.layout == "linear" and (given.routing[7] != 0).any()
    for among, only in zip(got, single, strict=True):
        assert torch.equal(among.view(torch.uint8)[7], only.view(torch.uint8)[0])
