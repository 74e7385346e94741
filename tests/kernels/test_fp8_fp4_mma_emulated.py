"""FP8 x FP4 GEMMs by mma.sync, run thread by thread in the PTX emulator and compared with exact sums.

No GPU of compute capability 12 was available: these tests are the only evidence of the kernels' results there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.emulated import changed
from support.fp8_runs import ExpertRun as Run
from support.host_grids import check_ctas, check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, FP8FP4MmaCase
from test_fp8_fp4_tcgen05_emulated import execute

from ptx_emulator import EmulationError
from ptx_emulator.memory import Deadlock
from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS


def case(
    layout: str, scales: str | None, fmt: FP4Format, tile_m: int, *epilogue: Any, arch: str = "sm_120a"
) -> FP8FP4MmaCase:
    return FP8FP4MmaCase(layout, scales, fmt, tile_m, Epilogue(*epilogue), arch)


def interleaved(layout: str, fmt: FP4Format, tile_m: int, *epilogue: Any, arch: str = "sm_120a") -> FP8FP4MmaCase:
    """Return a case with interleaved activations and prepared scales of the weight."""
    return FP8FP4MmaCase(layout, None, fmt, tile_m, Epilogue(*epilogue), arch, is_interleaved=True)


# Launches with partial tiles along M and N, last k tiles of 64 elements, more k tiles than stages, several tiles for
# each CTA, and experts without rows
COVERING = [
    Run(case("plain", "128x4", NVFP4, 16, FP32, "column", FP32), (19,), 136, 704),
    Run(case("plain", "linear", MXFP4, 16, BF16, "column", BF16), (5,), 72, 192),
    Run(case("masked", "linear", NVFP4, 16, FP16, "expert_column"), (3, 0, 20), 136, 320, room=21),
    Run(case("offsets", "128x4", MXFP4, 64, FP32, "expert_column", FP32), (65, 0, 3), 136, 192),
    Run(case("counted", "linear", NVFP4, 64, BF16, "expert"), (3, 0, 70), 72, 640, 2),
    Run(case("plain", None, NVFP4, 16, BF16, "column", BF16), (19,), 136, 704, 2),
    Run(case("counted", None, MXFP4, 16, FP32, "expert", FP32), (17, 0, 3), 72, 192),
    Run(case("plain", None, MXFP4, 64, FP16, "column", FP16), (70,), 136, 192, has_one_scale=True),
    Run(interleaved("plain", NVFP4, 16, FP32, "one", FP32), (19,), 136, 704),
    Run(interleaved("masked", MXFP4, 16, BF16, "expert_column", BF16), (3, 0, 20), 72, 320, 2, room=21),
    Run(interleaved("offsets", NVFP4, 64, BF16, "expert_column", FP32), (65, 3), 72, 448),
    Run(case("plain", "128x4", MXFP4, 16, BF16, arch="sm_90a"), (3,), 72, 64),
    Run(interleaved("plain", MXFP4, 64, BF16, "column", arch="sm_100a"), (3,), 72, 64),
]
# All scale bytes: negative and NaN scales, zeros, and blocks whose numbers are subnormal or zero in e4m3
VALUES = [
    Run(case("plain", "128x4", NVFP4, 16, FP32), (16,), 136, 448, scales=tuple(range(256))),
    Run(case("plain", "linear", MXFP4, 16, FP32), (16,), 136, 448, scales=(0, *range(100, 130), 255)),
    Run(case("plain", None, NVFP4, 16, FP32), (16,), 136, 448, scales=tuple(range(128))),
    Run(interleaved("plain", MXFP4, 16, FP32), (16,), 136, 448, scales=(0, *range(100, 130), 255)),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in (*COVERING, *VALUES)])
def test_gemm(run: Run) -> None:
    """Check that results equal the exact sums bit for bit. Rows of padding are neither used nor written."""
    got, want = execute(run, seed=1, late=True)
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in COVERING])
def test_compiles_without_spills(run: Run) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize("covering", [0, 2, 7])
def test_nothing_is_launched_on_overlap(covering: int) -> None:
    one = COVERING[covering].case
    check_nothing_is_launched_on_overlap(one.kernel, ARCHS[one.arch])


@pytest.mark.parametrize(("covering", "sms", "ctas"), [(0, 170, 19 * 4), (0, 7, 7), (7, 170, 5 * 4)])
def test_ctas(covering: int, sms: int, ctas: int) -> None:
    """Check the number of CTAs for M = 300 and N = 400: one for each tile, but at most ``max_ctas``."""
    check_ctas(COVERING[covering].case, ctas, n=400, rows=300, k=256, max_ctas=sms)


# A CTA with several tiles, and more k tiles than stages
BLOCKS = Run(case("plain", "linear", MXFP4, 16, BF16), (19,), 136, 704)
TOKENS = Run(interleaved("plain", NVFP4, 16, BF16), (19,), 136, 704)


@pytest.mark.parametrize("run", [BLOCKS, TOKENS], ids=["blocks", "tokens"])
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(changed(r"cp\.async\.wait_group", None), id="copies there"),
        pytest.param(changed(r"bar\.sync\s+0", 1), id="k tile and scales there for all"),
        pytest.param(changed(r"bar\.sync\s+0", 2), id="last k tile read"),
    ],
)
def test_what_orders_it_is_needed(run: Run, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes a wait."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        for seed in (None, 0, 1):
            got, want = execute(run, seed, edit)
            assert torch.equal(got, want)
