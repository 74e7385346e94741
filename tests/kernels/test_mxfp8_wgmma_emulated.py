"""The MXFP8 kernel by wgmma, executed in the PTX emulator and compared with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples.grouped_mm_fp8 import contiguous, masked, with_mx_scales
from samples.mm_fp8_block import mx_sample
from support.emulated import CPU, PASSED, WAIT, changed, to_prefetch
from support.epilogues import finished, finished_by_expert, operands
from support.fp8_runs import ExpertRun as Run
from support.kernel_grid import BF16, FP16, FP32, FP8GemmCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import run_kernel
from ptx_emulator.memory import Deadlock
from torch_cute_ops.formats.fp4 import UE8M0_NAN
from torch_cute_ops.gemm.backends.fp8_mma_sync import mx_words_of
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.mxfp8_wgmma import Arguments
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

grouped_mm_fp8 = OPS["grouped_mm_fp8"].reference
mm_fp8_block = OPS["mm_fp8_block"].reference
POISON = 777.0


def fold(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the folded elements of MXFP8 rows (..., K), whose linear scales are bytes, and their scales (..., ⌈K/128⌉)
    float32, computed in float64."""
    rows, k = codes.shape[:-1], codes.shape[-1]
    grouped = torch.nn.functional.pad(scale, (0, -(k // 32) % 4)).view(*rows, -1, 4)
    largest = grouped.amax(-1)
    below = (largest[..., None].double() - grouped).flatten(-2)[..., : k // 32].repeat_interleave(32, -1)
    folded = (codes.double() * torch.exp2(-below)).float().to(torch.float8_e4m3fn)
    powers = torch.where(largest == UE8M0_NAN, torch.nan, torch.exp2(largest.double() - 127)).float()
    return folded, powers


def case(layout: str, tile: tuple[int, int, int], *epilogue: Any, **hints: bool) -> FP8GemmCase:
    return FP8GemmCase("mxfp8_wgmma", layout, tile, Epilogue(*epilogue), **hints)


RUNS = [
    # More k tiles than stages, half a k tile at the end, several tiles per CTA, and rows and columns that do not exist
    Run(case("plain", (16, 128, 1), FP32), (3,), 136, 1728, 1, seed=None),
    Run(case("plain", (128, 128, 1), BF16, "column", BF16), (130,), 264, 1216, 2, seed=1),
    Run(case("plain", (128, 128, 1), FP32), (70,), 72, 64, 1),
    Run(case("plain", (128, 64, 1), FP32, "column", FP32), (140,), 200, 640, 2, seed=1),
    Run(case("plain", (64, 128, 1), FP16, "one"), (77,), 200, 1344, 1, seed=2),
    Run(case("plain", (32, 64, 1), BF16, "column", FP32), (19,), 200, 1344, 2),
    # Split-K
    Run(case("plain", (16, 128, 4), BF16, "column", BF16), (5,), 136, 896, 4, seed=None),
    Run(case("plain", (64, 64, 2), FP32), (77,), 136, 448, 4, seed=3),
    Run(case("plain", (32, 128, 6), FP32), (20,), 136, 384, 6),
    # Experts
    Run(case("counted", (16, 128, 1), BF16), (5, 0, 40, 17), 392, 256, 1, seed=4),
    Run(case("offsets", (64, 128, 1), FP32, "expert"), (64, 80), 264, 192, 2),
    Run(case("masked", (32, 128, 2), FP16, "one"), (3, 0, 30), 136, 640, 4, room=36),
    # The second warpgroup has rows in the first tile, no rows in the second, and rows again in the third.
    Run(case("counted", (128, 128, 1), FP32, "expert_column", FP32), (70, 3, 130), 136, 256, 1, seed=2),
    Run(case("masked", (128, 128, 1), BF16), (3, 0, 70), 264, 1472, 1, seed=3, room=74),
    # The producer reads a static weight early and prefetches into L2.
    Run(case("plain", (16, 128, 1), FP32, static_weight=True, prefetches=True), (19,), 264, 640, 2, seed=1),
]


def execute(run: Run, bad: bool = False, edit: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result, which is poison in rows that no expert owns. All sums
    are exact. If ``bad``, some scales are NaN or far below the other scales of their group."""
    torch.manual_seed(run.n + run.k)
    layout, epilogue, sizes = run.case.layout, run.case.epilogue, (run.n, run.k, CPU)
    offsets = counts = None
    if layout == "plain":
        a, b, a_scale, b_scale = mx_sample("", *run.counts, *sizes, exact=True, layout="linear").args
    else:
        if layout == "masked":
            one = masked("", run.counts, run.room, *sizes, exact=True)
        else:
            one = contiguous("", run.counts, *sizes, alignment=4, spare=3, counted=layout == "counted", exact=True)
        a, b, a_scale, b_scale, *rest = with_mx_scales(one, "linear", exact=True).args
        offsets, counts = rest or (None, one.kwargs["counts"])
    if bad:
        a_scale[0, 0], b_scale[1, 1] = UE8M0_NAN, UE8M0_NAN
        b_scale[-1, 0], b_scale[2, 1] = 100, 0
    folded, powers = fold(a, a_scale)
    weight, _ = fold(b.mT, b_scale)
    if layout == "plain":
        alpha, bias = operands(epilogue, run.n)
        blocks = b_scale
        if bad:  # the kernel multiplies folded weights, with the scales of their groups
            blocks = torch.nn.functional.pad(b_scale, (0, -(run.k // 32) % 4)).view(run.n, -1, 4).amax(-1)
            blocks = blocks.repeat_interleave(4, 1)[:, : run.k // 32]
        sums = mm_fp8_block(a, weight.t() if bad else b, a_scale, blocks, out_dtype=FP32)
        want = finished(sums, epilogue, alpha, bias)
    else:
        alpha, bias = operands(epilogue, run.n, len(run.counts))
        sums = grouped_mm_fp8(a, b, a_scale, b_scale, offsets, counts, out_dtype=FP32)
        want = finished_by_expert(sums, offsets, counts, epilogue, alpha, bias, POISON)
    out = torch.full_like(want, POISON)
    *lead, blocks_of_row = powers.shape
    scales = powers.reshape(-1, blocks_of_row).t().contiguous().view(-1, *lead).movedim(0, -1)
    words = mx_words_of(b_scale, b.mT.shape)
    prefetched = to_prefetch(run.case)
    given = Arguments(folded, b, scales, words, offsets, counts, alpha, bias, out, prefetched, run.max_ctas)
    run_kernel(run.case.kernel, ARCHS[run.case.arch], *given, seed=run.seed, strict=True, scoped=True, edit=edit)
    return out, want


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_results(run: Run) -> None:
    """Check results bit for bit. Folding is exact for whole numbers, because the scales of a group are less than 2^9
    apart."""
    got, want = execute(run)
    assert torch.equal(got, want)


def test_folded_weights() -> None:
    """Check results bit for bit if scales are NaN, or so far apart that folding rounds elements."""
    got, want = execute(RUNS[0], bad=True)
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


# More k tiles than stages, with and without swap_ab
SWAPPED = Run(case("plain", (16, 64, 1), BF16), (5,), 72, 1408, 1)
MANY = Run(case("counted", (128, 64, 1), BF16), (130, 3), 40, 1152, 1)
EDITS = {
    "folded before the MMAs": changed(r"fence\.proxy\.async", 0),
    "scales stored": changed(r"bar\.warp\.sync", 0),
    "folded by all lanes": changed(r"bar\.warp\.sync", 3),
    "MMAs done": changed(r"wgmma\.wait_group\.sync\.aligned", None),
    "all waits": changed(WAIT, None, PASSED),
}
WAITS = 8


@pytest.mark.parametrize("run", [SWAPPED, MANY], ids=["swapped", "many"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_orders_it_is_needed(run: Run, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of warps, if ``edit`` removes or changes
    instructions that order memory accesses."""
    assert is_found(run, edit)


@pytest.mark.parametrize("wait", range(WAITS))
def test_every_wait_is_needed(wait: int) -> None:
    """Check that each wait of the producer, the scale loaders, the decoders and the consumers is needed."""
    assert is_found(MANY, changed(WAIT, wait, PASSED))


def test_those_are_all_waits() -> None:
    with pytest.raises(IndexError):
        execute(MANY, edit=changed(WAIT, WAITS, PASSED))


@pytest.mark.parametrize("run", [SWAPPED, MANY], ids=["swapped", "many"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_orders_it_is_enough(run: Run, seed: int | None) -> None:
    got, want = execute(run._replace(seed=seed))
    assert torch.equal(got, want)


def is_found(run: Run, edit: Any) -> bool:
    """Return True if the emulator finds a race or a wrong result, in some order of warps."""
    for seed in (None, 0, 1, 2):
        try:
            got, want = execute(run._replace(seed=seed), edit=edit)
        except (EmulationError, Deadlock):
            return True
        if not torch.equal(got, want):
            return True
    return False
