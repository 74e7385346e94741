"""Host side of a row-quantising kernel: its specification (``RowQuantSpec``), ``Config`` and ``plan``."""

import itertools
import math
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, FP8_TOKEN, ROW, FP8Format
from torch_cute_ops.kernels.common.core.layouts import SCHEDULERS
from torch_cute_ops.kernels.common.experts.layouts import table_experts
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS
from torch_cute_ops.runtime.arch import Arch

WARP = 32
QUAD = 4
"""Number of rows whose scales share 16 bytes of a tiled layout."""
MAX_CLUSTER = 8
MAX_REGISTERS = 255
MAX_SLICE_WIDTH = 7168
"""Largest width of a slice of rows without reductions. On an H200, ``silu_mul_fp4quant`` of 14,336 columns takes
2.75 µs for 1 row and 79 µs for 4,680 rows in two slices; 3.92 and 81 µs with whole rows; 2.3 and 93 µs in four
slices."""
MAX_FEW_ROWS_SLICE_WIDTH = 2048
"""Largest width of a slice of up to ``FEW_ROWS`` rows in FP4. On an H200, with 8, 16, 32, 64 and 128 rows, a W4A4
layer of an 8B model takes 0.5, 1.8, 0.9, 1.8 and 2.4 µs less than with slices of 7,168. With FP8, a layer takes 0.9
µs less for 1 row, and 0.8 µs more for 8 rows."""
FEW_ROWS = 128
"""Largest number of rows for which such slices were measured in a layer."""
MAX_UNQUANTISED_SLICE_WIDTH = 1792
"""Largest width of a slice of rows that are not quantised. On an H200, ``silu_mul`` of 14,336 columns takes 1.2 µs
for 1 row and 96 µs for 4,680 rows; in two slices, 1.9 and 105 µs."""
ENOUGH_BYTES = 48 * 1024
"""Bytes of row buffers from which another group does not speed up a CTA that adds."""
ENOUGH_THREADS = 256
"""Threads from which another group does not speed up a CTA that gates."""
REGISTERS_PER_LANE = 512
"""Registers for each lane of a quarter of an SM. The quarter's warps share them in steps of 8."""


Source = Literal["rows", "add", "silu_mul"]
RowsOf = Literal["all", "experts"]


@dataclass(frozen=True)
class RowQuantSpec:
    """Specification of a kernel: its input, its operations, and its format.

    Attributes:
        source: origin of a row of values: ``"rows"``, a row of the input; ``"add"``, its sum with a row of the
            residual, which the sum overwrites; ``"silu_mul"``, a row's second half gated by its first.
        dtype: dtype of the input: bfloat16, float16 or float32.
        weight_dtype: dtype of the norm's weight, or None without a norm.
        width: elements of a row of values.
        norm_width: elements of the mean square; the rest of a row is zero padding.
        fmt, layout: format and scale layout. If ``fmt`` is None, nothing is quantised, and ``writes_norm`` is True.
        also_linear: True if the scales are written a second time, in the linear layout.
        has_factor: True with a global scale (FP4) or a given scale (FP8).
        writes_norm: True if the values before quantisation, such as normalised rows, are an output in ``dtype``.
        rows: ``"all"`` rows of the input, or the rows of ``"experts"`` in a buffer whose padding is neither read nor
            written.
        has_offsets, has_counts: True if the kernel is given the first row of each expert, and the number of its rows.
            Without counts, experts have no padding between them.
        swiglu: True for ``core.epilogue.swiglu`` with run-time parameters as the gate of ``"silu_mul"``; False for
            ``silu(gate) * up``.
        max_experts: number of experts for which the table of experts' rows has room.
    """

    source: Source
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    width: int
    norm_width: int
    fmt: FP4Format | FP8Format | None
    layout: ScaleLayout = ROW
    also_linear: bool = False
    has_factor: bool = False
    writes_norm: bool = False
    rows: RowsOf = "all"
    has_offsets: bool = False
    has_counts: bool = False
    swiglu: bool = False
    max_experts: int = USUAL_EXPERTS

    @classmethod
    def for_gated_rows(cls, dtype: torch.dtype, width: int) -> "RowQuantSpec":
        """Return the specification for rows of gate and up, (M, 2 · width), to ``silu(gate) * up`` in their dtype."""
        return cls("silu_mul", dtype, None, width, width, None, writes_norm=True)

    @classmethod
    def for_fp4_rows(
        cls, dtype: torch.dtype, width: int, gated: bool, fmt: FP4Format, layout: ScaleLayout, has_factor: bool
    ) -> "RowQuantSpec":
        """Return the specification for rows (M, width), or rows of gate and up (M, 2 · width) if ``gated``, to FP4."""
        return cls("silu_mul" if gated else "rows", dtype, None, width, width, fmt, layout, has_factor=has_factor)

    @classmethod
    def for_gated_experts(
        cls,
        dtype: torch.dtype,
        width: int,
        has_offsets: bool,
        has_counts: bool,
        swiglu: bool,
        experts: int = USUAL_EXPERTS,
    ) -> "RowQuantSpec":
        """Return the specification for experts' rows, gated, to FP8 blocks with scales by columns."""
        blocks = cls("silu_mul", dtype, None, width, width, FP8_BLOCK128, COLUMN, rows="experts", swiglu=swiglu)
        # Without counts there is no table.
        room = table_experts(experts) if has_counts else USUAL_EXPERTS
        return replace(blocks, has_offsets=has_offsets, has_counts=has_counts, max_experts=room)

    @property
    def has_table(self) -> bool:
        """True if experts' rows are looked up in a table. With offsets alone they are one range."""
        return self.rows == "experts" and self.has_counts

    @property
    def table_words(self) -> tuple[int, int, int, int]:
        """Size of each array of the table of experts' rows, in words, in the order of ``experts.ExpertRows``."""
        return self.max_experts, self.max_experts, 4, WARP

    @property
    def inputs(self) -> int:
        """Number of rows read for one row of values."""
        return 1 if self.source == "rows" else 2

    @property
    def input_width(self) -> int:
        """Elements of an input row."""
        return 2 * self.width if self.source == "silu_mul" else self.width

    @property
    def block_elements(self) -> int:
        """Elements of a *block*, which a thread processes at once: an FP4 block, or ``FP8_UNIT`` elements."""
        return self.fmt.block_size if isinstance(self.fmt, FP4Format) else FP8_UNIT

    @property
    def blocks(self) -> int:
        """Number of blocks of ``block_elements`` elements in a row."""
        return self.width // self.block_elements

    def slices(self, splits: int) -> tuple[int, int]:
        """Return the number of blocks of a slice, and of the last slice, of a row that is cut into ``splits``
        slices."""
        # Slices are whole scale tiles, and whole groups of blocks that share an FP8 scale.
        most = ceil_div(ceil_div(self.blocks, splits), 8) * 8 if splits > 1 else self.blocks
        return most, self.blocks - (splits - 1) * most

    @property
    def normalises(self) -> bool:
        return self.weight_dtype is not None

    @property
    def reduces_amax(self) -> bool:
        """True for one scale per row, so that its amax is reduced over its threads."""
        return self.fmt == FP8_TOKEN

    @property
    def folds(self) -> bool:
        """True if the norm's row factor may be applied to whole blocks. Not in fp32: a norm in fp32 would show the
        bits that ``v · w`` lost in the subnormal range, and all ops of a dtype must give the same codes."""
        return self.normalises and self.dtype != torch.float32

    @property
    def counts_unusual_blocks(self) -> bool:
        """True if the threads of a row count its blocks of unusual magnitude: if the row factor may be applied to
        whole blocks, and a block's scale can be arbitrarily small."""
        return self.folds and self.fmt in (MXFP4, FP8_BLOCK128)

    @property
    def reductions(self) -> int:
        """Number of values that the threads of a row reduce: the sum of squares; the amax, or the count of unusual
        blocks."""
        return self.normalises + self.reduces_amax + self.counts_unusual_blocks


@dataclass(frozen=True)
class Config:
    """Static properties of a kernel. A *block* is ``RowQuantSpec.block_elements`` elements.

    Attributes:
        spec: specification of the kernel.
        has_e2m1_cvt: True if the hardware converts to e2m1.
        splits: number of slices of a row, each for one CTA of a cluster.
        threads_per_row: number of threads of a CTA that share a row: a power of two below a warp, or whole warps.
        groups: number of groups of a CTA.
        stages: number of row buffers of a group.
        bulk_norm: True if norms of groups with several rows are stored by bulk copies from shared memory, not from
            registers.
        pdl: True for programmatic dependent launches.
        few_rows_config: configuration for up to ``FEW_ROWS`` rows, or None for this configuration.
    """

    spec: RowQuantSpec
    has_e2m1_cvt: bool
    splits: int
    threads_per_row: int
    groups: int
    stages: int
    bulk_norm: bool
    pdl: bool
    few_rows_config: "Config | None" = None

    @property
    def blocks(self) -> int:
        """Number of blocks of a row."""
        return self.spec.blocks

    @property
    def slice_blocks(self) -> int:
        """Number of blocks of a slice. The last slice may have fewer."""
        return self.spec.slices(self.splits)[0]

    @property
    def slice_width(self) -> int:
        """Elements of a slice."""
        return self.slice_blocks * self.spec.block_elements

    @property
    def blocks_per_thread(self) -> int:
        """Largest number of blocks of a row of a thread."""
        return ceil_div(self.slice_blocks, self.threads_per_row)

    @property
    def has_short_block(self) -> bool:
        """True if the last FP8 block of a row holds 64 elements instead of 128."""
        return self.spec.fmt == FP8_BLOCK128 and self.spec.width % FP8_BLOCK128.block_size != 0

    @property
    def has_idle_threads(self) -> bool:
        """True if some threads have no block. This is possible only next to a short FP8 block."""
        return self.spec.slices(self.splits)[1] < self.threads_per_row

    @property
    def busy_warps(self) -> int:
        """Number of warps of a group with one block more than the other warps, which skip it; 0 if none skips.

        Warps skip if the blocks of a row do not fill its threads and instruction issue is the limit: norms and gates on
        hardware without e2m1 conversion. On an H200, RMSNorm of 7,168 bfloat16 to NVFP4 runs at 0.93 of a copy's
        bandwidth, and at 0.86 if all warps process four blocks. In exchange, the last block's instructions no longer
        interleave with the others', so that a single row takes 0.1 µs longer. Sums, and rows without norm or gate, gain
        nothing.
        """
        spec = self.spec
        is_limited = spec.source == "silu_mul" or (spec.source == "rows" and spec.normalises)
        is_limited &= isinstance(spec.fmt, FP4Format) and not self.has_e2m1_cvt
        if not is_limited or self.group_rows > 1:
            return 0
        busy = ceil_div(self.slice_blocks - (self.blocks_per_thread - 1) * self.threads_per_row, WARP)
        return busy if busy < self.group_warps else 0

    @property
    def common_blocks(self) -> int:
        """Number of blocks that every warp of a group processes."""
        return self.blocks_per_thread - (self.busy_warps > 0)

    def first_column(self, group):
        """Return the column of a group's first thread. It rotates from group to group, so that the warps with an
        extra block are spread evenly over the schedulers. ``group`` may be a device integer."""
        turn = group // max(1, SCHEDULERS // self.group_warps)
        return turn * self.busy_warps % self.group_warps * WARP

    @property
    def quads(self) -> bool:
        """True if scales are collected from four rows and stored together."""
        return not self.spec.layout.is_linear and self.group_rows == 1

    @property
    def is_cluster(self) -> bool:
        """True if the CTAs that share a row exchange partial results."""
        return self.splits > 1 and self.spec.reductions > 0

    @property
    def waves(self) -> int:
        """Number of times that the grid may fill the device.

        Usually 1, since CTAs are persistent. But the number of concurrent clusters of 4 or 8 CTAs depends on how the
        GPU groups its SMs, and one cluster left over would double the time. So such clusters are launched as more,
        shorter ones.
        """
        return 8 if self.is_cluster and self.splits > 2 else 1

    @property
    def group_threads(self) -> int:
        return max(WARP, self.threads_per_row)

    @property
    def group_warps(self) -> int:
        return self.group_threads // WARP

    @property
    def group_rows(self) -> int:
        """Number of rows that a group works on at once."""
        return self.group_threads // self.threads_per_row

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.group_threads * self.groups

    @property
    def num_partials(self) -> int:
        """Number of warps that share a row."""
        return self.splits * self.group_warps

    @property
    def group_partial_sums(self) -> int:
        """Number of partial results of a group: for even and for odd rows, and for a recomputed amax."""
        return self.num_partials * (2 * max(1, self.spec.reductions) + self.spec.reduces_amax)

    @property
    def group_barriers(self) -> int:
        """Number of mbarriers of a group: stages full; partial sums complete, for even and odd rows; recomputed amax
        complete."""
        return self.stages + 2 + self.spec.reduces_amax

    @property
    def row_bytes(self) -> int:
        """Bytes of the row buffers of a CTA."""
        spec = self.spec
        return self.groups * self.stages * self.group_rows * spec.inputs * self.slice_width * spec.dtype.itemsize

    @property
    def norm_bytes(self) -> int:
        """Bytes of the buffers for normalised rows of a CTA: two for each row that it works on."""
        spec = self.spec
        return 2 * self.groups * self.group_rows * self.slice_width * spec.dtype.itemsize if self.bulk_norm else 0

    @property
    def has_enough_groups(self) -> bool:
        """True if another group would not speed up the CTA, even if there is room for it.

        A CTA that adds moves many bytes for little arithmetic, and more rows in flight only congest the memory system:
        on an H200 at width 8,192, 0.94 of a copy's bandwidth with one group, 0.90 with two.
        """
        if self.spec.source == "add":
            return self.row_bytes >= ENOUGH_BYTES
        if self.spec.rows == "experts":
            return False
        return self.spec.source == "silu_mul" and self.threads >= ENOUGH_THREADS

    @property
    def quad_bytes(self) -> int:
        """Bytes of the scales of one quad."""
        return QUAD * self.spec.layout.padded_blocks(self.slice_blocks)

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """Offsets in the shared memory of a CTA, in bytes."""
        spec = self.spec
        sizes = (
            self.row_bytes,
            self.norm_bytes,
            self.slice_width * spec.weight_dtype.itemsize if spec.weight_dtype is not None else 0,
            2 * self.groups * self.quad_bytes if self.quads else 0,
            self.groups * self.group_partial_sums * 4,
            4 * sum(spec.table_words) if spec.has_table else 0,
            (self.groups * self.group_barriers + 1) * 8,
        )
        return SmemOffsets(*itertools.accumulate((ceil_div(size, 128) * 128 for size in sizes), initial=0))

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.smem_offsets.end

    @property
    def as_smallest_add(self) -> "Config":
        """Same work on the sum with a residual, with the fewest possible buffers.

        ``splits`` and ``threads_per_row`` determine the order in which the squares of a row are summed. For all norms,
        ``plan`` chooses values that also fit the sum, so that ops with and without an addition give the same bits.
        """
        if not self.spec.normalises:
            return self
        return replace(
            self, spec=replace(self.spec, source="add", also_linear=False), groups=1, stages=1, bulk_norm=False
        )

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Reason that the kernel cannot run on ``arch``, or None."""
        if self.splits > MAX_CLUSTER and self.is_cluster:
            return f"rows of {self.spec.width} elements need {self.splits} CTAs; a cluster has at most {MAX_CLUSTER}"
        if self.has_idle_threads:
            # A thread without a block can only read its neighbour's half of a short block instead.
            with_neighbours = ceil_div(self.blocks, SCALE_THREADS) * SCALE_THREADS
            if not self.has_short_block or self.splits > 1 or with_neighbours < self.threads_per_row:
                return f"{self.threads_per_row} threads share only {self.spec.slices(self.splits)[1]} blocks of a row"
        if self.is_cluster and self.group_rows > 1:
            return "rows that share a warp are not split: each warp has one place for its partial results"
        # Registers for products and weight, plus registers for addresses and intermediate values: the fewest with which
        # ptxas does not spill (tests/kernels/test_compile_kernels.py).
        others = 56
        if self.spec.fmt == NVFP4:
            more = self.spec.writes_norm and self.spec.layout.is_linear
            others = 48 if more or arch.name == "sm_120a" else 40
        wanted = 2 * self.blocks_per_thread * self.spec.block_elements + others
        warps = ceil_div(self.threads, 4 * WARP)
        registers = min(MAX_REGISTERS, REGISTERS_PER_LANE // warps // 8 * 8) if warps <= 16 else 0
        if wanted > registers:
            return f"rows of {self.spec.width} elements need {wanted} registers a thread; {registers} are available"
        if self.smem_bytes > arch.smem_per_cta:
            return (
                f"rows of {self.spec.width} elements need {self.smem_bytes} bytes of shared memory in each of "
                f"{self.splits} CTAs; {arch.name} has {arch.smem_per_cta}"
            )
        return None


class Arguments(
    namedtuple(
        "Arguments",
        "input residual weight factor y scale scale_linear norm "
        "offsets counts eps swiglu_alpha swiglu_beta swiglu_limit max_ctas",
    )
):
    """Run-time arguments, in order, for R rows of W elements (``RowQuantSpec.width``) in B blocks, and E experts.

    A field is None if the ``RowQuantSpec`` does not need it. All tensors except ``input`` and ``residual`` are
    contiguous.

    Attributes:
        input: (R, ``RowQuantSpec.input_width``) of ``RowQuantSpec.dtype``; rows may be strided.
        residual: (R, W) like the input, updated in place; for the source ``"add"``. Rows may be strided. It may be the
            input itself, or other columns of the same matrix.
        weight: (W,) of ``RowQuantSpec.weight_dtype``, for a norm.
        factor: (1,) fp32, global scale (FP4) or given scale (FP8), with ``RowQuantSpec.has_factor``.
        y: (R, W/2) uint8 (FP4), or (R, W) float8_e4m3fn, with a format.
        scale: e4m3 or uint8 (FP4), in the shape of ``RowQuantSpec.layout``; or fp32 (FP8), (1,) or (R, scales of a
            row), contiguous by rows or by columns; with a format.
        scale_linear: (R, B) like the FP4 scales, with ``RowQuantSpec.also_linear``.
        norm: (R, W) of ``RowQuantSpec.dtype``, with ``RowQuantSpec.writes_norm``.
        offsets: (E + 1,) int32, or (2,) for the range of all rows, with ``RowQuantSpec.has_offsets``.
        counts: (E,) int32, with ``RowQuantSpec.has_counts``.
        eps: fp32, added to the mean square of a norm.
        swiglu_alpha, swiglu_beta, swiglu_limit: fp32, with ``RowQuantSpec.swiglu``; a limit of +inf is none.
        max_ctas: int32, number of CTAs that fill the device, times ``Config.waves``.
    """


class SmemOffsets(NamedTuple):
    """Offsets in shared memory, in bytes.

    Attributes:
        rows: row buffers of every group and stage.
        norms: normalised rows that wait for their bulk store, two for each row of every group.
        weight: weight of the norm.
        scales: scales of quads, two for each group.
        partial_sums: ``group_partial_sums`` of each group.
        experts: table of experts' rows.
        barriers: ``group_barriers`` of each group, then the weight's.
        end: total size.
    """

    rows: int
    norms: int
    weight: int
    scales: int
    partial_sums: int
    experts: int
    barriers: int
    end: int


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def plan(spec: RowQuantSpec, arch: Arch, pdl: bool = True) -> Config:
    """Return the configuration for ``spec`` on ``arch``.

    Except for few rows, the choices are the fastest at 2^26 elements on an H200 (bfloat16, NVFP4, 128x4; widths 1,536
    to 32,768). Few threads with many blocks each beat many threads with few, because the blocks of a thread are
    independent instructions. 50 to 100 KB in flight for each SM beat more, which only queue in the memory system. For
    experts' rows, twice as many threads and as many groups as fit are better: for 131,072 rows of 2,048, 0.99 of a
    copy's bandwidth instead of 0.91. Without the table, they gain another 4 %.

    Raises:
        ValueError: No configuration fits; the message says why.
    """
    most_splits = MAX_CLUSTER if spec.reductions else spec.blocks
    doubled = [2**i for i in range(most_splits.bit_length())]
    if spec.reductions or spec.rows == "experts":
        return _fitting(spec, arch, pdl, doubled)
    # Cut rows that need nothing of other slices: few rows take less time then, and many rows no more.
    most = MAX_UNQUANTISED_SLICE_WIDTH if spec.fmt is None else MAX_SLICE_WIDTH
    config = _fitting(spec, arch, pdl, [ceil_div(spec.width, most), *doubled])
    if isinstance(spec.fmt, FP4Format):
        config = replace(config, few_rows_config=_plan_few_rows(config, arch))
    return config


def _plan_few_rows(config: Config, arch: Arch) -> Config | None:
    """Return the configuration for up to ``FEW_ROWS`` rows, or None for ``config``: among those with more slices,
    the one with the fewest blocks for a thread."""
    found = [config]
    for splits in range(config.splits + 1, ceil_div(config.spec.width, MAX_FEW_ROWS_SLICE_WIDTH) + 1):
        try:
            found.append(_fitting(config.spec, arch, config.pdl, [splits]))
        except ValueError:
            continue
    best = min(found, key=lambda each: (each.blocks_per_thread, -each.splits))
    return None if best is config else best


def _fitting(spec: RowQuantSpec, arch: Arch, pdl: bool, numbers: Iterable[int]) -> Config:
    """Return the configuration with the first of these numbers of slices that fits."""
    rejected = None
    for splits in numbers:
        slice_width = ceil_div(spec.width, splits)
        elements = 64 if slice_width > 4096 else 48
        if spec.rows == "experts":
            elements //= 2
        threads = 2 ** math.ceil(math.log2(max(1.0, slice_width / elements)))
        _, last = spec.slices(splits)
        if last < 1:
            continue
        threads = 2 ** math.floor(math.log2(min(threads, last)))
        if spec.fmt == FP8_BLOCK128:
            threads = max(threads, SCALE_THREADS)
        per_thread = ceil_div(slice_width, threads)
        resident = 512 if per_thread <= 32 else 384
        for stages, bulk_norm in itertools.product((2, 1), (True, False) if spec.writes_norm else (False,)):
            best = None
            for groups in range(1, max(1, resident // max(WARP, threads)) + 1):
                config = Config(spec, arch.has_e2m1_cvt, splits, threads, groups, stages, bulk_norm, pdl)
                reason = config.reason_unsupported(arch)
                if reason is None and splits < MAX_CLUSTER:
                    reason = config.as_smallest_add.reason_unsupported(arch)
                if reason is None:
                    best = config
                    if config.has_enough_groups:
                        break
                elif groups == 1:
                    rejected = reason
            if best is not None:
                return best
    raise ValueError(rejected)
