"""Kernels of GEMMs of FP8 activations and an FP4 weight, executed in the PTX emulator."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from samples.grouped_mm_fp8_fp4 import contiguous, masked
from samples.mm_fp8_fp4 import sample
from support.emulated import (
    ACQUIRE,
    CPU,
    INPUTS,
    KERNEL_WAIT,
    PASSED,
    RELEASE,
    WAIT,
    WEIGHT,
    changed,
    check_prefetched,
    check_read_ahead,
    check_static_weight,
    equal,
    poisoned,
    to_prefetch,
    told_twice,
    written_late,
)
from support.epilogues import finished, finished_by_expert, operands
from support.host_grids import check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, RECODED, FP8FP4GemmCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import run_kernel
from ptx_emulator.memory import Deadlock
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp8_fp4_recode import NOTE_ROWS, Notes, WeightArguments, note_words
from torch_cute_ops.kernels.fp8_fp4_wgmma_ss import Arguments
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

grouped_mm_fp8_fp4 = OPS["grouped_mm_fp8_fp4"].reference
mm_fp8_fp4 = OPS["mm_fp8_fp4"].reference

POISON = 777.0
"""Value that no kernel writes, so that unwritten elements are detected."""


class Run(NamedTuple):
    """Launch of a kernel.

    Attributes:
        case: kernel.
        counts: number of rows of each expert.
        n, k, max_ctas: N and K of the GEMM, and the largest number of CTAs.
        room: number of rows reserved for each expert in the masked layout.
        scales: range of random scale bytes of the weight, or None for scales with which sums are exact.
    """

    case: FP8FP4GemmCase
    counts: tuple[int, ...]
    n: int
    k: int
    max_ctas: int
    room: int = 0
    scales: tuple[int, ...] | None = None

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'+'.join(map(str, self.counts))}x{self.n}x{self.k}{self.scales or ''}"


def execute(
    run: Run,
    edit: Any = None,
    seed: int | None = 0,
    late: tuple[str, ...] | None = None,
    held: tuple[int, ...] = (),
    starved: Sequence[int] = (),
    lacks: int | None = None,
    offsets_given: list[int] | None = None,
    offsets_used: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result, which is poison in rows that no expert owns.

    Args:
        run: launch.
        edit: function that changes the PTX, or None.
        seed: seed of the order of the emulator's warps.
        late: names of the arguments that a simulated previous kernel writes at the last moment.
        held, starved: as in ``run_kernel``.
        lacks: index of a weight tile that is only partly re-encoded, or None.
        offsets_given, offsets_used: offsets out of range, and the valid offsets to which the kernel must clip them.
    """
    torch.manual_seed(run.n)
    case, exact = run.case, run.scales is None
    formats = case.fmt, case.scale_layout
    if case.layout == "plain":
        weight = None if exact else {"scales": run.scales}
        one = sample("", *run.counts, run.n, run.k, *formats, CPU, exact=exact, weight=weight)
    elif case.layout == "masked":
        one = masked("", *formats, run.counts, run.room, run.n, run.k, CPU, exact=True)
    else:
        counted = case.layout == "counted"
        one = contiguous("", *formats, run.counts, run.n, run.k, CPU, exact=True, spare=9, counted=counted)
    args, named = list(one.args), {name: value for name, value in one.kwargs.items() if name != "counts"}
    if case.layout == "plain":
        alpha, bias = operands(case.epilogue, run.n)
        want = finished(mm_fp8_fp4(*args, out_dtype=FP32, **named), case.epilogue, alpha, bias)
        args += [None, None]
    else:
        if case.layout == "masked":
            args += [None, one.kwargs["counts"]]
        if offsets_used is not None:
            args[4] = torch.tensor(offsets_used, dtype=torch.int32).clamp(max=len(args[0]))
        a, b, a_scale, b_scale, offsets, counts = args
        alpha, bias = operands(case.epilogue, run.n, len(b))
        sums = grouped_mm_fp8_fp4(a, b, a_scale, b_scale, offsets, counts, out_dtype=FP32, **named)
        want = finished_by_expert(sums, offsets, counts, case.epilogue, alpha, bias, POISON)
    out = torch.full_like(want, POISON)
    a, b, a_scale, b_scale, offsets, counts = args
    if offsets_given is not None:
        offsets = torch.tensor(offsets_given, dtype=torch.int32)
    if case.before:
        b, b_scale = recoded(case, b, b_scale, seed)
    if lacks is not None:
        done_of(b_scale, run.n, run.k)[lacks] -= 1
    prefetched = to_prefetch(case)
    given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetched, run.max_ctas)
    given, written = written_late(given, late or ())
    before = None if late is None else written
    how = {
        "seed": seed,
        "strict": True,
        "scoped": True,
        "edit": edit,
        "written_before": before,
        "held": held,
    }
    how["starved"] = starved
    how |= {} if lacks is None else {"max_steps": 40_000}
    machines = run_kernel(case.kernel, ARCHS[case.arch], *given, **how)
    check_prefetched(machines, prefetched)
    return out, want


def done_of(notes: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return, for each weight tile, the number of work tiles that are done, from the workspace ``notes``."""
    return notes.view(-(-n // NOTE_ROWS), -1)[:, Notes.done(-(-k // 128))]


def recoded(case: FP8FP4GemmCase, b: torch.Tensor, b_scale: torch.Tensor, seed: int | None) -> tuple:
    """Run the kernel that re-encodes the weight; return the FP8 weight and the workspace. A simulated previous kernel
    writes the FP4 weight at the last moment."""
    is_plain = case.layout == "plain"
    experts, n, k = 1 if is_plain else len(b), b.shape[-1], 2 * b.shape[-2]
    weight = poisoned(experts, n, k, dtype=torch.float8_e4m3fn)
    notes = poisoned(note_words(n, k, experts), dtype=torch.int32)
    tiles = experts * -(-n // NOTE_ROWS)
    for before in case.before:
        first = tiles // 2 if case.overlaps else tiles
        given, written = written_late(WeightArguments(b, b_scale, weight, notes, first, 1), WEIGHT)
        if not before.overlaps or first < tiles:
            run_kernel(before.kernel, ARCHS[case.arch], *given, seed=seed, strict=True, written_before=written)
    return (weight[0] if is_plain else weight).mT, notes


def case(fmt, scale_layout: str, layout: str, tile: tuple[int, ...], *epilogue: Any) -> FP8FP4GemmCase:
    family = "fp8_fp4_recode" if tile == RECODED else "fp8_fp4_wgmma_ss"
    return FP8FP4GemmCase(fmt, scale_layout, layout, tile, Epilogue(*epilogue), family=family)


def overlapping(*given: Any) -> FP8FP4GemmCase:
    """Return a case in which the weight is re-encoded while the GEMM runs."""
    return replace(case(*given), overlaps=True)


def codes(*given: Any) -> FP8FP4GemmCase:
    """Return a case of the kernel ``fp8_fp4_wgmma_codes``."""
    return replace(case(MXFP4, *given), family="fp8_fp4_wgmma_codes")


def in_registers(*given: Any) -> FP8FP4GemmCase:
    """Return a case of the kernel ``fp8_fp4_wgmma_rs``."""
    return replace(case(NVFP4, *given), family="fp8_fp4_wgmma_rs")


def prefetching(of: FP8FP4GemmCase) -> FP8FP4GemmCase:
    """Return the case with a prefetch into L2."""
    return replace(of, prefetches=True)


# Runs with partial tiles, with a last k tile of 64 elements, with experts without rows, and with experts that begin
# inside a scale tile
RUNS = [
    Run(case(NVFP4, "128x4", "plain", (32, 128, 1), FP32), (5,), 136, 1344, 1),
    Run(case(MXFP4, "linear", "plain", (32, 128, 4), BF16, "column", BF16), (9,), 72, 64, 4),
    Run(case(NVFP4, "linear", "counted", (32, 128, 1), BF16, "expert", FP32), (0, 33, 1), 72, 192, 2),
    Run(case(MXFP4, "128x4", "masked", (64, 128, 2), FP16, "expert_column"), (3, 0, 70), 136, 320, 4, room=72),
    Run(case(NVFP4, "128x4", "offsets", (32, 128, 4), BF16, "one"), (0, 32), 200, 640, 8),
    Run(codes("128x4", "plain", (8, 128, 1), FP32), (5,), 136, 1344, 1),
    Run(codes("128x4", "counted", (8, 128, 2), BF16, "expert_column", BF16), (3, 9, 0), 136, 1088, 2),
    Run(codes("linear", "plain", (16, 128, 4), BF16, "column", BF16), (9,), 72, 64, 4),
    Run(codes("linear", "counted", (32, 128, 1), BF16, "expert", FP32), (0, 33, 1), 72, 192, 2),
    Run(codes("128x4", "masked", (16, 128, 1), FP16, "expert_column"), (3, 0, 20), 136, 1152, 2, room=24),
    Run(codes("128x4", "offsets", (16, 128, 3), BF16, "one"), (0, 32), 200, 640, 6),
    Run(in_registers("128x4", "plain", (8, 128, 1), FP32), (5,), 136, 1344, 1),
    Run(in_registers("128x4", "counted", (8, 128, 2), BF16, "expert_column", BF16), (3, 9, 0), 136, 1088, 2),
    Run(in_registers("linear", "plain", (16, 128, 4), BF16, "column", BF16), (9,), 72, 64, 4),
    Run(in_registers("128x4", "masked", (16, 128, 1), FP16, "expert_column"), (3, 0, 20), 136, 2176, 2, room=24),
    Run(in_registers("linear", "offsets", (16, 128, 3), BF16, "one"), (0, 32), 200, 640, 6),
    Run(case(MXFP4, "128x4", "plain", (128, 128, 1), FP32, "column", FP32), (130,), 136, 192, 2),
    Run(case(NVFP4, "linear", "counted", (128, 128, 1), BF16), (3, 70, 0), 72, 640, 1),
    Run(case(NVFP4, "128x4", "masked", (128, 128, 1), FP32, "expert_column", FP32), (3, 0, 70), 136, 64, 1, room=72),
    Run(case(NVFP4, "128x4", "plain", (256, 128, 1), FP32, "column", FP32), (200,), 136, 704, 2),
    Run(case(MXFP4, "linear", "counted", (256, 128, 1), BF16, "expert", BF16), (3, 257, 0), 72, 192, 2),
    # Runs in which two CTAs share a tile of many rows, a CTA gets no k tile, or the second warpgroup gets no rows
    Run(case(NVFP4, "128x4", "plain", (128, 128, 2), BF16, "column", FP32), (140,), 136, 1344, 2),
    Run(case(MXFP4, "linear", "plain", (128, 64, 2), FP32), (200,), 72, 64, 4),
    # Each consumer warpgroup multiplies half of the rows of a
    Run(case(NVFP4, "128x4", "plain", (32, 64, 1), FP32, "column", FP32), (5,), 200, 1344, 2),
    Run(case(MXFP4, "linear", "counted", (64, 64, 2), BF16, "expert"), (3, 70, 0), 72, 320, 4),
    Run(case(MXFP4, "128x4", "plain", (64, 64, 2), FP16), (77,), 136, 448, 4),
    Run(case(NVFP4, "128x4", "masked", (32, 64, 1), BF16, "expert_column"), (3, 0, 40), 72, 192, 1, room=40),
    # Runs in which tile_m is not a power of two: experts have one tile or two, and the rows of a tile need one copy or
    # two
    Run(codes("linear", "offsets", (24, 128, 1), BF16, "one"), (0, 25, 7), 72, 1152, 2),
    Run(codes("128x4", "plain", (24, 128, 3), FP32, "column", FP32), (21,), 136, 640, 3),
    Run(in_registers("128x4", "offsets", (24, 128, 1), BF16, "one"), (0, 25, 7), 72, 1152, 2),
    Run(in_registers("linear", "plain", (24, 128, 1), FP32, "column", FP32), (21,), 136, 704, 2),
    Run(case(MXFP4, "128x4", "offsets", (48, 128, 1), BF16, "expert", FP32), (0, 49, 5), 72, 192, 2),
    Run(case(NVFP4, "linear", "masked", (80, 128, 1), FP16, "expert_column"), (81, 0, 37), 72, 640, 2, room=83),
    Run(case(NVFP4, "128x4", "offsets", (96, 128, 1), FP32, "expert_column", FP32), (0, 101, 5), 136, 448, 2),
    Run(case(MXFP4, "linear", "plain", (96, 64, 2), BF16, "column", BF16), (75,), 72, 640, 3),
    # Runs in which some CTAs of a cluster get no k tile, or a cluster gets no tile
    Run(case(NVFP4, "linear", "counted", (64, 128, 6), BF16), (0, 5), 72, 448, 12),
    Run(case(NVFP4, "128x4", "plain", RECODED, FP32, "column", FP32), (130,), 136, 704, 2),
    Run(case(MXFP4, "linear", "counted", RECODED, BF16, "expert_column", BF16), (3, 130, 0), 72, 192, 2),
    Run(case(NVFP4, "linear", "masked", RECODED, BF16, "expert_column", FP32), (3, 0, 70), 136, 320, 4, room=72),
    Run(case(MXFP4, "128x4", "offsets", RECODED, FP32, "expert_column", FP32), (0, 32), 200, 64, 8),
    Run(overlapping(NVFP4, "128x4", "plain", RECODED, FP32, "column", FP32), (130,), 264, 704, 2),
    Run(overlapping(MXFP4, "linear", "plain", RECODED, FP32, "column", FP32), (3,), 200, 2112, 2),
    # Runs of a CTA with several tiles, and of a cluster
    Run(prefetching(codes("128x4", "plain", (16, 128, 1), FP32)), (5,), 392, 640, 2),
    Run(prefetching(in_registers("linear", "plain", (8, 128, 2), BF16)), (5,), 72, 1088, 2),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_gemm(run: Run) -> None:
    """Check that results equal the expected results bit for bit, and that rows of padding are not written."""
    got, want = execute(run)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("given", "used"),
    [([-3, 5, 16], [0, 5, 16]), ([0, 7, 2**31 - 1], [0, 7, 10**6]), ([12, 4, 16], [4, 4, 16])],
    ids=["negative", "beyond", "descending"],
)
@pytest.mark.parametrize(
    "of",
    [
        case(NVFP4, "128x4", "offsets", (32, 128, 1), BF16),
        case(NVFP4, "linear", "offsets", RECODED, BF16),
        codes("128x4", "offsets", (16, 128, 1), BF16),
        in_registers("128x4", "offsets", (16, 128, 1), BF16),
    ],
    ids=["ss", "recode", "codes", "rs"],
)
def test_wrong_offsets(of: FP8FP4GemmCase, given: list[int], used: list[int]) -> None:
    """Check that a GEMM reads and writes only rows inside its buffers, whatever the offsets are."""
    got, want = execute(Run(of, (7, 9), 72, 128, 2), offsets_given=given, offsets_used=used)
    assert torch.equal(got.nan_to_num(POISON), want.nan_to_num(POISON))  # padding rows are NaN


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_compiles_without_spills(run: Run) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize("recodes", [False, True], ids=["decoded", "recoded"])
@pytest.mark.parametrize("layout", ["plain", "masked"])
def test_nothing_is_launched_on_overlap(layout: str, recodes: bool) -> None:
    case = next(run.case for run in RUNS if (run.case.layout, run.case.is_recoded) == (layout, recodes))
    check_nothing_is_launched_on_overlap(case.kernel, ARCHS[case.arch])


# Runs with more k tiles than stages, and with a cluster in which one CTA gets no k tile
STATIC = [
    Run(case(NVFP4, "128x4", "plain", (32, 128, 1), FP32), (5,), 72, 1344, 1),
    Run(case(MXFP4, "linear", "plain", (32, 128, 2), BF16, "column", BF16), (9,), 72, 64, 2),
    Run(in_registers("128x4", "plain", (8, 128, 1), FP32), (5,), 72, 2368, 1),
    Run(in_registers("linear", "plain", (16, 128, 2), BF16, "column", BF16), (9,), 72, 64, 2),
    Run(codes("128x4", "plain", (8, 128, 1), FP32), (5,), 72, 2368, 1),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in STATIC])
def test_a_static_weight(run: Run) -> None:
    check_static_weight(execute, run)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in (STATIC[1], STATIC[3])])
def test_whether_a_weight_is_read_before_the_wait(run: Run) -> None:
    check_read_ahead(execute, run)


def test_a_recoded_weight_is_waited_for() -> None:
    """Check that the GEMM waits for the kernel that re-encodes the weight."""
    run = Run(WRITTEN.case, (3, 0), 72, 64, 1)
    got, want = execute(run, late=(*WEIGHT, *INPUTS))
    assert torch.equal(got, want)
    unwaited = changed(KERNEL_WAIT, None)
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        got, want = execute(run, unwaited, late=(*WEIGHT, *INPUTS))
        assert torch.equal(got, want)


# A run with an odd number of k tiles, two ranges of rows, and two weight tiles, one of them partial. In some rows, each
# k tile needs another exponent.
OVERLAPPED = Run(
    overlapping(NVFP4, "128x4", "plain", RECODED, FP32, "column", FP32), (5,), 136, 2112, 2, scales=(0, 0x7F)
)


def check_overlapped(edit: Any = None) -> None:
    """Check a GEMM that starts before any part of the re-encoded weight and of the workspace is written."""
    for seed in (0, 1):
        got, want = execute(OVERLAPPED, edit, seed, late=WEIGHT)
        assert (got - want).abs().max() < 1e-5 * want.abs().mean()


POLL = r"ld\.acquire\.gpu\.global\.u32 (%r\d+), "


def test_rows_recoded_during_the_gemm_are_waited_for() -> None:
    check_overlapped()
    # Make the first poll of the producer, or of a scale loader, succeed at once, so that the loop of later polls is
    # skipped.
    passed = [changed(POLL, number, r"mov.b32 \1, 1000;") for number in (0, 2)]
    for edit in (changed(KERNEL_WAIT, None), *passed):
        with pytest.raises((EmulationError, Deadlock, AssertionError)):
            check_overlapped(edit)


@pytest.mark.parametrize("tile", [0, 1])
def test_all_work_tiles_of_a_tile_are_waited_for(tile: int) -> None:
    """Check that the GEMM waits forever if one work tile of the weight is never re-encoded."""
    with pytest.raises(EmulationError, match="more than 40000 steps"):
        execute(OVERLAPPED, lacks=tile)


def test_work_tiles_that_are_done_are_counted() -> None:
    """Check the counts of finished work tiles after the kernel that re-encodes the first weight tiles, and after the
    kernel that re-encodes the remaining weight tiles."""
    case, experts, n, k = OVERLAPPED.case, 1, OVERLAPPED.n, OVERLAPPED.k
    b, b_scale = sample("", 1, n, k, case.fmt, case.scale_layout, CPU, exact=True).args[1:4:2]
    weight = poisoned(experts, n, k, dtype=torch.float8_e4m3fn)
    notes = poisoned(note_words(n, k, experts), dtype=torch.int32)
    done = done_of(notes, n, k)
    for before, want in zip(case.before, ([8, 0], [8, 8]), strict=True):
        run_kernel(before.kernel, ARCHS[case.arch], b, b_scale, weight, notes, 1, 1, strict=True)
        assert done.tolist() == want


FAR = {NVFP4: [(1, 0x80), (0x81, 0xFF)], MXFP4: [(100, 140)]}
"""Ranges of scale bytes. NVFP4: all positive bytes including NaN, and all negative bytes. MXFP4: scales up to 2^40
apart."""


@pytest.mark.parametrize(
    ("fmt", "tile"),
    [
        pytest.param(fmt, tile, id=f"{fmt.name}-{'recoded' if tile == RECODED else tile[0]}-rows")
        for fmt, tile in (
            (NVFP4, (128, 128, 1)),
            (MXFP4, (32, 128, 1)),
            (NVFP4, (256, 128, 1)),
            (NVFP4, RECODED),
            (MXFP4, RECODED),
        )
    ],
)
def test_scales_that_are_hard_to_encode(fmt: Any, tile: tuple[int, ...]) -> None:
    """Check weights whose re-encoded elements are zero, NaN or subnormal in e4m3, and accumulators whose exponent
    changes. There is a single k tile, so that no fp32 addition rounds."""
    for scales in FAR[fmt]:
        check_hard_scales(case(fmt, "128x4", "plain", tile, FP32), scales)


@pytest.mark.parametrize("layout", ["128x4", "linear"])
def test_scales_that_are_hard_to_encode_in_registers(layout: str) -> None:
    """Check scales that are hard to encode with the kernel that decodes in registers. K is half a k tile, one k tile,
    or one k tile per K group."""
    for scales, k in itertools.product(FAR[NVFP4], (64, 128, 256)):
        check_hard_scales(in_registers(layout, "plain", (16, 128, 1), FP32), scales, k)


@pytest.mark.parametrize("layout", ["128x4", "linear"])
@pytest.mark.parametrize("scales", [(118, 140), (0, 19), (230, 256)], ids=["far", "least", "greatest and NaN"])
def test_scales_of_blocks_that_are_hard(layout: str, scales: tuple[int, int]) -> None:
    """Check scales that are 15 or more powers of two below the largest, so that codes are rounded to codes of a larger
    scale."""
    check_hard_scales(codes(layout, "plain", (16, 128, 1), FP32), scales)


@pytest.mark.parametrize(
    ("tile", "k"), [((8, 128, 1), 1088), ((16, 128, 2), 448)], ids=["rounds of the pipeline", "cluster"]
)
@pytest.mark.parametrize("seed", [None, 1])
def test_codes_are_rounded_in_every_stage(tile: tuple[int, ...], k: int, seed: int | None) -> None:
    """Check rounding in both k tiles of a stage and in half a k tile, in several orders of the decoder warps."""
    got, want = execute(Run(codes("128x4", "plain", tile, FP32), (7,), 72, k, 2, scales=(118, 140)), seed=seed)
    assert (got - want).abs().max() < 1e-5 * want.abs().mean()


CHANGES = [
    ((8, 128, 1), 7, 392, 1088, 1),
    ((16, 128, 2), 7, 264, 1216, 2),
    ((64, 128, 2), 7, 264, 704, 2),
    ((64, 64, 1), 7, 200, 704, 1),
    ((128, 128, 1), 7, 136, 704, 1),
    ((128, 64, 2), 67, 136, 704, 2),
]
"""(tile, M, N, K, CTAs): several rounds of the pipeline, several tiles per CTA, clusters, half a k tile at the end"""


@pytest.mark.parametrize("run", CHANGES, ids=lambda run: f"{run[0]}-{run[2]}x{run[3]}")
def test_units_change_in_every_k_tile(run: tuple) -> None:
    """Check k tiles whose scales do not fit the exponents of their rows, including k tiles before the last."""
    tile, m, n, k, ctas = run
    given = "linear" if tile[-1] > 1 else "128x4", "plain", tile, FP32
    of = in_registers(*given) if tile[0] < 32 else case(NVFP4, *given)
    for seed in (None, 1):
        got, want = execute(Run(of, (m,), n, k, ctas, scales=(0, 0x7F)), seed=seed)
        assert (got - want).abs().max() < 1e-5 * want.abs().mean()


def check_hard_scales(of: FP8FP4GemmCase, scales: tuple[int, int], k: int = 128) -> None:
    got, want = execute(Run(of, (9,), 136, k, 2, scales=scales))
    # With the smallest scales, accumulators are subnormal before they are multiplied by the scales of the rows.
    near = torch.isclose(got, want, rtol=1e-5, atol=2.0**-136, equal_nan=True)
    assert near.float().mean() > 0.99  # the emulator rounds sums of random products in another order
    equal("NaN", got.isnan(), want.isnan())


# Kernels for many rows take 2 to 5 s to compile, so these are some of the kernels in ``RUNS``.
SWAPPED = Run(case(NVFP4, "128x4", "masked", (32, 128, 1), BF16), (3, 5), 136, 1792, 1, room=8)
UNITS = Run(case(NVFP4, "linear", "counted", (128, 128, 1), BF16), (130, 3), 120, 896, 1)
PAIR = Run(case(MXFP4, "linear", "counted", (256, 128, 1), BF16, "expert", BF16), (200, 3), 120, 896, 2)
# Enough k tiles to execute every step of an unrolled round of the pipeline; and rows in which each k tile needs another
# exponent, which a second loop multiplies.
WRITTEN = Run(case(MXFP4, "linear", "counted", RECODED, BF16, "expert_column", BF16), (130, 3), 120, 1408, 1)
OWN_UNITS = Run(case(NVFP4, "128x4", "plain", RECODED, FP32), (130,), 120, 640, 1, scales=(0, 0x7F))
CODES = Run(codes("128x4", "masked", (16, 128, 1), FP16, "expert_column"), (3, 5), 136, 2304, 1, room=8)
# Few k tiles, so that one K group can be a tile ahead of the other
IN_REGISTERS = Run(in_registers("128x4", "masked", (16, 128, 1), FP16, "expert_column"), (3, 5), 136, 768, 1, room=8)
# A cluster with several tiles, four groups of decoder warps, and two K groups
NARROW = Run(case(NVFP4, "128x4", "masked", (32, 64, 2), BF16), (3, 5), 136, 1792, 2, room=8)
IN_REGISTERS_SHARED = Run(
    in_registers("128x4", "counted", (8, 128, 2), BF16, "expert_column", BF16), (3, 5), 136, 1280, 2
)
# Tiles with rows for both consumers alternate with tiles with rows for the first consumer only
EXCHANGED = Run(case(MXFP4, "linear", "plain", (128, 64, 2), FP32), (140,), 72, 1728, 2)
ORDERED = {
    "registers": IN_REGISTERS,
    "swapped": SWAPPED,
    "units": UNITS,
    "pair": PAIR,
    "recoded": WRITTEN,
    "own units": OWN_UNITS,
    "codes": CODES,
    "narrow": NARROW,
    "registers, shared": IN_REGISTERS_SHARED,
    "exchanged": EXCHANGED,
}


def check(run: Run, edit: Any = None, seed: int | None = 0, held: tuple[int, ...] = ()) -> None:
    """Run the kernel and compare its result with the expected result: bit for bit if sums are exact, otherwise with a
    tolerance."""
    got, want = execute(run, edit, seed, held=held)
    if run.scales is None:
        assert torch.equal(got, want)
    else:
        assert (got - want).abs().max() < 1e-5 * want.abs().mean()


@pytest.mark.parametrize("run", ORDERED.values(), ids=ORDERED)
@pytest.mark.parametrize("seed", [None, 1])
def test_what_orders_it_is_enough(run: Run, seed: int | None) -> None:
    check(run, seed=seed)


ONE_K_TILE = SWAPPED._replace(n=520, k=128)
LATE = {
    ("swapped", 3): (SWAPPED, 0),
    ("swapped", 4): (ONE_K_TILE, 2),
    ("swapped", 6): (ONE_K_TILE, 2),
    ("swapped", 7): (ONE_K_TILE, 4),
    ("pair", 2): (PAIR, 0),
}
"""For each wait of decoder warps for a stage that another group of decoders uses: a run that needs the wait, and the
index of the bulk copy that must be late. The copy belongs to a stage that the group skips. Without the wait, the group
would mistake the stage for full in the next round. For this, consumers must release a stage only after the next k tile,
or at the end of a tile."""
SEEDS = (None, 0, 1)
WAITS = {
    "swapped": (SWAPPED, 11),
    "units": (UNITS, 7),
    "pair": (PAIR, 9),
    "recoded": (WRITTEN, 18),
    "codes": (CODES, 5),
    "registers": (IN_REGISTERS, 7),
    "registers, shared": (IN_REGISTERS_SHARED, 9),
    "narrow": (NARROW, 15),
    "exchanged": (EXCHANGED, 15),
}
BETWEEN_TEAMS = [("narrow", wait) for wait in (4, 5, 7, 8, 9)] + [("exchanged", wait) for wait in (2, 3, 4, 6, 7, 8)]
"""Waits for other groups of decoders in kernels with more groups. The cases in ``LATE`` contain the same code."""
PAIR_ACQUIRES = 6
"""Number of waits at cluster scope in ``PAIR``."""
FAULTS = {
    "MMAs done": changed(r"wgmma\.wait_group\.sync\.aligned", None),
    "decoded before the MMAs": changed(r"fence\.proxy\.async", None),
}


@pytest.mark.parametrize(
    ("run", "edit"),
    [
        pytest.param(run, FAULTS[what], id=f"{name}-{what}")
        for name, run in ORDERED.items()
        for what in FAULTS
        if not (run.case.is_recoded and what == "decoded before the MMAs")  # nothing is decoded
    ]
    + [
        pytest.param(EXCHANGED, changed(r"fence\.proxy\.async", -1), id="exchanged-partial sums loaded"),
        pytest.param(EXCHANGED, told_twice, id="exchanged-peer told of partial sums"),
        *(pytest.param(PAIR, changed(ACQUIRE, i), id=f"pair-acquired-{i}") for i in range(PAIR_ACQUIRES)),
        pytest.param(PAIR, changed(RELEASE, None), id="pair-released"),
        pytest.param(EXCHANGED, changed(ACQUIRE, 0), id="exchanged-partial sums read, acquired"),
        pytest.param(EXCHANGED, changed(ACQUIRE, 1), id="exchanged-partial sums arrived, acquired"),
        pytest.param(EXCHANGED, changed(RELEASE), id="exchanged-partial sums read, released"),
    ],
)
def test_what_orders_it_is_needed(run: Run, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes or changes
    an instruction that orders memory accesses."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        for seed in (None, 0, 1):
            check(run, edit, seed)


@pytest.mark.parametrize(
    ("run", "wait"),
    [
        pytest.param(run, wait, id=f"{name}-{wait}")
        for name, (run, count) in WAITS.items()
        for wait in range(count)
        if (name, wait) not in (*LATE, *BETWEEN_TEAMS)
    ],
)
def test_every_wait_is_needed(run: Run, wait: int) -> None:
    """Check that each wait of the producer, the scale loaders, the decoders and the consumers is needed."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        for seed in SEEDS:
            check(run, changed(WAIT, wait, PASSED), seed)


@pytest.mark.parametrize(
    ("run", "wait", "copy"),
    [pytest.param(run, wait, copy, id=f"{name}-{wait}") for (name, wait), (run, copy) in LATE.items()],
)
def test_every_wait_for_other_teams_is_needed(run: Run, wait: int, copy: int) -> None:
    """Check that, if this bulk copy is late, the kernel is correct with this wait and fails without it."""
    check(run, seed=None, held=(copy,))
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        check(run, changed(WAIT, wait, PASSED), None, held=(copy,))


@pytest.mark.parametrize("seed", [None, 0])
def test_a_warpgroup_that_is_late_is_waited_for(seed: int | None) -> None:
    """Check that a cluster waits for a late warpgroup: the emulator runs the last warpgroup of the first CTA that sends
    partial sums only when nothing else can run. This warpgroup multiplies rows only in every second tile, and all k
    tiles fit into the stages."""
    got, want = execute(EXCHANGED._replace(k=256), seed=seed, starved=range(4, 8))
    assert torch.equal(got, want)


@pytest.mark.parametrize(("run", "count"), WAITS.values(), ids=WAITS)
def test_those_are_all_waits(run: Run, count: int) -> None:
    with pytest.raises(IndexError):
        execute(run, changed(WAIT, count, PASSED))
