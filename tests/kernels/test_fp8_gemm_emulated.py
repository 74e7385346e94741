"""Kernels of FP8 GEMMs, executed in the PTX emulator and compared with exact sums."""

import dataclasses
import random
import re
from typing import Any, NamedTuple

import pytest
import torch
from samples._fp8_gemm import NAN, with_row_scales
from samples.grouped_mm_fp8 import contiguous, masked
from samples.mm_fp8_block import sample
from support.emulated import (
    ACQUIRE,
    CPU,
    PASSED,
    RELEASE,
    WAIT,
    changed,
    check_prefetched,
    check_read_ahead,
    check_static_weight,
    to_prefetch,
    told_twice,
    written_late,
)
from support.epilogues import finished, finished_by_expert, operands
from support.host_grids import check_nothing_is_launched_on_overlap, gemm_call, grids
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP8_LAYOUTS, FP16, FP32, FP8GemmCase
from support.kernel_grid.fp8_gemms import MMA_FAMILIES

from ptx_emulator import EmulationError
from ptx_emulator.adapter import run_kernel
from ptx_emulator.memory import Deadlock
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp8_wgmma import Arguments
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

grouped_mm_fp8 = OPS["grouped_mm_fp8"].reference
mm_fp8_block = OPS["mm_fp8_block"].reference

POISON = 777.0
"""Value that no kernel writes, so that unwritten elements are detected."""


class Run(NamedTuple):
    """Launch of a kernel.

    Attributes:
        case: kernel.
        counts: number of rows of each expert.
        n, k, max_ctas: N and K of the GEMM, and the largest number of CTAs.
        seed: seed of the order of the emulator's warps.
        room: number of rows reserved for each expert in the masked layout.
    """

    case: FP8GemmCase
    counts: tuple[int, ...]
    n: int
    k: int
    max_ctas: int
    seed: int | None = 0
    room: int = 0

    @property
    def id(self) -> str:
        counts = self.counts if len(self.counts) < 10 else (sum(self.counts), "of", len(self.counts))
        return f"{self.case.id}-{'+'.join(map(str, counts))}x{self.n}x{self.k}-{self.max_ctas}"

    @property
    def sample(self) -> Any:
        """Call with whole numbers and scales that are powers of two, with NaN in rows of padding."""
        torch.manual_seed(self.n)
        layout = self.case.layout
        if layout == "plain":
            one = sample("", *self.counts, self.n, self.k, CPU, exact=True)
        elif layout == "masked":
            one = masked("", self.counts, self.room, self.n, self.k, CPU, exact=True)
        else:
            counted = layout == "counted"
            one = contiguous("", self.counts, self.n, self.k, CPU, exact=True, spare=9, counted=counted)
        return with_row_scales(one, exact=True) if self.case.family.endswith("-rows") else one


def execute(
    run: Run,
    edit: Any = None,
    late: tuple[str, ...] | None = None,
    offsets_given: list[int] | None = None,
    offsets_used: list[int] | None = None,
    **changes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result, which is poison in rows that no expert owns.

    Args:
        run: launch.
        edit: function that changes the PTX, or None.
        late: names of the arguments that a simulated previous kernel writes at the last moment.
        offsets_given, offsets_used: offsets out of range, and the valid offsets to which the kernel must clip them.
        changes: fields of the configuration to change.
    """
    a, b, a_scale, b_scale, offsets, counts = operands_of(run)
    has_block_scales = not run.case.family.endswith("-alpha")
    if not has_block_scales:
        b_scale.fill_(1.0)
    if offsets_used is not None:
        offsets = torch.tensor(offsets_used, dtype=torch.int32).clamp(max=len(a))
    case, epilogue = run.case, run.case.epilogue
    if case.layout == "plain":
        alpha, bias = operands(epilogue, run.n)
        want = finished(mm_fp8_block(a, b, a_scale, b_scale, out_dtype=FP32), epilogue, alpha, bias)
    else:
        alpha, bias = operands(epilogue, run.n, len(b))
        sums = grouped_mm_fp8(a, b, a_scale, b_scale, offsets, counts, out_dtype=FP32)
        want = finished_by_expert(sums, offsets, counts, epilogue, alpha, bias, POISON)
    out = torch.full_like(want, POISON)
    if offsets_given is not None:
        offsets = torch.tensor(offsets_given, dtype=torch.int32)
    kernel, arch = case.kernel, ARCHS[case.arch]
    if changes:
        kernel = type(kernel)(dataclasses.replace(kernel.config, **changes))
        assert kernel.config.reason_unsupported(arch) is None
    prefetched = to_prefetch(case)
    scales = a_scale, b_scale if has_block_scales else None
    given = Arguments(a, b, *scales, offsets, counts, alpha, bias, out, prefetched, run.max_ctas)
    given, written = written_late(given, late or ())
    before = None if late is None else written
    machines = run_kernel(
        kernel, arch, *given, seed=run.seed, strict=True, scoped=True, edit=edit, written_before=before
    )
    check_prefetched(machines, prefetched)
    return out, want


def operands_of(run: Run) -> list[torch.Tensor | None]:
    """Return ``a``, ``b``, their scales, offsets and counts. In memory, NaN follows the weight of each expert."""
    args = list(run.sample.args)
    if run.case.layout == "plain":
        return [*args, None, None]
    experts, k, n = args[1].shape
    poisoned = torch.full((experts, n + 1, k), NAN, dtype=torch.uint8)
    poisoned[:, :n] = args[1].mT.view(torch.uint8)
    args[1] = poisoned.view(torch.float8_e4m3fn)[:, :n].mT
    return [*args, None, run.sample.kwargs["counts"]] if run.case.layout == "masked" else args


def wgmma(layout: str, tile: tuple[int, int, int], *epilogue: Any) -> FP8GemmCase:
    return FP8GemmCase("fp8_wgmma", layout, tile, Epilogue(*epilogue))


def by_row(layout: str, tile: tuple[int, ...], *epilogue: Any, arch: str = "sm_90a") -> FP8GemmCase:
    """Return a case with a block scale for each weight row and 128 elements."""
    family = "fp8_wgmma-rows" if arch == "sm_90a" else "fp8_mma-rows"
    return FP8GemmCase(family, layout, tile, Epilogue(*epilogue), arch)


def in_alpha(layout: str, tile: tuple[int, ...], *epilogue: Any) -> FP8GemmCase:
    """Return a case in which the weight has no block scales."""
    return FP8GemmCase("fp8_wgmma-alpha", layout, tile, Epilogue(*epilogue))


def prefetching(*given: Any) -> FP8GemmCase:
    """Return a case with a prefetch into L2."""
    return dataclasses.replace(wgmma(*given), prefetches=True)


def mma(layout: str, tile: int | tuple[int, int], *epilogue: Any, arch: str) -> FP8GemmCase:
    return FP8GemmCase("fp8_mma", layout, tile if isinstance(tile, tuple) else (tile,), Epilogue(*epilogue), arch)


def many(case: FP8GemmCase) -> FP8GemmCase:
    """Return the case with room for up to ``MAX_EXPERTS`` experts."""
    return dataclasses.replace(case, max_experts=MAX_EXPERTS)


# Runs with partial tiles, experts without rows, several tiles per CTA, and more k tiles than stages. Kernels with tiles
# of 128 rows take 3 s to compile, so each serves several runs.
RUNS = [
    Run(wgmma("plain", (16, 128, 1), FP32), (3,), 136, 1664, 1, seed=None),
    Run(wgmma("plain", (128, 128, 1), FP16, None, FP16), (130,), 264, 640, 2),
    Run(wgmma("offsets", (16, 128, 1), FP16, "one"), (16, 0, 23), 264, 256, 3),
    Run(wgmma("counted", (32, 128, 1), BF16), (0, 33, 1), 72, 384, 2, seed=1),
    Run(wgmma("masked", (64, 128, 1), BF16, "expert_column"), (3, 0, 70), 136, 256, 4, room=72),
    Run(wgmma("masked", (16, 128, 1), BF16), (0, 0), 136, 256, 2, room=8),
    # Many tiles of two k tiles each, which together fill the stages of the pipeline four times
    Run(wgmma("counted", (16, 128, 1), BF16), (5, 0, 40, 17), 392, 256, 1, seed=4),
    Run(wgmma("counted", (128, 128, 1), BF16), (3, 130, 0), 136, 896, 2, seed=2),
    Run(wgmma("offsets", (128, 128, 1), FP16), (64, 80), 264, 128, 2),
    # The second warpgroup has rows in the first tile, no rows in the second, and rows again in the third. A tile has
    # two k tiles.
    Run(wgmma("counted", (128, 128, 1), FP32, "expert_column", FP32), (70, 3, 130), 136, 256, 1),
    Run(wgmma("masked", (128, 128, 1), FP32), (3, 0, 70), 264, 1664, 1, seed=3, room=74),
    Run(wgmma("plain", (128, 64, 1), BF16, "column"), (140,), 200, 640, 2, seed=1),
    Run(wgmma("counted", (128, 64, 1), FP32), (3, 0, 130), 168, 384, 4),
    Run(wgmma("plain", (16, 128, 2), BF16, "column", BF16), (5,), 136, 896, 2, seed=None),
    Run(wgmma("counted", (16, 128, 4), FP32, "expert_column", FP32), (3, 0, 30), 264, 640, 4, seed=1),
    Run(wgmma("masked", (64, 128, 2), FP16, "expert"), (3, 0, 70), 264, 128, 2, room=74),
    Run(wgmma("offsets", (32, 128, 4), BF16, "one", FP32), (0, 32), 392, 1920, 8),
    # Each consumer warpgroup multiplies half of the rows of a
    Run(wgmma("plain", (16, 64, 1), BF16, "column", FP32), (11,), 200, 640, 2),
    Run(wgmma("plain", (16, 64, 2), FP32), (3,), 136, 896, 2, seed=2),
    Run(wgmma("plain", (64, 64, 2), FP16, "one", FP16), (77,), 136, 384, 4, seed=None),
    Run(wgmma("counted", (32, 64, 2), BF16, "expert_column"), (0, 35, 9), 72, 384, 2, seed=1),
    Run(mma("plain", 16, FP32, "one", FP32, arch="sm_120a"), (19,), 136, 768, 2),
    Run(mma("counted", 64, BF16, "expert_column", FP32, arch="sm_100a"), (65, 0, 9), 264, 128, 3, seed=None),
    Run(mma("masked", 64, FP16, arch="sm_120a"), (3, 0, 70), 136, 384, 2, seed=1, room=72),
    Run(mma("offsets", 16, BF16, "expert", BF16, arch="sm_90a"), (16, 0, 5), 72, 640, 1),
    # Alpha and bias per column, in tiles with and without swap_ab
    Run(wgmma("plain", (16, 128, 1), BF16, "column", BF16), (19,), 200, 128, 2),
    Run(wgmma("masked", (32, 128, 1), FP32, "expert_column", FP32), (3, 0, 20), 136, 128, 2, room=24),
    Run(wgmma("offsets", (128, 64, 1), BF16, "expert_column", BF16), (70, 3), 136, 128, 2),
    Run(wgmma("plain", (128, 128, 1), FP16, None, FP16), (70,), 136, 128, 2),
    # The last k tile, or the only one, contains 64 elements. The second run uses 2,880 columns, as in gpt-oss
    Run(wgmma("plain", (16, 128, 1), BF16, "column", BF16), (5,), 136, 1344, 1),
    Run(wgmma("counted", (16, 128, 1), BF16), (3, 0, 2), 2880, 64, 3, seed=1),
    Run(wgmma("offsets", (128, 128, 1), FP16), (70, 9), 136, 448, 1, seed=2),
    Run(wgmma("masked", (64, 128, 4), FP32), (3, 70), 72, 576, 4, room=72),
    Run(wgmma("plain", (128, 64, 1), BF16, "column"), (130,), 72, 64, 2),
    Run(mma("masked", 64, FP32, arch="sm_120a"), (70, 1), 136, 320, 2, room=72),
    Run(mma("plain", 16, BF16, arch="sm_90a"), (19,), 72, 64, 1),
    # A run with more experts than the usual table has room for
    Run(many(wgmma("offsets", (16, 128, 1), BF16)), (0,) * 510 + (17, 0, 3, 1), 72, 128, 2, seed=1),
    Run(many(mma("counted", 16, BF16, arch="sm_120a")), (2, *(0,) * 515, 19, 0), 72, 64, 2),
    # Runs with several tiles per CTA, and with clusters in which one CTA gets no k tile
    Run(prefetching("plain", (16, 128, 1), FP32), (19,), 264, 640, 2, seed=1),
    Run(prefetching("plain", (64, 128, 2), BF16, "column", BF16), (70,), 136, 128, 4),
    # Block scales of each weight row
    Run(by_row("plain", (16, 128, 1), FP32), (3,), 136, 1728, 1, seed=None),
    Run(by_row("plain", (128, 128, 1), FP32, "column", FP32), (130,), 264, 1216, 2, seed=1),
    Run(by_row("counted", (128, 128, 1), FP16), (3, 130, 0), 136, 896, 2, seed=2),
    Run(by_row("masked", (128, 64, 1), FP32), (3, 0, 130), 168, 320, 4, room=134),
    Run(by_row("offsets", (64, 128, 1), BF16, "expert_column", FP32), (64, 0, 80), 264, 192, 2),
    Run(by_row("plain", (32, 64, 2), BF16, "column", BF16), (19,), 200, 448, 4, seed=3),
    Run(by_row("plain", (16,), BF16, "column", BF16, arch="sm_120a"), (19,), 136, 832, 2, seed=1),
    Run(by_row("masked", (32,), FP32, arch="sm_100a"), (3, 0, 70), 136, 320, 2, room=72),
    Run(by_row("counted", (32, 2), FP16, "expert_column", arch="sm_120a"), (33, 0, 9), 264, 448, 4, seed=2),
    # A scale of each weight row, which is part of alpha
    Run(in_alpha("plain", (128, 128, 1), BF16, "column", BF16), (130,), 264, 1216, 2, seed=1),
    Run(in_alpha("masked", (128, 64, 1), FP32, "expert_column", FP32), (3, 0, 130), 168, 320, 4, room=134),
    # Clusters of mma.sync: more k tiles than stages, several tiles per cluster, and CTAs without a k tile
    Run(mma("plain", (16, 2), BF16, "column", BF16, arch="sm_120a"), (19,), 136, 1408, 2, seed=1),
    Run(mma("counted", (64, 4), FP32, "expert_column", FP32, arch="sm_120a"), (65, 0, 9), 264, 320, 4, seed=None),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_gemm(run: Run) -> None:
    """Check that results equal the expected results bit for bit. Rows of padding are neither used nor written, and
    memory after K, after the columns, and after alpha and bias is not read."""
    got, want = execute(run)
    assert torch.equal(got, want)


END = 10**6
WRONG_OFFSETS = {
    "negative": ([-3, 5, 16], [0, 5, 16]),
    "least": ([-(2**31), 4, 16], [0, 4, 16]),
    "beyond": ([0, 7, 2**31 - 1], [0, 7, END]),
    "descending": ([12, 4, 16], [4, 4, 16]),
    "all-beyond": ([100, 2**30, 2**31 - 1], [END, END, END]),
}
"""Offsets out of range, and the offsets to which they must be clipped, for 16 rows of 2 experts and padding up to
END."""


@pytest.mark.parametrize(("given", "used"), [pytest.param(*each, id=name) for name, each in WRONG_OFFSETS.items()])
@pytest.mark.parametrize("family", ["fp8_wgmma", "fp8_mma"])
def test_wrong_offsets(family: str, given: list[int], used: list[int]) -> None:
    """Check that a GEMM reads and writes only rows inside its buffers, whatever the offsets are."""
    tiles = {"fp8_wgmma": wgmma("offsets", (16, 128, 1), BF16), "fp8_mma": mma("offsets", 16, BF16, arch="sm_120a")}
    run = Run(tiles[family], (7, 9), 72, 128, 2)
    out, want = execute(run, offsets_given=given, offsets_used=used)
    assert torch.equal(out.nan_to_num(POISON), want.nan_to_num(POISON))  # padding rows are NaN


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_compiles_without_spills(run: Run) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize("family", ["fp8_wgmma", "fp8_mma"])
def test_nothing_is_launched_on_overlap(family: str) -> None:
    """Check that nothing is launched if the result overlaps any other tensor of a call, including alpha and bias per
    expert."""
    case = next(run.case for run in RUNS if (run.case.family, run.case.epilogue.alpha) == (family, "expert_column"))
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


def kind_of(case: FP8GemmCase) -> str:
    """Return a name for the way in which a kernel divides a GEMM among CTAs."""
    if case.family in MMA_FAMILIES:
        return "warps" + case.family.removeprefix("fp8_mma")
    tile_m, _, split_k = case.tile
    scales = case.family.removeprefix("fp8_wgmma")
    return ("split k" if split_k > 1 else "many rows" if tile_m == 128 else "few rows") + scales


GRIDS = {f"{run.case.layout} {kind_of(run.case)}": run.case for run in RUNS}


@pytest.mark.parametrize("max_ctas", [4, 132])
@pytest.mark.parametrize("name", GRIDS)
def test_as_many_ctas_as_tiles(name: str, max_ctas: int) -> None:
    """Check that a launch consists of whole clusters and of ``max_ctas`` CTAs, or of fewer if each tile still gets a
    cluster, however many rows the experts own."""
    case = GRIDS[name]
    kernel, layout = case.kernel, case.layout
    tile_m, tile_n, split_k = (case.tile[0], 128, *case.tile[1:], 1)[:3] if case.family in MMA_FAMILIES else case.tile
    for _ in range(10):
        experts = 1 if layout == "plain" else random.randint(1, 20)
        n, room = random.randint(1, 80) * 8, random.randint(1, 300)
        counts = [random.randint(0, room) for _ in range(experts)]
        counts[0] = max(counts[0], 1)
        rows = room if layout == "masked" else sum(counts)
        call = gemm_call(kernel, n=n, rows=rows, experts=experts, b_scale_rows=-(-n // 128), max_ctas=max_ctas)
        ((ctas, *rest),) = grids(kernel, ARCHS[case.arch], *call)
        tiles = sum(-(-count // tile_m) for count in counts) * -(-n // tile_n)
        assert rest == [1, 1] and ctas % split_k == 0 and 0 < ctas <= max_ctas
        assert ctas == max_ctas or ctas // split_k >= tiles
        assert layout != "plain" or ctas == min(max_ctas // split_k, tiles) * split_k


# Runs with more k tiles than stages, several tiles per CTA, a CTA of a cluster without a k tile, and a CTA without a
# tile
STATIC = [
    Run(wgmma("plain", (16, 128, 1), FP32), (3,), 136, 1664, 1, seed=None),
    Run(wgmma("plain", (16, 128, 2), BF16, "column", BF16), (5,), 136, 64, 6, seed=1),
    Run(prefetching("plain", (32, 128, 1), FP32), (3,), 136, 1664, 1),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in STATIC])
def test_a_static_weight(run: Run) -> None:
    check_static_weight(execute, run)


def test_whether_a_weight_is_read_before_the_wait() -> None:
    check_read_ahead(execute, STATIC[1])


@pytest.mark.parametrize("hint", ["static_weight", "prefetches"])
def test_a_hint_is_one_more_kernel_only_where_it_is_followed(hint: str) -> None:
    """Check that a hint (a static weight, or a prefetch) leads to a separate kernel only if the kernel can follow the
    hint."""
    for layout, tile, differs in (
        ("plain", (64, 128, 1), True),
        ("plain", (128, 128, 1), False),
        ("counted", (16, 128, 1), False),
    ):
        case = wgmma(layout, tile, BF16)
        assert (case.kernel.config != dataclasses.replace(case, **{hint: True}).kernel.config) == differs


@pytest.mark.parametrize("layout", [layout for layout in FP8_LAYOUTS if layout != "plain"])
def test_many_experts(layout: str) -> None:
    """Check the largest number of experts, when few of them own rows."""
    counts = tuple(3 if expert in (0, 17, 300, 511) else 0 for expert in range(512))
    got, want = execute(Run(wgmma(layout, (16, 128, 1), FP32), counts, 8, 128, 2, room=3))
    assert torch.equal(got, want)


@pytest.mark.parametrize("tile", [(128, 128, 1), (128, 64, 1), (16, 128, 2)], ids=str)
def test_the_fewest_stages(tile: tuple[int, int, int]) -> None:
    """Check the smallest numbers of stages: one stage for each scale loader, or two pairs of stages. The four k tiles
    of a tile are not a multiple of three stages, so that tiles begin with different stages."""
    run = Run(wgmma("counted", tile, BF16), (3, 20, 5), 136, 512 if tile[0] == 128 else 1024, tile[2])
    for seed in (None, 0):
        got, want = execute(run._replace(seed=seed), stages=4 if tile == (128, 128, 1) else 3)
        assert torch.equal(got, want)


GROUPS = Run(wgmma("counted", (128, 128, 1), BF16), (130, 3), 120, 1408, 1)
SWAPPED = Run(wgmma("masked", (16, 128, 1), BF16), (3, 5), 136, 1792, 1, room=8)
SHARED = Run(wgmma("masked", (16, 128, 2), BF16), (3, 5), 264, 512, 2, room=8)
SENT = Run(wgmma("counted", (16, 128, 4), FP32, "expert_column", FP32), (3, 0, 30), 264, 640, 4)
WARPS = Run(mma("counted", 16, BF16, arch="sm_120a"), (19, 3), 136, 768, 1)


def place_told_late(ptx: str) -> str:
    """Edit PTX so that the producer stores the description of a tile only after its arrival at the barrier."""
    store, arrival = r"(st\.shared\.v4\.b32 [^;]*;)", r"(mbarrier\.arrive\.expect_tx[^;]*;)"
    return re.sub(rf"{store}(.*?){arrival}", r"\2\3\1", ptx, count=1, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("run", "edit"),
    [
        pytest.param(GROUPS, changed(WAIT, None, PASSED), id="copies there"),
        pytest.param(GROUPS, place_told_late, id="place told"),
        pytest.param(GROUPS, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs done"),
        pytest.param(GROUPS, changed(r"bar\.warp\.sync", 0), id="scales stored"),
        pytest.param(GROUPS, changed(r"bar\.warp\.sync", 4), id="scales read"),
        pytest.param(GROUPS, changed(r"bar\.warp\.sync", -5), id="lines complete"),
        pytest.param(GROUPS, changed(r"bar\.warp\.sync", -4), id="lines read"),
        pytest.param(GROUPS, changed(r"bar\.sync\s+0", 0), id="sums of warps there"),
        pytest.param(GROUPS, changed(r"bar\.sync\s+0", 1), id="table there"),
        pytest.param(SWAPPED, changed(WAIT, 0, PASSED), id="stage empty, swapped"),
        pytest.param(SWAPPED, changed(r"wgmma\.wait_group\.sync\.aligned", None), id="MMAs done, swapped"),
        pytest.param(SHARED, changed(r"bar\.sync\s+1", None), id="partial sums stored"),
        pytest.param(SHARED, changed(WAIT, -1, PASSED), id="partial sums arrived"),
        pytest.param(SENT, changed(r"fence\.proxy\.async", None), id="partial sums loaded"),
        pytest.param(SHARED, changed(WAIT, -2, PASSED), id="partial sums read"),
        pytest.param(SHARED, told_twice, id="peer told of partial sums"),
        pytest.param(SHARED, changed(ACQUIRE, 0), id="partial sums read, acquired"),
        pytest.param(SHARED, changed(ACQUIRE, 1), id="partial sums arrived, acquired"),
        pytest.param(SENT, changed(RELEASE), id="partial sums read, released"),
        pytest.param(SHARED, changed(r"barrier\.cluster\.(?:arrive|wait)", None), id="cluster meets"),
        pytest.param(WARPS, changed(r"cp\.async\.wait_group", None), id="copies of warps there"),
        pytest.param(WARPS, changed(r"bar\.sync\s+0", 2), id="K tile there for all"),
        pytest.param(WARPS, changed(r"bar\.sync\s+0", 3), id="last k tile read"),
    ],
)
def test_what_orders_a_gemm_is_needed(run: Run, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes or changes
    an instruction that orders memory accesses."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        for seed in (None, 0, 1, 2):
            got, want = execute(run._replace(seed=seed), edit)
            assert torch.equal(got, want)


WAITS = 18


@pytest.mark.parametrize("wait", range(WAITS))
def test_every_wait_is_needed(wait: int) -> None:
    """Check that each wait is needed: of the producer, of a scale loader for each stage that it loads at the same time,
    and of consumers with and without rows, anywhere in a round of the pipeline."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        for seed in (None, 0):
            got, want = execute(GROUPS._replace(seed=seed), changed(WAIT, wait, PASSED))
            assert torch.equal(got, want)


def test_those_are_all_waits() -> None:
    with pytest.raises(IndexError):
        execute(GROUPS, changed(WAIT, WAITS, PASSED))


@pytest.mark.parametrize(
    "run", [GROUPS, SWAPPED, SHARED, SENT, WARPS], ids=["groups", "swapped", "shared", "sent", "warps"]
)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_orders_a_gemm_is_enough(run: Run, seed: int | None) -> None:
    got, want = execute(run._replace(seed=seed))
    assert torch.equal(got, want)
