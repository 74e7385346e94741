"""Host side of the kernel that quantises rows: its specification ``RowQuantSpec``, its ``Config`` and ``plan``."""

import itertools
import math
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.formats.fp8 import (
    COLUMN,
    FP8_BLOCK128,
    FP8_BLOCK128_UE8M0,
    FP8_DYNAMIC_TENSOR,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP8,
    ROW,
    FP8Format,
    resolve_fp8_format,
)
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.kernels.common.core.layouts import SCHEDULERS
from torch_cute_ops.kernels.common.experts.layouts import table_experts
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS
from torch_cute_ops.runtime.arch import Arch

WARP = 32
QUAD = 4
"""Number of rows whose scales share 16 bytes in a tiled layout."""
MAX_CLUSTER = 8
MAX_REGISTERS = 255
MAX_SLICE_WIDTH = 7168
"""Largest width of a slice, if rows need no reduction over their elements. On an H200, ``silu_mul_fp4quant`` with
14,336 columns takes, with two slices per row, 2.75 µs for 1 row and 79 µs for 4,680 rows. With whole rows it takes 3.92
µs and 81 µs, and with four slices per row 2.3 µs and 93 µs."""
MAX_FEW_ROWS_SLICE_WIDTH = 2048
"""Largest width of a slice of FP4 rows, if there are at most ``FEW_ROWS`` rows. Compared with a width of 7,168, this
width saves time in a W4A4 decoder layer of an 8B model on an H200: 0.5 µs with 8 rows, 1.8 µs with 16, 0.9 µs with 32,
1.8 µs with 64 and 2.4 µs with 128. FP8 rows are not cut into narrower slices: a layer would be 0.9 µs faster with 1
row, but 0.8 µs slower with 8 rows."""
FEW_ROWS = 128
"""Largest number of rows for which rows are cut into slices of ``MAX_FEW_ROWS_SLICE_WIDTH``. More rows were not
measured."""
MAX_UNQUANTISED_SLICE_WIDTH = 1792
"""Largest width of a slice of rows that are not quantised. On an H200, ``silu_mul`` with 14,336 columns takes, with
slices of this width, 1.2 µs for 1 row and 96 µs for 4,680 rows; with two slices per row, 1.9 µs and 105 µs."""
ENOUGH_BYTES = 48 * 1024
"""Bytes of row buffers per CTA from which on further groups do not speed up a kernel that adds a residual."""
ENOUGH_THREADS = 256
"""Number of threads per CTA from which on further groups do not speed up a kernel that gates."""
AMAX_THREADS = 256
"""Number of threads of a CTA of the kernel that computes the amax of a tensor."""
AMAX_UNITS = 4
"""Number of units of 16 elements that a thread of the kernel for the amax of a tensor loads at once."""
REGISTERS_PER_LANE = 512
"""Number of registers per lane of an SM sub-partition, which all warps of the sub-partition share. The number of
registers per lane of a warp is a multiple of 8."""


Source = Literal["rows", "add", "silu_mul"]
RowsOf = Literal["all", "experts"]


@dataclass(frozen=True)
class RowQuantSpec:
    """Specification of a kernel that quantises rows: its input, operations and output format.

    Attributes:
        source: origin of a row of values. ``"rows"``: a row of the input. ``"add"``: the sum of a row of the input and
            a row of the residual, which overwrites the residual. ``"silu_mul"``: the second half of a row of the input,
            gated by the first half.
        dtype: dtype of the input: bfloat16, float16 or float32.
        weight_dtype: dtype of the norm's weight and bias, or None without a norm.
        width: number of elements of a row of values.
        norm_width: number of elements over which the mean square is computed. The other elements of a row are zeros
            (padding).
        fmt, layout: format and scale layout. If ``fmt`` is None, nothing is quantised, and ``writes_norm`` is True.
        also_linear: True if the scales are written a second time, in the linear layout.
        has_factor: True if calls pass a global scale (FP4) or the scale of the tensor (FP8).
        writes_norm: True if the values before quantisation, such as normalised rows, are an output in ``dtype``.
        rows: ``"all"`` for all rows of the input, or ``"experts"`` for the experts' rows in a buffer whose padding is
            neither read nor written.
        has_offsets: True if calls pass the first row of each expert.
        has_counts: True if calls pass the number of rows of each expert. Without counts, the buffer contains no padding
            between experts.
        swiglu: True if the gate of ``"silu_mul"`` is ``core.epilogue.swiglu`` with run-time parameters, False if it is
            ``silu(gate) * up``.
        max_experts: capacity of the table of experts' rows, in experts.
        interleaved: True if k of FP8 codes is interleaved (``formats.interleave``). Rows of codes are then padded with
            zeros to a multiple of 256 elements.
        has_row_scale: True if each NVFP4 row has its own global scale, which the kernel computes from the row's amax.
            The inverse of this global scale, the row scale, is then an output.
        weight_plus_one: True if the norm multiplies by 1 + weight, which is added in fp32.
        gate: activation function of the gate of ``"silu_mul"``. The value is ``"silu"`` if ``swiglu`` is True.
        has_weight: False if the norm multiplies by no weight.
        has_bias: True if a bias is added to the norm.
        subtracts_mean: True if the norm first subtracts the mean of the row, as LayerNorm does.
        has_fp32_residual: True if the residual of ``"add"`` is float32 and the input has 16 bits.
        four_over_six: True if each NVFP4 block of a row without a norm gets the better of two scales.
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
    interleaved: bool = False
    has_row_scale: bool = False
    weight_plus_one: bool = False
    gate: Gate = "silu"
    has_weight: bool = True
    has_bias: bool = False
    subtracts_mean: bool = False
    has_fp32_residual: bool = False
    four_over_six: bool = False

    @classmethod
    def for_gated_rows(cls, dtype: torch.dtype, width: int, gate: Gate = "silu") -> "RowQuantSpec":
        """Return the specification that maps rows of gate and up, (M, 2 · width), to ``act(gate) * up`` in
        ``dtype``."""
        return cls("silu_mul", dtype, None, width, width, None, writes_norm=True, gate=gate)

    @classmethod
    def for_fp4_rows(
        cls,
        dtype: torch.dtype,
        width: int,
        gate: Gate | None,
        fmt: FP4Format,
        layout: ScaleLayout,
        has_factor: bool,
    ) -> "RowQuantSpec":
        """Return the specification that quantises rows (M, width) to FP4, or rows of gate and up (M, 2 · width) if
        ``gate`` is not None."""
        rows = cls("rows", dtype, None, width, width, fmt, layout, has_factor=has_factor)
        return rows if gate is None else replace(rows, source="silu_mul", gate=gate)

    @classmethod
    def for_gated_experts(
        cls,
        dtype: torch.dtype,
        width: int,
        has_offsets: bool,
        has_counts: bool,
        swiglu: bool,
        experts: int = USUAL_EXPERTS,
        gate: Gate = "silu",
        scale_format: str | None = None,
    ) -> "RowQuantSpec":
        """Return the specification that gates experts' rows and quantises them to FP8 blocks of 128 with column-major
        scales."""
        fmt, layout = resolve_fp8_format(FP8_BLOCK128.granularity, COLUMN.name, scale_format)
        blocks = cls("silu_mul", dtype, None, width, width, fmt, layout, rows="experts", swiglu=swiglu)
        # Without counts there is no table. Use the same ``max_experts`` for all calls, so that they share a kernel.
        room = table_experts(experts) if has_counts else USUAL_EXPERTS
        return replace(blocks, has_offsets=has_offsets, has_counts=has_counts, max_experts=room, gate=gate)

    @property
    def has_tensor_scale(self) -> bool:
        """True if the format is FP8 with one scale for the tensor."""
        return self.fmt in (FP8_TENSOR, FP8_DYNAMIC_TENSOR)

    @property
    def has_table(self) -> bool:
        """True if the kernel looks up experts' rows in a table. Without counts, the experts' rows are one range."""
        return self.rows == "experts" and self.has_counts

    @property
    def table_words(self) -> tuple[int, int, int, int]:
        """Numbers of words of the arrays in the table of experts' rows, in the order of ``experts.ExpertRows``."""
        return self.max_experts, self.max_experts, 4, WARP

    @property
    def inputs(self) -> int:
        """Number of input rows that the kernel reads for one row of values."""
        return 1 if self.source == "rows" else 2

    @property
    def input_units(self) -> int:
        """Memory of the input rows from which one row of values is computed, as a multiple of ``width`` elements of
        ``dtype``."""
        return self.inputs + self.has_fp32_residual

    @property
    def input_width(self) -> int:
        """Number of elements of an input row."""
        return 2 * self.width if self.source == "silu_mul" else self.width

    @property
    def block_elements(self) -> int:
        """Number of elements of a *block*, which a thread processes at once: an FP4 or MXFP8 block, or ``FP8_UNIT``
        elements."""
        return self.fmt.block_size if self.fmt is not None and self.has_byte_scales else FP8_UNIT

    @property
    def has_byte_scales(self) -> bool:
        """True if the format is FP4 or MXFP8. The block scales of both formats are bytes, in the same layouts."""
        return self.fmt is not None and self.fmt.scale_dtype.itemsize == 1

    @property
    def has_fp8_blocks(self) -> bool:
        """True if the format is FP8 with an fp32 scale per 128 elements, which ``SCALE_THREADS`` threads share."""
        return self.fmt in (FP8_BLOCK128, FP8_BLOCK128_UE8M0)

    @property
    def blocks(self) -> int:
        """Number of blocks of ``block_elements`` elements in a row."""
        return self.width // self.block_elements

    @property
    def padding_blocks(self) -> int:
        """Number of blocks of zeros at the end of a row of interleaved codes."""
        return -self.blocks % (INTERLEAVED_K // self.block_elements) if self.interleaved else 0

    def slices(self, splits: int) -> tuple[int, int]:
        """Return the number of blocks of each slice, and of the last slice, if a row is cut into ``splits`` slices."""
        # A slice must not cut a scale tile, or a group of blocks that share an FP8 scale.
        most = ceil_div(ceil_div(self.blocks, splits), 8) * 8 if splits > 1 else self.blocks
        return most, self.blocks - (splits - 1) * most

    @property
    def normalises(self) -> bool:
        return self.weight_dtype is not None

    @property
    def reduces_amax(self) -> bool:
        """True if each row has one scale. The threads of a row then reduce the row's amax."""
        return self.fmt == FP8_TOKEN or self.has_row_scale

    @property
    def folds(self) -> bool:
        """True if the norm's factor ``rstd`` may multiply whole blocks instead of elements. The value is False for
        fp32, because an fp32 output of the norm would show that ``v · w`` lost bits in the subnormal range. (For each
        dtype, all ops must give the same codes.)"""
        return self.normalises and self.dtype != torch.float32 and not self.is_general

    @property
    def is_general(self) -> bool:
        """True for norms other than RMSNorm with a weight and without a bias. The kernel then reduces one value after
        the other."""
        return self.normalises and (self.subtracts_mean or self.has_bias or not self.has_weight)

    @property
    def copies_terms(self) -> bool:
        """True if the kernel copies the weight or the bias of a norm to shared memory."""
        return self.normalises and (self.has_weight or self.has_bias)

    @property
    def counts_unusual_blocks(self) -> bool:
        """True if the threads that process a row must also count its blocks of unusual magnitude. The count is needed
        if the norm's factor ``rstd`` may multiply whole blocks, and a block's scale may be arbitrarily small."""
        return self.folds and (self.fmt in (MXFP4, MXFP8) or self.has_fp8_blocks)

    @property
    def reductions(self) -> int:
        """Number of reductions over the threads of a row: one for the sum, one for the sum of squares, one for the amax
        and one for the count of unusual blocks, each only if it is needed."""
        return self.normalises + self.subtracts_mean + self.reduces_amax + self.counts_unusual_blocks


@dataclass(frozen=True)
class Config:
    """Static properties of a kernel that quantises rows. A *block* is ``RowQuantSpec.block_elements`` elements.

    Attributes:
        spec: specification of the kernel.
        has_e2m1_cvt: True if the hardware can convert to e2m1.
        splits: number of slices of a row. Each CTA of a cluster processes one slice.
        threads_per_row: number of threads of a CTA that share a row: a power of two below 32, or a multiple of 32.
        groups: number of groups of a CTA.
        stages: number of row buffers of a group.
        bulk_norm: True if groups that process several rows store norms by bulk copies from shared memory, False if all
            groups store norms from registers.
        pdl: True to launch with programmatic dependent launch.
        few_rows_config: configuration for up to ``FEW_ROWS`` rows, or None if this configuration serves them too.
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
        """Number of elements of a slice."""
        return self.slice_blocks * self.spec.block_elements

    @property
    def blocks_per_thread(self) -> int:
        """Largest number of blocks of a row that a thread processes."""
        return ceil_div(self.slice_blocks, self.threads_per_row)

    @property
    def has_short_block(self) -> bool:
        """True if the last FP8 block of a row holds 64 elements instead of 128."""
        return self.spec.has_fp8_blocks and self.spec.width % FP8_BLOCK128.block_size != 0

    @property
    def has_idle_threads(self) -> bool:
        """True if some threads of a row have no block. This is allowed only if the row has a short FP8 block."""
        return self.spec.slices(self.splits)[1] < self.threads_per_row

    @property
    def busy_warps(self) -> int:
        """Number of warps of a group that process one block more than the other warps, or 0 if all warps process the
        same number.

        If the rate of instructions limits the speed, the other warps skip the instructions of the last block, which
        they do not have. This applies to norms and gates on hardware without e2m1 conversion. On an H200, RMSNorm of
        rows of 7,168 bfloat16 to NVFP4 reaches 0.93 of a copy's bandwidth if warps skip, and 0.86 if all warps process
        four blocks. But if warps skip, a single row takes 0.1 µs longer, because the instructions of the last block no
        longer interleave with the instructions of the other blocks. Additions of a residual, and rows without norm or
        gate, do not become faster.
        """
        spec = self.spec
        is_limited = spec.source == "silu_mul" or (spec.source == "rows" and spec.normalises)
        is_limited &= isinstance(spec.fmt, FP4Format) and not self.has_e2m1_cvt and not spec.is_general
        if not is_limited or self.group_rows > 1:
            return 0
        busy = ceil_div(self.slice_blocks - (self.blocks_per_thread - 1) * self.threads_per_row, WARP)
        return busy if busy < self.group_warps else 0

    @property
    def common_blocks(self) -> int:
        """Number of blocks that every warp of a group processes."""
        return self.blocks_per_thread - (self.busy_warps > 0)

    def first_column(self, group):
        """Return the rotation of a group, which is added to the indices of its threads before they choose blocks.

        Rotations differ between groups, so that the warps with an extra block are spread evenly over the schedulers.
        ``group`` may be a device integer.
        """
        turn = group // max(1, SCHEDULERS // self.group_warps)
        return turn * self.busy_warps % self.group_warps * WARP

    @property
    def quads(self) -> bool:
        """True if the kernel collects the scales of four rows (a quad) and stores them together."""
        return not self.spec.layout.is_linear and self.group_rows == 1

    @property
    def is_cluster(self) -> bool:
        """True if several CTAs share a row, and send each other their partial results."""
        return self.splits > 1 and self.spec.reductions > 0

    @property
    def waves(self) -> int:
        """Number of CTAs to launch, in multiples of the number of CTAs that the GPU runs at the same time.

        The result is usually 1, because CTAs are persistent. But the number of clusters of 4 or 8 CTAs that run at the
        same time depends on how the GPU groups its SMs, and one cluster that starts late would double the time. So for
        these clusters the result is larger, and each cluster gets fewer rows.
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
        """Number of rows that a group processes at the same time."""
        return self.group_threads // self.threads_per_row

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.group_threads * self.groups

    @property
    def num_partials(self) -> int:
        """Number of warps that share a row. Each warp stores one partial result per reduction."""
        return self.splits * self.group_warps

    @property
    def group_partial_sums(self) -> int:
        """Number of words for the partial results of a group: for even rows, for odd rows, and for an amax that is
        recomputed."""
        return self.num_partials * (2 * max(1, self.spec.reductions) + self.recomputes_amax)

    @property
    def recomputes_amax(self) -> bool:
        """True if the row's amax may have to be reduced again."""
        return self.spec.reduces_amax and not self.spec.is_general

    @property
    def group_barriers(self) -> int:
        """Number of mbarriers of a group: one per stage, one for the partial results of even rows, one for odd rows,
        and one for an amax that is recomputed. General norms need two mbarriers for each reduction: one for even rows
        and one for odd rows."""
        return self.stages + (2 * self.spec.reductions if self.spec.is_general else 2 + self.recomputes_amax)

    @property
    def row_bytes(self) -> int:
        """Bytes of shared memory for the row buffers of a CTA."""
        spec = self.spec
        return self.groups * self.stages * self.group_rows * spec.input_units * self.slice_width * spec.dtype.itemsize

    @property
    def norm_bytes(self) -> int:
        """Bytes of shared memory for a CTA's buffers of normalised rows: two buffers per row that the CTA processes at
        the same time."""
        spec = self.spec
        return 2 * self.groups * self.group_rows * self.slice_width * spec.dtype.itemsize if self.bulk_norm else 0

    @property
    def has_enough_groups(self) -> bool:
        """True if another group would not speed up the CTA, even if it fits into shared memory.

        A CTA that adds a residual moves many bytes for little arithmetic, and more rows in flight only congest the
        memory system. On an H200 at width 8,192, an addition of a residual reaches 0.94 of a copy's bandwidth with one
        group, and 0.90 with two groups.
        """
        if self.spec.source == "add":
            return self.row_bytes >= ENOUGH_BYTES
        if self.spec.rows == "experts":
            return False
        return self.spec.source == "silu_mul" and self.threads >= ENOUGH_THREADS

    @property
    def quad_bytes(self) -> int:
        """Bytes of the scales of one quad of rows."""
        return QUAD * self.spec.layout.padded_blocks(self.slice_blocks)

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """Offsets of the buffers in the shared memory of a CTA, in bytes."""
        spec = self.spec
        weight_bytes = self.slice_width * spec.weight_dtype.itemsize if spec.weight_dtype is not None else 0
        sizes = (
            self.row_bytes,
            self.norm_bytes,
            weight_bytes * spec.has_weight,
            weight_bytes * spec.has_bias,
            2 * self.groups * self.quad_bytes if self.quads else 0,
            self.groups * self.group_partial_sums * 4,
            4 * sum(spec.table_words) if spec.has_table else 0,
            (self.groups * self.group_barriers + 1) * 8,
        )
        return SmemOffsets(*itertools.accumulate((ceil_div(size, 128) * 128 for size in sizes), initial=0))

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
        return self.smem_offsets.end

    def tensor_ctas(self, rows: int, sms: int) -> int:
        """Return the number of CTAs, on a GPU with this number of SMs, of the kernel that computes the amax of a tensor
        with ``rows`` rows."""
        return max(1, min(2 * sms, ceil_div(rows * self.blocks, AMAX_THREADS * AMAX_UNITS)))

    @property
    def as_smallest_add(self) -> "Config":
        """Configuration of a kernel that adds a residual before the same norm, with the fewest possible buffers.

        ``splits`` and ``threads_per_row`` determine the order in which the squares of a row are summed. For every norm,
        ``plan`` chooses values for which this configuration fits too. So ops with and without a residual give the same
        bits.
        """
        if not self.spec.normalises:
            return self
        return replace(
            self, spec=replace(self.spec, source="add", also_linear=False), groups=1, stages=1, bulk_norm=False
        )

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        if self.splits > MAX_CLUSTER and self.is_cluster:
            return f"rows of {self.spec.width} elements need {self.splits} CTAs; a cluster has at most {MAX_CLUSTER}"
        if self.has_idle_threads:
            # A thread without a block reads another block instead. This leaves the result unchanged only if the row has
            # a short block.
            with_neighbours = ceil_div(self.blocks, SCALE_THREADS) * SCALE_THREADS
            if not self.has_short_block or self.splits > 1 or with_neighbours < self.threads_per_row:
                return f"{self.threads_per_row} threads share only {self.spec.slices(self.splits)[1]} blocks of a row"
        if self.is_cluster and self.group_rows > 1:
            return "rows that share a warp are not split: each warp has one place for its partial results"
        # Estimate the registers: registers for products and weight, plus ``others`` for addresses and intermediate
        # values. ``others`` is the smallest number for which ptxas does not spill, as
        # tests/kernels/test_compile_kernels.py checks.
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
        "input residual weight bias factor y scale scale_linear norm row_scale "
        "offsets counts eps swiglu_alpha swiglu_beta swiglu_limit max_ctas",
    )
):
    """Run-time arguments, in order, for R rows of W elements (``RowQuantSpec.width``) in B blocks, and E experts.

    A field is None if the ``RowQuantSpec`` does not need it. All tensors except ``input`` and ``residual`` are
    contiguous.

    Attributes:
        input: (R, ``RowQuantSpec.input_width``) of ``RowQuantSpec.dtype``. Rows may be strided.
        residual: (R, W) of ``RowQuantSpec.dtype``, or fp32 with ``RowQuantSpec.has_fp32_residual``, for the source
            ``"add"``, overwritten by the sums. Rows may be strided. The residual may be the input itself, or other
            columns of the same matrix.
        weight: (W,) weight of a norm, in ``RowQuantSpec.weight_dtype``, with ``RowQuantSpec.has_weight``.
        bias: (W,) bias of a norm, in ``RowQuantSpec.weight_dtype``, with ``RowQuantSpec.has_bias``.
        factor: (1,) fp32 global scale (FP4) or scale of the tensor (FP8), with ``RowQuantSpec.has_factor``. If the
            kernels compute the scale of the tensor: fp32 workspace with one element per CTA of the first kernel.
        y: (R, W/2) uint8 FP4 codes, or float8_e4m3fn: (R, W), or (R, ⌈W/256⌉, 256) with ``RowQuantSpec.interleaved``.
            None without a format.
        scale: FP4 or MXFP8 scales, e4m3 or uint8, in the shape of ``RowQuantSpec.layout``. Other FP8 scales, fp32: (1,)
            or (R, scales of a row), contiguous by rows or by columns. None without a format.
        scale_linear: (R, B) in the dtype of ``scale``, with ``RowQuantSpec.also_linear``.
        norm: (R, W) of ``RowQuantSpec.dtype``, with ``RowQuantSpec.writes_norm``.
        row_scale: (R,) fp32 row scales, with ``RowQuantSpec.has_row_scale``.
        offsets: (E + 1,) int32 first rows of experts, or (2,) for the range of all rows, with
            ``RowQuantSpec.has_offsets``.
        counts: (E,) int32 numbers of rows of experts, with ``RowQuantSpec.has_counts``.
        eps: fp32, added to the mean square, or to the variance, of a norm.
        swiglu_alpha, swiglu_beta, swiglu_limit: fp32 parameters of the gate, with ``RowQuantSpec.swiglu``. A limit of
            +inf means no limit.
        max_ctas: int32, number of CTAs that fill the GPU, times ``Config.waves``.
    """


class SmemOffsets(NamedTuple):
    """Offsets of the buffers in shared memory, in bytes.

    Attributes:
        rows: row buffers of every group and stage.
        norms: buffers of normalised rows that wait for a bulk store. Each row of a group has two.
        weight: weight of the norm.
        bias: bias of the norm.
        scales: scale buffers of quads. Each group has two.
        partial_sums: ``group_partial_sums`` words of each group.
        experts: table of experts' rows.
        barriers: ``group_barriers`` mbarriers of each group, followed by the mbarrier of the weight.
        end: total size.
    """

    rows: int
    norms: int
    weight: int
    bias: int
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

    Except for few rows, these choices were the fastest for 2^26 elements on an H200 (bfloat16 to NVFP4 with 128x4
    scales; widths 1,536 to 32,768). Few threads with many blocks each are faster than many threads with few blocks
    each, because the instructions for a thread's blocks are independent. 50 to 100 KB in flight per SM are faster than
    more, which would only queue in the memory system. For experts' rows, twice the threads and as many groups as fit
    are faster: 131,072 rows of 2,048 elements reach 0.99 of a copy's bandwidth instead of 0.91. Without a table of
    experts' rows, the kernel is another 4 % faster.

    Raises:
        ValueError: if no configuration fits. The message gives the reason.
    """
    most_splits = MAX_CLUSTER if spec.reductions else spec.blocks
    doubled = [2**i for i in range(most_splits.bit_length())]
    if spec.reductions or spec.rows == "experts":
        return _fitting(spec, arch, pdl, doubled)
    # The slices of these rows are independent. Slices make launches of few rows faster, and many rows take the same
    # time.
    most = MAX_UNQUANTISED_SLICE_WIDTH if spec.fmt is None else MAX_SLICE_WIDTH
    config = _fitting(spec, arch, pdl, [ceil_div(spec.width, most), *doubled])
    if isinstance(spec.fmt, FP4Format):
        config = replace(config, few_rows_config=_plan_few_rows(config, arch))
    return config


def _plan_few_rows(config: Config, arch: Arch) -> Config | None:
    """Return the configuration for up to ``FEW_ROWS`` rows, or None if ``config`` is as good.

    Among ``config`` and the configurations with more slices, choose the configurations with the fewest blocks per
    thread, and among these the configuration with the fewest slices.
    """
    found = [config]
    for splits in range(config.splits + 1, ceil_div(config.spec.width, MAX_FEW_ROWS_SLICE_WIDTH) + 1):
        try:
            found.append(_fitting(config.spec, arch, config.pdl, [splits]))
        except ValueError:
            continue
    best = min(found, key=lambda each: (each.blocks_per_thread, -each.splits))
    return None if best is config else best


def _fitting(spec: RowQuantSpec, arch: Arch, pdl: bool, numbers: Iterable[int]) -> Config:
    """Try the numbers of slices in ``numbers`` in order. Return the first configuration that fits."""
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
        if spec.has_fp8_blocks:
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
