"""What a row-quantising kernel is asked for, and how it is built for that: no device code."""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_cute_ops.formats import NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.runtime.arch import Arch

WARP = 32
QUAD = 4
"""Rows whose scales share 16 bytes of a tiled layout."""
MAX_CLUSTER = 8
MAX_REGISTERS = 255
REGISTERS_PER_LANE = 512
"""Registers of one lane in a quarter of an SM, shared out to the quarter's warps in steps of 8."""


@dataclass(frozen=True)
class Problem:
    """What a caller wants quantised.

    Attributes:
        dtype: of the input: bfloat16, float16 or float32.
        weight_dtype: of the norm's weight; ``None``: no norm.
        width: elements of a row.
        fmt, layout: FP4 format and scale layout.
        global_scale: whether a global scale is passed.
        writes_norm: whether the normalised rows are an output too.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    width: int
    fmt: FP4Format
    layout: ScaleLayout
    global_scale: bool
    writes_norm: bool


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        problem: what is quantised.
        has_e2m1_cvt: whether the hardware converts to e2m1.
        splits: CTAs of the cluster that share a row.
        threads_per_row: threads of one CTA that share a row: a power of two below a warp, or whole warps.
        groups: groups of a CTA.
        stages: row buffers of a group.
        pdl: whether launches are programmatic dependent launches.
    """

    problem: Problem
    has_e2m1_cvt: bool
    splits: int
    threads_per_row: int
    groups: int
    stages: int
    pdl: bool

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.problem.width // self.problem.fmt.block_size

    @property
    def slice_blocks(self) -> int:
        """Blocks of a slice; the last slice may have fewer."""
        return ceil_div(ceil_div(self.blocks, self.splits), 4) * 4 if self.splits > 1 else self.blocks

    @property
    def slice_width(self) -> int:
        """Elements of a slice."""
        return self.slice_blocks * self.problem.fmt.block_size

    @property
    def thread_blocks(self) -> int:
        """Blocks of a row that one thread takes at most."""
        return ceil_div(self.slice_blocks, self.threads_per_row)

    @property
    def quads(self) -> bool:
        """Whether scales are gathered four rows at a time."""
        return not self.problem.layout.is_linear and self.group_rows == 1

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
    def quad_bytes(self) -> int:
        """Scales of one quad."""
        return QUAD * self.problem.layout.padded_blocks(self.slice_blocks)

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """How the shared memory of a CTA is divided."""
        p = self.problem
        sizes = (
            self.groups * self.stages * self.group_rows * self.slice_width * p.dtype.itemsize,
            0 if p.weight_dtype is None else self.slice_width * p.weight_dtype.itemsize,
            2 * self.groups * self.quad_bytes if self.quads else 0,
            2 * self.groups * self.splits * self.group_warps * 4,
            (self.groups * (self.stages + 2) + 1) * 8,
        )
        return SmemOffsets(*itertools.accumulate((ceil_div(size, 128) * 128 for size in sizes), initial=0))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.smem_offsets.end

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.splits > MAX_CLUSTER and self.problem.weight_dtype is not None:
            return f"rows of {self.problem.width} elements need {self.splits} CTAs; a cluster has at most {MAX_CLUSTER}"
        # Products and weight live in registers; some more serve addresses and intermediate values, most where the row
        # factor is applied to each element (ptxas, no spills; tests/test_compile_kernels.py).
        others = 40 if self.problem.fmt is NVFP4 else 56
        wanted = 2 * self.thread_blocks * self.problem.fmt.block_size + others
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
        weight: the norm's weight.
        scales: scales of quads, two for each group.
        sums: sums of squares, of every warp and CTA that share a row, for two rows of each group.
        barriers: mbarriers: ``stages`` + 2 of each group, then the weight's.
        end: of all.
    """

    rows: int
    weight: int
    scales: int
    sums: int
    barriers: int
    end: int


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def plan(problem: Problem, arch: Arch, pdl: bool = True) -> Config:
    """The configuration for ``problem`` on ``arch``.

    The choices are what was fastest at 2^26 elements on an H200 (bfloat16, NVFP4, 128x4; widths 1,536 to 32,768).
    There, few threads with many blocks each beat many threads with few, because a thread's blocks are independent
    instructions; and 60 to 100 KB on their way to an SM beat more, which only queue up in the memory system.

    Raises:
        ValueError: if there is none, saying why.
    """
    rejected = None
    splits = 1
    while splits <= MAX_CLUSTER or problem.weight_dtype is None:
        slice_width = ceil_div(problem.width, splits)
        elements = 64 if slice_width > 4096 else 48
        threads = 2 ** math.ceil(math.log2(max(1.0, slice_width / elements)))
        threads = min(threads, slice_width // problem.fmt.block_size)
        threads = 2 ** math.floor(math.log2(threads))
        per_thread = ceil_div(slice_width, threads)
        resident = 512 if per_thread <= 32 else 384
        for stages in (2, 1):
            for groups in range(max(1, resident // max(WARP, threads)), 0, -1):
                config = Config(problem, arch.has_e2m1_cvt, splits, threads, groups, stages, pdl)
                rejected = config.reason_unsupported(arch)
                if rejected is None:
                    return config
        splits *= 2
    raise ValueError(rejected)
