"""The kernel that sums rows of several GPUs, executed in the PTX emulator for one of the GPUs. The test lays the peers'
rows in the staging and reads what the kernel sends to them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from support.emulated import BLACKWELL, CONSUMER, HOPPER, equal, poisoned
from support.kernel_fit import REGISTERS_PER_SM
from support.kernel_grid import BF16, FP16, FP32
from test_row_quant_emulated import EPS, Outcome, check, expected

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, FP8_BLOCK128_UE8M0, FP8_TOKEN, MXFP8, ROW
from torch_cute_ops.kernels import all_reduce_rows, row_quant
from torch_cute_ops.kernels.all_reduce_rows.config import CONTROL_WORDS, FAILED, MAX_CTAS
from torch_cute_ops.kernels.all_reduce_rows.kernel import AllReduceRowsKernel
from torch_cute_ops.runtime.arch import ARCHS

ABSENT = -1
TIMER = r"mov\.u64 (\S+), %globaltimer"
LATE = 2**62
"""Value of the timer, in ns, after all waits have ended."""


class Run(NamedTuple):
    """Launch of the kernel on GPU ``rank`` of ``ranks``."""

    fmt: Any
    layout: Any
    width: int
    rows: int
    ranks: int
    rank: int
    dtype: torch.dtype = BF16
    weight: torch.dtype = BF16
    arch: str = HOPPER
    max_ctas: int = 2
    epoch: int = 0
    seed: int | None = 0

    @property
    def kernel(self) -> AllReduceRowsKernel:
        spec = row_quant.RowQuantSpec(
            "add", self.dtype, self.weight, self.width, self.width, self.fmt, self.layout, writes_norm=self.fmt is None
        )
        return AllReduceRowsKernel(all_reduce_rows.plan(spec, ARCHS[self.arch], self.ranks))

    @property
    def is_in_two_shots(self) -> bool:
        """True if two shots save at least 1 MiB per GPU. In all runs, each GPU then owns a row."""
        saved = self.rows * self.width * self.dtype.itemsize * (self.ranks - 1 - 2 * (self.ranks - 1) / self.ranks)
        return saved >= 2**20

    @property
    def owners(self) -> torch.Tensor:
        """(rows,), rank that sums each row in two shots: the same for rows that share a warp."""
        return torch.arange(self.rows) // self.kernel.config.rows.group_rows % self.ranks


TILES = SCALE_LAYOUTS["128x4"]
RUNS = {
    # With two ranks, the emulator runs the first or the second. A group of threads processes several rows, so it sends
    # rows ahead.
    "nvfp4": Run(NVFP4, TILES, 1024, 7, 2, 0),
    "nvfp4-odd-epoch": Run(NVFP4, TILES, 1024, 132, 2, 1, epoch=7, seed=1),
    "rows-share-a-warp": Run(MXFP4, SCALE_LAYOUTS["8x4"], 128, 19, 2, 1, weight=FP32, arch=BLACKWELL, max_ctas=1),
    "short-block": Run(FP8_BLOCK128, COLUMN, 576, 5, 2, 0, arch=CONSUMER),
    "powers-of-two": Run(FP8_BLOCK128_UE8M0, COLUMN, 576, 5, 2, 1),
    "mxfp8": Run(MXFP8, TILES, 1024, 7, 2, 0, arch=BLACKWELL),
    # More than two ranks, so that the sum depends on the order of the additions
    "middle-of-three": Run(FP8_TOKEN, ROW, 1040, 5, 3, 1, dtype=FP16, weight=FP16, epoch=2**31 + 1),
    "last-of-four": Run(None, ROW, 1536, 5, 4, 3, dtype=FP32, weight=FP32, seed=None),
    "first-of-eight": Run(NVFP4, SCALE_LAYOUTS["linear"], 512, 3, 8, 0, arch=BLACKWELL),
    # Rows that are exchanged in two shots: each row is sent to its owner, which sends back the sum.
    "two-shots-of-four": Run(None, ROW, 8192, 23, 4, 2, dtype=FP32, weight=FP32, epoch=3),
    "two-shots-of-eight": Run(NVFP4, TILES, 16_384, 9, 8, 0, max_ctas=4),
    "two-shots-share-a-warp": Run(MXFP4, SCALE_LAYOUTS["8x4"], 128, 790, 8, 3, arch=BLACKWELL),
    "cluster": Run(None, ROW, 32_768, 3, 2, 1, dtype=FP32, weight=FP32, max_ctas=8),
}


class Given(NamedTuple):
    """Tensors of a launch.

    Attributes:
        inputs: rows of all ranks.
        staging, slots, control, report: as in ``all_reduce_rows.Arguments``.
    """

    inputs: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    staging: torch.Tensor
    slots: list[torch.Tensor]
    control: torch.Tensor
    report: torch.Tensor


def words_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.int32).reshape(-1)


def peers_of(run: Run) -> list[int]:
    return [rank for rank in range(run.ranks) if rank != run.rank]


def words_from(run: Run, inputs: list[torch.Tensor], sender: int, receiver: int) -> torch.Tensor:
    """Return the words that a rank sends to another: its rows, or in two shots its rows to their owner, and sums from
    their owner."""
    rows = words_of(inputs[sender]).reshape(run.rows, -1)
    if run.is_in_two_shots:
        sums, owners = words_of(total_of(inputs)).reshape(run.rows, -1), run.owners[:, None]
        rows = torch.where(owners == receiver, rows, torch.where(owners == sender, sums, ABSENT))
    return rows.flatten()


def given_for(run: Run) -> Given:
    torch.manual_seed(run.rows)
    inputs = [
        (torch.randn(run.rows, run.width) * 2.0 ** torch.randint(-9, 9, (run.rows, run.width))).to(run.dtype)
        for _ in range(run.ranks)
    ]
    residual = torch.randn(run.rows, run.width).to(run.dtype)
    weight = (torch.rand(run.width) + 0.5).to(run.weight)
    words = words_of(inputs[0]).numel() + 8
    staging = torch.full((2, run.ranks - 1, words), ABSENT, dtype=torch.int32)
    for slot, peer in enumerate(peers_of(run)):
        staging[run.epoch % 2, slot, :-8] = words_from(run, inputs, peer, run.rank)
    # A slot at a peer is part of the peer's staging.
    slots = [torch.full((2, run.ranks - 1, words), ABSENT, dtype=torch.int32)[:, 0] for _ in range(run.ranks - 1)]
    control = torch.zeros(CONTROL_WORDS, dtype=torch.int32)
    control[:MAX_CTAS] = torch.tensor(run.epoch, dtype=torch.int64).to(torch.int32)
    return Given(inputs, residual, weight, staging, slots, control, torch.zeros(run.ranks - 1, dtype=torch.int32))


def with_timer(value: int) -> Any:
    """Return a function that edits PTX: the timer is 0 at the start of the kernel, and ``value`` during waits."""

    def edit(ptx: str) -> str:
        ptx, count = re.subn(TIMER, lambda match: f"mov.u64 {match[1]}, {value if match[1] == 'now' else 0}", ptx)
        assert count > 1
        return ptx

    return edit


def arriving_late(ptx: str) -> str:
    """Edit PTX: first loads of peers' vectors find nothing, and loads in the final check of a vector are faults."""
    statements = ptx.split("// begin inline asm")
    first = r"@p ld\.relaxed\.sys\.global\.v4\.u32 \{(\S+), (\S+), (\S+), (\S+)\}, \[\S+\];"
    absent = " ".join(rf"@p mov.b32 \{i}, {2**32 - 1};" for i in range(1, 5))
    counts = [0, 0]
    for i, statement in enumerate(statements):
        if "ld.relaxed.sys" in statement and ", 0; @p ld" in statement:
            statements[i], found = re.subn(first, absent, statement)
            counts[0] += found
        elif "polls" in statement and "st.relaxed.sys.global.v4" in statements[i + 1]:
            statements[i], found = re.subn(r"ld\.relaxed\.sys\.global\.v4\.u32 .*?;", "trap;", statement)
            counts[1] += found
    assert counts[0] == counts[1] > 1
    return "// begin inline asm".join(statements)


def execute(run: Run, given: Given, timer: int = 0, more: Any = str, **options: Any) -> Outcome:
    kernel = run.kernel
    fmt, rows = run.fmt, run.rows
    y = scale = norm = None
    if isinstance(fmt, FP4Format):
        y = poisoned(rows, run.width // 2, dtype=torch.uint8)
        scale = poisoned(*run.layout.shape((rows,), run.width // fmt.block_size), dtype=fmt.scale_dtype)
    elif fmt is not None:
        y = poisoned(rows, run.width, dtype=torch.float8_e4m3fn)
        count = fmt.scales_per_row(run.width)
        if run.layout == COLUMN:
            scale = poisoned(count, rows, dtype=FP32).t()
        else:
            scale = poisoned(*run.layout.shape((rows,), count), dtype=fmt.scale_dtype)
    else:
        norm = poisoned(rows, run.width, dtype=run.dtype)
    residual = given.residual.clone()
    arguments = all_reduce_rows.Arguments(
        *(given.inputs[run.rank], residual, given.weight, None, y, scale, norm, EPS, run.max_ctas, run.rank),
        given.staging,
        *(*given.slots, *(None,) * (8 - run.ranks)),
        control=given.control,
        report=given.report,
        timeout_ms=1000,
    )
    strict = not kernel.config.rows.is_cluster
    options = {"seed": run.seed, "strict": strict, "scoped": True, **options}
    edit = with_timer(timer)
    run_kernel(kernel, ARCHS[run.arch], *arguments, edit=lambda ptx: more(edit(ptx)), **options)
    return Outcome(y, scale, None, norm, residual)


def total_of(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Add up the ranks' rows in fp32, in the order of the ranks, and round once."""
    total = inputs[0].float()
    for rows in inputs[1:]:
        total = total + rows.float()
    return total.to(inputs[0].dtype)


def check_sent(run: Run, given: Given) -> None:
    """Check that the rows were sent to each peer, to the right half, and nothing else."""
    for slot, peer in zip(given.slots, peers_of(run), strict=True):
        equal("sent", slot[run.epoch % 2, :-8], words_from(run, given.inputs, run.rank, peer))
        assert (slot[run.epoch % 2, -8:] == ABSENT).all()
        assert (slot[1 - run.epoch % 2] == ABSENT).all()


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])
def test_results(run: Run) -> None:
    """Check the results, what is sent, and that the staging is clear and the launch counted afterwards."""
    given = given_for(run)
    got = execute(run, given)
    spec = run.kernel.config.spec
    check(spec, got, expected(spec, total_of(given.inputs), given.residual, given.weight, None))
    check_sent(run, given)
    assert (given.staging == ABSENT).all()
    assert given.control.tolist() == [(run.epoch + 1 + 2**31) % 2**32 - 2**31] * MAX_CTAS + [0] * 4
    assert not given.report.any()
    (resources,) = compile_ptx(run.kernel, ARCHS[run.arch]).resources
    assert resources.spill_bytes == resources.stack_bytes == resources.smem_bytes == 0
    assert resources.registers * run.kernel.config.rows.threads <= REGISTERS_PER_SM


def test_word_that_stands_for_absence() -> None:
    """Check that a row of the words that mean "absent", which are NaNs, is sent as other NaNs."""
    run = RUNS["nvfp4"]
    given = given_for(run)
    own = given.inputs[run.rank]
    words_of(own)[512:514] = ABSENT  # the second row; a view
    got = execute(run, given)
    spec = run.kernel.config.spec
    check(spec, got, expected(spec, total_of(given.inputs), given.residual, given.weight, None))
    sent = given.slots[0][0, :-8]
    assert not (sent == ABSENT).any()
    assert (sent != words_of(own)).nonzero().flatten().tolist() == [512, 513]
    assert sent[512:514].view(run.dtype).isnan().all()


def test_input_and_staging_of_the_previous_kernel() -> None:
    """Check that the kernel reads the input, the residual and its state only after the previous kernel."""
    run = RUNS["nvfp4"]
    given = given_for(run)
    numbers = [all_reduce_rows.Arguments._fields.index(name) for name in ("input", "control")]
    late = dict(zip(numbers, (given.inputs[run.rank].clone(), given.control.clone()), strict=True))
    given.inputs[run.rank].zero_()
    given.control[:MAX_CTAS] = 1  # the other half
    got = execute(run, given, written_before=late)
    inputs = [late[0], *given.inputs[1:]]
    spec = run.kernel.config.spec
    check(spec, got, expected(spec, total_of(inputs), given.residual, given.weight, None))


def test_rows_that_do_not_arrive() -> None:
    """Check that a launch waits for each word of a peer."""
    run = RUNS["nvfp4"]
    given = given_for(run)
    for word in (0, 2051, given.staging.shape[2] - 9):
        lacking = given_for(run)
        lacking.staging[run.epoch % 2, 0, word] = ABSENT
        with pytest.raises(EmulationError):
            execute(run, lacking, max_steps=20_000)
        assert not lacking.report.any()


@pytest.mark.parametrize("name", ["nvfp4", "short-block", "middle-of-three", "first-of-eight", "two-shots-of-four"])
def test_vectors_that_arrive_during_the_wait(name: str) -> None:
    """Check that a thread which waited for the last of its vectors loads all others again before it waits for them."""
    run = RUNS[name]
    given = given_for(run)
    got = execute(run, given, more=arriving_late)
    spec = run.kernel.config.spec
    check(spec, got, expected(spec, total_of(given.inputs), given.residual, given.weight, None))
    assert (given.staging == ABSENT).all()


@pytest.mark.parametrize("name", ["nvfp4-odd-epoch", "middle-of-three"])
def test_time_out(name: str) -> None:
    """Check that waits end when the time is over: the peer is reported, and no other peer."""
    run = RUNS[name]
    given = given_for(run)
    given.staging[run.epoch % 2, -1, 600] = ABSENT
    execute(run, given, timer=LATE)
    assert given.control[FAILED] == 1
    assert given.report.tolist() == [0] * (run.ranks - 2) + [1]
    check_sent(run, given)


def test_owners_of_rows_that_share_a_warp() -> None:
    """Check that all rows of a warp have one owner: otherwise, lanes of two GPUs could wait for each other's sums."""
    run = RUNS["two-shots-share-a-warp"]
    assert run.kernel.config.rows.group_rows == 8 and run.is_in_two_shots
    given = given_for(run)
    execute(run, given)
    sums = words_of(total_of(given.inputs)).reshape(run.rows, -1)
    for slot in given.slots:
        sent = slot[run.epoch % 2, :-8].reshape(run.rows, -1)
        owned = ((sent == sums).all(1)).nonzero().flatten().tolist()
        assert owned == [row for row in range(run.rows) if row // 8 % run.ranks == run.rank]


def test_time_out_in_two_shots() -> None:
    """Check that an owner sends no sum of a vector that did not arrive, so that the peers' waits fail too."""
    run = RUNS["two-shots-of-four"]
    given = given_for(run)
    half, row, word = run.epoch % 2, 2 * run.width, 600
    assert run.is_in_two_shots and run.owners[2] == run.rank
    given.staging[half, 0, row + word] = ABSENT
    execute(run, given, timer=LATE)
    assert given.control[FAILED] == 1 and given.report.tolist() == [1, 0, 0]
    for slot, peer in zip(given.slots, peers_of(run), strict=True):
        want = words_from(run, given.inputs, run.rank, peer)
        assert (slot[half, :-8] != want).nonzero().flatten().tolist() == [row + word + i for i in range(4)]
        assert (slot[half, row + word : row + word + 4] == ABSENT).all()


def test_launch_after_a_failure() -> None:
    """Check that a launch after a failed wait neither sends nor waits nor reports."""
    run = RUNS["middle-of-three"]
    given = given_for(run)
    before = given.staging.fill_(ABSENT).clone()
    given.control[FAILED] = 1
    execute(run, given, timer=LATE)
    assert all((slot == ABSENT).all() for slot in given.slots)
    assert torch.equal(given.staging, before)
    assert not given.report.any()


def test_too_many_rows_are_refused() -> None:
    """Check that rows that do not fit into a slot are refused before the launch."""
    run = RUNS["nvfp4"]
    given = given_for(run)
    small = given._replace(
        staging=given.staging[..., :-12].contiguous(), slots=[slot[:, :-12].contiguous() for slot in given.slots]
    )
    with pytest.raises(ValueError, match="a launch of no CTAs"):
        execute(run, small)
