"""What a row-quantising kernel is asked for, and how it is built for that: no device code."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.formats.fp8 import FP8_BLOCK128, FP8_TOKEN, FP8Format
from torch_cute_ops.kernels.common.expert_table import TABLE_BYTES
from torch_cute_ops.kernels.common.fp8_units import FP8_UNIT
from torch_cute_ops.runtime.arch import Arch

WARP = 32
SCHEDULERS = 4
"""Of an SM. Warps belong to them in turn."""
QUAD = 4
"""Rows whose scales share 16 bytes of a tiled layout."""
MAX_CLUSTER = 8
MAX_REGISTERS = 255
ENOUGH_BYTES = 48 * 1024
"""Row buffers with which a CTA that adds has groups enough."""
ENOUGH_THREADS = 256
"""Threads with which a CTA that gates has groups enough."""
REGISTERS_PER_LANE = 512
"""Registers of one lane in a quarter of an SM, shared out to the quarter's warps in steps of 8."""


Source = Literal["rows", "add", "silu_mul"]
RowsOf = Literal["all", "experts"]


@dataclass(frozen=True)
class Problem:
    """What a caller wants quantised.

    Attributes:
        source: what a row of values is: a row of the input; its sum with the residual's, which the sum replaces; or
            ``silu`` of a row's first half times its second half.
        dtype: of the input: bfloat16, float16 or float32.
        weight_dtype: of the norm's weight; ``None``: no norm.
        width: elements of a row that is quantised.
        norm_width: elements that the mean square is over; the others of a row are zeros, and padding.
        fmt, layout: format and scale layout.
        also_linear: whether the scales are written a second time, in the linear layout.
        has_factor: whether there is a global scale (FP4) or a given scale (FP8).
        writes_norm: whether the normalised rows are an output too.
        rows: which rows there are: all of the input; or those of experts, in a buffer whose padding is neither read nor
            written.
        has_offsets, has_counts: of experts' rows, whether it is given where they begin, and how many they are. Without
            counts they have no padding between them.
    """

    source: Source
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    width: int
    norm_width: int
    fmt: FP4Format | FP8Format
    layout: ScaleLayout
    also_linear: bool = False
    has_factor: bool = False
    writes_norm: bool = False
    rows: RowsOf = "all"
    has_offsets: bool = False
    has_counts: bool = False

    @property
    def has_table(self) -> bool:
        """Whether experts' rows are found by a table: by offsets alone they are one range."""
        return self.rows == "experts" and self.has_counts

    @property
    def inputs(self) -> int:
        """Rows read for one row of values."""
        return 1 if self.source == "rows" else 2

    @property
    def input_width(self) -> int:
        """Elements of an input row."""
        return 2 * self.width if self.source == "silu_mul" else self.width

    @property
    def unit(self) -> int:
        """Elements that a thread takes at once: a block of FP4, or ``FP8_UNIT``."""
        return self.fmt.block_size if isinstance(self.fmt, FP4Format) else FP8_UNIT

    @property
    def blocks(self) -> int:
        """Units of a row."""
        return self.width // self.unit

    def slices(self, splits: int) -> tuple[int, int]:
        """Units of a slice, and of the last one, of a row that is cut into ``splits``."""
        # Not less than a tile of scales, nor than what shares an FP8 scale.
        most = ceil_div(ceil_div(self.blocks, splits), 8) * 8 if splits > 1 else self.blocks
        return most, self.blocks - (splits - 1) * most

    @property
    def normalises(self) -> bool:
        return self.weight_dtype is not None

    @property
    def reduces_amax(self) -> bool:
        """Whether a scale is of a whole row."""
        return self.fmt == FP8_TOKEN

    @property
    def folds(self) -> bool:
        """Whether the row factor of a norm may be left to the block. Not in fp32: in a norm that is written, what a
        product with the weight lost in the subnormal range would show, and all ops of a dtype give the same codes."""
        return self.normalises and self.dtype != torch.float32

    @property
    def counts_unusual(self) -> bool:
        """Whether the threads of a row have to know of blocks of unusual size: where the row factor may be left to a
        block, and its scale may be as small as any number."""
        return self.folds and self.fmt in (MXFP4, FP8_BLOCK128)

    @property
    def reductions(self) -> int:
        """Values that the threads of a row reduce: the sum of squares; the largest magnitude, or a number of blocks."""
        return self.normalises + self.reduces_amax + self.counts_unusual


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. A *block* is what a thread takes at once: ``Problem.unit`` elements.

    Attributes:
        problem: what is quantised.
        has_e2m1_cvt: whether the hardware converts to e2m1.
        splits: CTAs of the cluster that share a row.
        threads_per_row: threads of one CTA that share a row: a power of two below a warp, or whole warps.
        groups: groups of a CTA.
        stages: row buffers of a group.
        bulk_norm: whether normalised rows go to memory by bulk copies from shared memory, not from registers.
        pdl: whether launches are programmatic dependent launches.
    """

    problem: Problem
    has_e2m1_cvt: bool
    splits: int
    threads_per_row: int
    groups: int
    stages: int
    bulk_norm: bool
    pdl: bool

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.problem.blocks

    @property
    def slice_blocks(self) -> int:
        """Blocks of a slice; the last slice may have fewer."""
        return self.problem.slices(self.splits)[0]

    @property
    def slice_width(self) -> int:
        """Elements of a slice."""
        return self.slice_blocks * self.problem.unit

    @property
    def thread_blocks(self) -> int:
        """Blocks of a row that one thread takes at most."""
        return ceil_div(self.slice_blocks, self.threads_per_row)

    @property
    def busy_warps(self) -> int:
        """Warps of a group that have a block more than the others, which leave it out; 0 if all take as many.

        For rows whose blocks do not fill their threads, where instructions limit: norms and gates, if hardware does not
        convert. Norms of 7,168 in NVFP4 run at 0.93 of the copy, and at 0.86 if all warps take four blocks (bfloat16,
        H200). But the last block's instructions no longer mix with others: a row alone takes 0.1 µs longer. Sums, and
        rows without a norm or a gate, gain nothing.
        """
        p = self.problem
        is_limited = p.source == "silu_mul" or (p.source == "rows" and p.normalises)
        is_limited &= isinstance(p.fmt, FP4Format) and not self.has_e2m1_cvt
        if not is_limited or self.group_rows > 1:
            return 0
        busy = ceil_div(self.slice_blocks - (self.thread_blocks - 1) * self.threads_per_row, WARP)
        return busy if busy < self.group_warps else 0

    @property
    def common_blocks(self) -> int:
        """Blocks that every warp of a group takes."""
        return self.thread_blocks - (self.busy_warps > 0)

    def first_column(self, group):
        """The column of a group's first thread: other warps are busy in other groups, so that each scheduler has as
        many of them. ``group`` may be a number of the device."""
        turn = group // max(1, SCHEDULERS // self.group_warps)
        return turn * self.busy_warps % self.group_warps * WARP

    @property
    def quads(self) -> bool:
        """Whether scales are gathered four rows at a time."""
        return not self.problem.layout.is_linear and self.group_rows == 1

    @property
    def is_cluster(self) -> bool:
        """Whether the CTAs that share a row talk to each other."""
        return self.splits > 1 and self.problem.reductions > 0

    @property
    def waves(self) -> int:
        """How many times the grid may fill the device.

        Once, with persistent CTAs. But how many clusters of 4 or 8 CTAs a GPU holds at a time depends on how its SMs
        are grouped, and a cluster left over would double the time; so such clusters come in more and smaller portions.
        """
        return 1 if self.splits <= 2 else 8

    @property
    def group_threads(self) -> int:
        return max(WARP, self.threads_per_row)

    @property
    def group_warps(self) -> int:
        return self.group_threads // WARP

    @property
    def group_rows(self) -> int:
        """Rows that a group works on at once."""
        return self.group_threads // self.threads_per_row

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.group_threads * self.groups

    @property
    def partials(self) -> int:
        """Warps that share a row."""
        return self.splits * self.group_warps

    @property
    def group_sums(self) -> int:
        """Partial results of a group: of even and odd rows, and of an amax taken again."""
        return self.partials * (2 * max(1, self.problem.reductions) + self.problem.reduces_amax)

    @property
    def group_barriers(self) -> int:
        """mbarriers of a group: a stage full; sums complete, for even and odd rows; an amax taken again complete."""
        return self.stages + 2 + self.problem.reduces_amax

    @property
    def row_bytes(self) -> int:
        """Row buffers of a CTA."""
        p = self.problem
        return self.groups * self.stages * self.group_rows * p.inputs * self.slice_width * p.dtype.itemsize

    @property
    def norm_bytes(self) -> int:
        """Buffers for normalised rows of a CTA: two for each row that it works on."""
        p = self.problem
        return 2 * self.groups * self.group_rows * self.slice_width * p.dtype.itemsize if self.bulk_norm else 0

    @property
    def has_enough_groups(self) -> bool:
        """Whether another group would bring nothing, though there be room.

        A CTA that adds reads and writes much for its arithmetic: one that keeps more rows under way only gets in the
        way of the others in the memory system (0.94 of the copy with one group, 0.90 with two, 8192 wide on an H200).
        """
        if self.problem.source == "add":
            return self.row_bytes >= ENOUGH_BYTES
        if self.problem.rows == "experts":
            return False
        return self.problem.source == "silu_mul" and self.threads >= ENOUGH_THREADS

    @property
    def quad_bytes(self) -> int:
        """Scales of one quad."""
        return QUAD * self.problem.layout.padded_blocks(self.slice_blocks)

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """How the shared memory of a CTA is divided."""
        p = self.problem
        sizes = (
            self.row_bytes,
            self.norm_bytes,
            self.slice_width * p.weight_dtype.itemsize if p.weight_dtype is not None else 0,
            2 * self.groups * self.quad_bytes if self.quads else 0,
            self.groups * self.group_sums * 4,
            TABLE_BYTES if p.has_table else 0,
            (self.groups * self.group_barriers + 1) * 8,
        )
        return SmemOffsets(*itertools.accumulate((ceil_div(size, 128) * 128 for size in sizes), initial=0))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.smem_offsets.end

    @property
    def as_least_sum(self) -> "Config":
        """The same work on the sum with a residual, with as few buffers as can be.

        A norm's sum of squares is added up in an order that ``splits`` and ``threads_per_row`` decide. Rows are split
        only as those of the sum can be, so that the ops that add give the bits of those that do not.
        """
        if not self.problem.normalises:
            return self
        return replace(
            self, problem=replace(self.problem, source="add", also_linear=False), groups=1, stages=1, bulk_norm=False
        )

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.splits > MAX_CLUSTER and self.is_cluster:
            return f"rows of {self.problem.width} elements need {self.splits} CTAs; a cluster has at most {MAX_CLUSTER}"
        if self.problem.slices(self.splits)[1] < self.threads_per_row:
            return "a thread without a block has none to read in place of one"
        if self.is_cluster and self.group_rows > 1:
            return "rows that share a warp are not split: each warp has one place for its partial results"
        # Products and weight live in registers; some more serve addresses and intermediate values, fewest in NVFP4 on
        # sm_90a and sm_100a (ptxas, no spills; tests/kernels/test_compile_kernels.py).
        others = 56 if self.problem.fmt != NVFP4 else 48 if arch.name == "sm_120a" else 40
        wanted = 2 * self.thread_blocks * self.problem.unit + others
        warps = ceil_div(self.threads, 4 * WARP)
        registers = min(MAX_REGISTERS, REGISTERS_PER_LANE // warps // 8 * 8) if warps <= 16 else 0
        if wanted > registers:
            return f"rows of {self.problem.width} elements need {wanted} registers a thread; {registers} can be had"
        if self.smem_bytes > arch.smem_per_cta:
            return (
                f"rows of {self.problem.width} elements need {self.smem_bytes} bytes of shared memory in each of "
                f"{self.splits} CTAs; {arch.name} has {arch.smem_per_cta}"
            )
        return None


class SmemOffsets(NamedTuple):
    """Where in shared memory something begins, bytes.

    Attributes:
        rows: row buffers, of every group and stage.
        norms: normalised rows on their way to memory, two of each row of every group.
        weight: the norm's weight.
        scales: scales of quads, two for each group.
        sums: ``group_sums`` of each group.
        experts: the table of experts' rows.
        barriers: ``group_barriers`` of each group, then the weight's.
        end: of all.
    """

    rows: int
    norms: int
    weight: int
    scales: int
    sums: int
    experts: int
    barriers: int
    end: int


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def plan(problem: Problem, arch: Arch, pdl: bool = True) -> Config:
    """The configuration for ``problem`` on ``arch``.

    The choices are what was fastest at 2^26 elements on an H200 (bfloat16, NVFP4, 128x4; widths 1,536 to 32,768).
    There, few threads with many blocks each beat many threads with few, because a thread's blocks are independent
    instructions; and 50 to 100 KB on their way to an SM beat more, which only queue up in the memory system. But of
    experts' rows twice as many threads, and as many groups as fit, are better (131,072 rows of 2,048: 0.99 of the copy,
    not 0.91; found without a table 4 % faster).

    Raises:
        ValueError: if there is none, saying why.
    """
    rejected = None
    splits = 1
    while splits <= MAX_CLUSTER or not problem.reductions:
        slice_width = ceil_div(problem.width, splits)
        elements = 64 if slice_width > 4096 else 48
        if problem.rows == "experts":
            elements //= 2
        threads = 2 ** math.ceil(math.log2(max(1.0, slice_width / elements)))
        _, last = problem.slices(splits)
        if last < 1:
            break
        threads = 2 ** math.floor(math.log2(min(threads, last)))
        if problem.fmt == FP8_BLOCK128:
            threads = max(threads, FP8_BLOCK128.block_size // problem.unit)
        per_thread = ceil_div(slice_width, threads)
        resident = 512 if per_thread <= 32 else 384
        for stages, bulk_norm in itertools.product((2, 1), (True, False) if problem.writes_norm else (False,)):
            best = None
            for groups in range(1, max(1, resident // max(WARP, threads)) + 1):
                config = Config(problem, arch.has_e2m1_cvt, splits, threads, groups, stages, bulk_norm, pdl)
                reason = config.reason_unsupported(arch)
                if reason is None and splits < MAX_CLUSTER:
                    reason = config.as_least_sum.reason_unsupported(arch)
                if reason is None:
                    best = config
                    if config.has_enough_groups:
                        break
                elif groups == 1:
                    rejected = reason
            if best is not None:
                return best
        splits *= 2
    raise ValueError(rejected)
