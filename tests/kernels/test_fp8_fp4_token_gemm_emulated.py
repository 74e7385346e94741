"""The kernel of GEMMs of FP8 activations with per-token scales and an FP4 weight, executed in the PTX emulator."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.emulated import (
    PASSED,
    WAIT,
    changed,
    check_in_orders,
    check_prefetched,
    check_read_ahead,
    check_static_weight,
    equal,
    to_prefetch,
    written_late,
)
from support.epilogues import finished, operands
from support.expert_rows import ExpertRows
from support.host_grids import check_nothing_is_launched_on_overlap
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, FP8FP4TokenGemmCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from ptx_emulator.memory import Deadlock
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.kernels import interleave_k
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp8_fp4_token_wgmma import Arguments
from torch_cute_ops.runtime.arch import ARCHS

E4M3 = torch.float8_e4m3fn
POISON = 777.0
"""Value that no kernel writes, so that unwritten elements are detected."""
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ZERO, NAN = 0, 255
"""Indices of the decoding tables for scales of zero and NaN."""


def interleaved(a: torch.Tensor) -> torch.Tensor:
    """Arrange ``a`` (rows, K) for the kernel: (rows, K rounded up to a multiple of 256).

    Element 64 c + 32 p + 8 i + 4 h + e of 256 goes to place 128 p + 32 i + 16 h + 4 c + e.
    """
    k = a.shape[1]
    padded = torch.zeros(len(a), -(-k // 256) * 256)
    for element in range(k):
        c, p, i, h, e = element % 256 // 64, element // 32 % 2, element // 8 % 4, element // 4 % 2, element % 4
        padded[:, element // 256 * 256 + 128 * p + 32 * i + 16 * h + 4 * c + e] = a[:, element]
    return padded


def scale_of(index: torch.Tensor, fmt: Any) -> torch.Tensor:
    """Return the scales, divided by the rows' units, that indices of decoding tables stand for."""
    if fmt == MXFP4:
        scale = torch.exp2(index.double() - 14)
    else:
        scale = (8 + (index - 1) % 8).double() / 8 * torch.exp2((index - 1).div(8, rounding_mode="floor").double() - 13)
    return torch.where(index == ZERO, 0.0, torch.where(index == NAN, torch.nan, scale))


def prepared(index: torch.Tensor, units: torch.Tensor, block: int) -> torch.Tensor:
    """Arrange indices (experts, N, blocks) and units (experts, N) as the kernel reads them: (experts, slabs, N, indices
    of 256 elements)."""
    experts, n, blocks = index.shape
    each = 256 // block
    padded = torch.zeros(experts, n, -(-blocks // each) * each, dtype=torch.uint8)
    padded[..., :blocks] = index.to(torch.uint8)
    first = torch.zeros(experts, 1, n, each, dtype=torch.uint8)
    first[:, 0, :, :4] = units.float()[..., None].view(torch.uint8)
    return torch.cat([first, padded.view(experts, n, -1, each).transpose(1, 2)], 1).contiguous()


class Run(NamedTuple):
    """A launch of the kernel.

    Attributes:
        case: kernel.
        counts: number of rows of each expert.
        n, k, max_ctas: N and K of the GEMM, and the largest number of CTAs.
        seed: seed of the order of the emulator's warps.
        room: number of rows reserved for each expert in the masked layout.
        indices: indices of decoding tables to choose from, or None for scales with which sums are exact.
        shift: binary exponent by which units are multiplied and alpha is divided.
    """

    case: FP8FP4TokenGemmCase
    counts: tuple[int, ...]
    n: int
    k: int
    max_ctas: int
    seed: int | None = 0
    room: int = 0
    indices: Sequence[int] | None = None
    shift: int = 0

    @property
    def id(self) -> str:
        return f"{self.case.id}-{'+'.join(map(str, self.counts))}x{self.n}x{self.k}-{self.max_ctas}"

    @property
    def rows(self) -> ExpertRows:
        return ExpertRows(self.case.layout, self.counts, self.room)


def execute(
    run: Run, edit: Any = None, late: tuple[str, ...] | None = None, **changes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result. Rows of the result that no expert owns must keep the
    poison value with which the output was filled.

    Unless ``run.indices`` is given, operands are multiples of 1/2 and scales are powers of two, so that every sum is
    exact. Rows that no expert owns are NaN.
    """
    torch.manual_seed(run.n + run.k)
    case, fmt, layout, experts = run.case, run.case.fmt, run.case.layout, len(run.counts)
    rows, owner, blocks = run.rows.total, run.rows.owner, run.k // run.case.fmt.block_size
    a = torch.randint(-4, 5, (rows, run.k)).float()
    a[owner < 0] = torch.nan
    codes = torch.randint(16, (experts, run.n, run.k))
    if run.indices is None:
        # Scales of 0, 1/2, 1 and 2
        choices = torch.tensor([ZERO, 13, 14, 15] if fmt == MXFP4 else [ZERO, 97, 105, 113])
        index = choices[torch.randint(4, (experts, run.n, blocks))]
    else:
        index = torch.tensor(run.indices)[torch.randint(len(run.indices), (experts, run.n, blocks))]
    units = torch.exp2(torch.randint(-3, 4, (experts, run.n)).float() + run.shift)
    numbers = MAGNITUDES.double()[codes % 8] * scale_of(index, fmt).repeat_interleave(fmt.block_size, 2)
    # Clamp, because torch 2.11 converts 480 to NaN, and torch 2.13 to 448.
    numbers = torch.where(codes > 7, -numbers, numbers).clamp(-448, 448).float().to(E4M3).double()
    scale = torch.exp2(torch.randint(-3, 4, (rows,)).float())
    alpha, bias = operands(case.epilogue, run.n, None if layout == "plain" else experts)
    if run.shift:
        alpha *= 2.0**-run.shift
    shift, factors = 2.0**-run.shift, None if alpha is None else alpha * 2.0**run.shift
    want = torch.full((rows, run.n), POISON, dtype=case.epilogue.out_dtype)
    for expert in range(experts):
        own = owner == expert
        # Shift units and alpha back, so that no product exceeds the range of float32.
        sums = a[own].double() @ numbers[expert].t() * scale[own, None].double() * units[expert].double() * shift
        want[own] = finished(sums.float(), case.epilogue, factors, bias, None if layout == "plain" else expert)
    kernel = case.kernel
    if changes:
        kernel = type(kernel)(dataclasses.replace(kernel.config, **changes))
        assert kernel.config.reason_unsupported(ARCHS[case.arch]) is None
    lead = run.rows.lead
    out = torch.full((*lead, run.n), POISON, dtype=case.epilogue.out_dtype)
    prefetched = to_prefetch(case)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scales = prepared(index, units, fmt.block_size)
    given = Arguments(
        a=interleaved(a).to(E4M3).view(*lead, -1),
        b=packed[0].t() if layout == "plain" else packed.mT,
        a_scale=scale[:, None],
        b_scale=scales[0] if layout == "plain" else scales,
        **run.rows.tensors,
        alpha=alpha,
        bias=bias,
        out=out,
        prefetch=prefetched,
        max_ctas=run.max_ctas,
    )
    given, written = written_late(given, late or ())
    before = None if late is None else written
    arch = ARCHS[case.arch]
    machines = run_kernel(kernel, arch, *given, seed=run.seed, strict=True, edit=edit, written_before=before)
    check_prefetched(machines, prefetched)
    return out.view(rows, run.n), want


def case(fmt: Any, layout: str, tile: tuple[int, int, int], fast: bool, *epilogue: Any, **hints: bool) -> Any:
    return FP8FP4TokenGemmCase(fmt, layout, tile, fast, Epilogue(*epilogue), **hints)


# Runs with partial tiles, experts without rows, several tiles per CTA, more k tiles than stages, fewer k tiles than one
# iteration of the loop, and a last k tile of 64 elements
RUNS = [
    Run(case(NVFP4, "plain", (16, 128, 1), False, FP32), (3,), 136, 1984, 1, seed=None),
    Run(case(MXFP4, "plain", (8, 128, 2), True, BF16, "column", BF16), (7,), 200, 1344, 2),
    Run(case(NVFP4, "plain", (64, 128, 3), False, BF16, "column"), (70,), 136, 896, 3, seed=2),
    Run(case(MXFP4, "counted", (32, 128, 4), False, FP32, "expert_column", FP32), (3, 0, 30), 264, 640, 4, seed=1),
    Run(case(NVFP4, "masked", (64, 128, 1), True, BF16, "expert_column"), (3, 0, 70), 136, 576, 4, room=72),
    Run(case(NVFP4, "plain", (128, 128, 1), False, FP16, "column", FP16), (200,), 264, 1472, 2, seed=None),
    Run(case(MXFP4, "offsets", (128, 128, 1), True, BF16, "expert"), (70, 0, 131), 136, 128, 1),
    Run(case(NVFP4, "plain", (256, 128, 2), True, FP32, "column"), (250,), 136, 1600, 2, seed=1),
    Run(case(MXFP4, "offsets", (128, 128, 2), False, FP16, "expert_column", FP32), (131, 0, 9), 264, 1344, 2),
    Run(case(NVFP4, "masked", (64, 128, 1), False, FP32, "expert"), (3, 70), 136, 576, 4, room=72),
    Run(case(MXFP4, "counted", (256, 128, 1), True, BF16, "expert_column", BF16), (270, 3), 136, 1344, 2),
    Run(case(NVFP4, "plain", (16, 128, 1), True, FP32, "one", prefetches=True), (7,), 136, 384, 4),
]


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_gemm(run: Run) -> None:
    """Check that results equal the expected results bit for bit, and that rows of padding are neither used nor
    written."""
    got, want = execute(run)
    assert torch.equal(got, want)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_compiles_without_spills(run: Run) -> None:
    """Check that the kernel spills no registers and fits an SM. ``test_compile_kernels`` does not check the kernels
    that this file checks."""
    check_emulated(run.case, run.case.kernel)


@pytest.mark.parametrize(
    ("fmt", "indices"),
    [(NVFP4, range(156)), (NVFP4, (105, 113, NAN)), (MXFP4, range(21)), (MXFP4, (13, 14, NAN))],
    ids=["nvfp4", "nvfp4-nan", "mxfp4", "mxfp4-nan"],
)
def test_all_decoding_tables(fmt: Any, indices: tuple[int, int]) -> None:
    """Check weights with all scales from the smallest with nonzero codes to the largest, and with NaN scales. K is 128,
    so that tensor cores add up few terms."""
    run = Run(case(fmt, "plain", (8, 128, 1), False, FP32), (5,), 264, 128, 3, indices=indices)
    got, want = execute(run)
    near = torch.isclose(got, want, rtol=1e-5, atol=1e-5 * want.nan_to_num().abs().mean().item(), equal_nan=True)
    assert near.all()
    equal("NaN", got.isnan(), want.isnan())


@pytest.mark.parametrize("shift", [118, -120])
@pytest.mark.parametrize("split_k", [1, 2])
def test_units_out_of_the_range_of_sums(shift: int, split_k: int) -> None:
    """Check units whose product with a sum overflows or underflows, but whose product with alpha and the sum does
    not."""
    run = Run(case(MXFP4, "plain", (8, 128, split_k), False, FP32, "column"), (5,), 136, 512, split_k, shift=shift)
    got, want = execute(run)
    assert torch.equal(got, want) and want.isfinite().all()


def test_nothing_is_launched_on_overlap() -> None:
    """Check that nothing is launched if the result overlaps any other tensor of a call, including alpha and bias per
    expert."""
    check_nothing_is_launched_on_overlap(RUNS[3].case.kernel, ARCHS["sm_90a"])


STATIC = Run(case(NVFP4, "plain", (16, 128, 2), False, BF16, "column", BF16), (5,), 136, 640, 6, seed=1)


def test_a_static_weight() -> None:
    check_static_weight(execute, STATIC)


def test_whether_a_weight_is_read_before_the_wait() -> None:
    check_read_ahead(execute, STATIC)


PAIRED = Run(case(NVFP4, "plain", (64, 128, 1), False, BF16), (70,), 120, 1792, 1)
FAST = Run(case(MXFP4, "counted", (256, 128, 1), True, BF16), (130, 3), 72, 768, 1)
K_GROUPS = Run(case(NVFP4, "masked", (16, 128, 1), True, BF16), (3, 5), 72, 2816, 1, room=8)
BARRIER, BARRIERS = r"bar\.sync\s+(?:[1-9]|%)", 2
"""Pattern of named barriers in PTX, and how many named barriers there are: one for the tables, one for the scales of
``a``."""
MMAS_DONE = changed(r"wgmma\.wait_group\.sync\.aligned", None)


EXCHANGE = Run(case(NVFP4, "plain", (128, 128, 2), True, BF16), (130,), 72, 2816, 2)
WAITS = {"two k tiles": (PAIRED, 5), "K groups": (K_GROUPS, 7), "slots": (FAST, 13), "exchange": (EXCHANGE, 7)}
"""Runs, each with the number of waits in its kernel."""
OF_STAGES = 0
"""Index, in ``FAST``, of the producer's wait for an empty stage. This wait is not needed as long as ``a`` has fewer
slots than three stages have k tiles: earlier, the producer has already waited for a slot that becomes empty later than
the stage."""
OF_SUMS = 5
"""Index, in ``K_GROUPS``, of the wait in which the second K group waits until the first has read the previous tile's
accumulators. This wait is needed only if the first K group is late by a whole tile."""


@pytest.mark.parametrize(
    ("run", "wait"),
    [
        pytest.param(run, wait, id=f"{name}-{wait}")
        for name, (run, count) in WAITS.items()
        for wait in range(count)
        if (run, wait) not in ((K_GROUPS, OF_SUMS), (FAST, OF_STAGES))
    ],
)
def test_every_wait_is_needed(run: Run, wait: int) -> None:
    """Check that each wait of the producer, the scale loaders and the consumers is needed."""
    with pytest.raises((EmulationError, Deadlock, AssertionError)):
        check_in_orders(execute, run, 3, changed(WAIT, wait, PASSED))


@pytest.mark.parametrize(("run", "count"), WAITS.values(), ids=WAITS)
def test_those_are_all_waits(run: Run, count: int) -> None:
    with pytest.raises(IndexError):
        execute(run, changed(WAIT, count, PASSED))


@pytest.mark.parametrize("run", [PAIRED, FAST, K_GROUPS], ids=["two k tiles", "fast", "K groups"])
def test_what_orders_a_gemm_is_enough_and_needed(run: Run) -> None:
    """Check that the result is right in several orders of threads. Also check that the emulator finds a race, a
    deadlock or a wrong result in one of these orders if the waits for MMAs, the waits for copies, or any one of the
    named barriers is removed."""
    check_in_orders(execute, run, 3)
    barriers = [changed(BARRIER, number) for number in range(BARRIERS)]
    for edit in (MMAS_DONE, changed(WAIT, None, PASSED), *barriers):
        with pytest.raises((EmulationError, Deadlock, AssertionError)):
            check_in_orders(execute, run, 3, edit)


@pytest.mark.parametrize(("rows", "k"), [(3, 64), (5, 448), (2, 1024)])
def test_interleaving(rows: int, k: int) -> None:
    """Check the kernel that interleaves k, with whole and partial groups of 256 elements, and that it spills
    nothing."""
    a = torch.randint(256, (rows, k), dtype=torch.uint8)
    kernel = interleave_k.InterleaveKKernel(interleave_k.Config(pdl=True))
    out = torch.full((rows, -(-k // 256) * 256), 0xEE, dtype=torch.uint8)
    run_kernel(kernel, ARCHS["sm_90a"], a.view(E4M3), out.view(E4M3), strict=True)
    assert torch.equal(out, interleaved(a.float()).to(torch.uint8))
    (resources,) = compile_ptx(kernel, ARCHS["sm_90a"]).resources
    assert resources.spill_bytes == 0
