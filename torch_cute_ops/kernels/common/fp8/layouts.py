"""Host side of FP8 kernels: sizes, layouts and arguments. No device code."""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from torch_cute_ops.formats import ScaleLayout
from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, WGMMA_M, Epilogue, PartialSums, first_fit
from torch_cute_ops.runtime.arch import Arch

# Lines of a result, which a warp assembles in shared memory (``row_stores``)

STORE_ROWS: Final = 16
STORE_LINE: Final = 128
"""Number of bytes of a line of the result, which a warp assembles in shared memory."""
STORE_PITCH: Final = STORE_LINE + 16
"""Distance between neighbouring lines in bytes. The padding puts words that lanes write at the same time into different
banks."""
STORE_TILE_BYTES: Final = STORE_ROWS * STORE_PITCH


# Rows that are quantised to FP8

FP8_UNIT = 16
"""Number of elements that a thread processes at once. Their codes fill a 16-byte store. Row widths are multiples of
16."""
SCALE_THREADS = FP8_BLOCK128.block_size // FP8_UNIT
"""Number of neighbouring threads that share a block of 128 elements and its scale."""


# Rows of experts


@dataclass(frozen=True)
class ExpertLayout:
    """Assignment of rows to experts. Without offsets and counts, one expert owns all rows.

    Attributes:
        has_offsets: True if calls pass offsets. An expert's rows begin at the expert's offset. If calls also pass
            counts, the number of rows is the expert's count. Otherwise the rows end at the next expert's offset.
        has_counts: True if calls pass counts. If calls pass counts but no offsets, all experts own the same number of
            rows of the buffer.
        max_experts: capacity of the table of experts, from ``table_experts``.
    """

    has_offsets: bool = False
    has_counts: bool = False
    max_experts: int = USUAL_EXPERTS

    @property
    def is_plain(self) -> bool:
        """Return True if one expert owns all rows."""
        return not (self.has_offsets or self.has_counts)

    @property
    def is_masked(self) -> bool:
        """Return True if all experts own the same number of rows of the buffer. ``a``, ``a_scale`` and ``out`` are then
        three-dimensional."""
        return self.has_counts and not self.has_offsets

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of experts in shared memory.

        The table holds three words per expert (first row, number of rows, number of tiles of all earlier experts) and
        one running sum per warp.
        """
        return 0 if self.is_plain else 3 * (self.max_experts + 4) * 4 + 128


class Arguments(namedtuple("Arguments", "a b a_scale b_scale offsets counts alpha bias out prefetch max_ctas")):
    """Run-time arguments of an FP8 GEMM, in order.

    Sizes: R rows of activations, of all experts together; E experts; N rows of an expert's weight, a multiple of 8; K
    elements per row of ``a``, a multiple of 64 (in 16 bits, of 32); ``blocks`` = ⌈K / 128⌉. In the masked layout
    (``ExpertLayout.is_masked``), each expert owns R / E rows, and ``a``, ``a_scale`` and ``out`` are three-dimensional.
    The last two dimensions of ``a`` and ``out`` are then contiguous.

    Attributes:
        a: (R, K) e4m3, contiguous. Masked: (E, R / E, K). Kernels with 16-bit activations take bfloat16 or float16.
        b: (K, N) e4m3, the transposed view of a row-major (N, K) weight. In grouped GEMMs: (E, K, N). Kernels with an
            FP4 weight take codes instead: (K / 2, N) or (E, K / 2, N) uint8.
        a_scale: (R, blocks) float32, column-major with any pitch between blocks. Masked: (E, R / E, blocks), where a
            column contains the rows of all experts. Per-token scales are (R, 1) in every layout, with any stride.
            Stride 0 means one scale for all rows. None with 16-bit activations.
        b_scale: (⌈N / 128⌉, blocks) float32. In grouped GEMMs: (E, ⌈N / 128⌉, blocks). With block scales of each weight
            row, (N, blocks) or (E, N, blocks), column-major. An FP4 weight's scales are in one of the FP4 scale
            layouts. None if ``alpha`` contains the weight's scales, as always if ``a`` has per-token scales.
        offsets: (E + 1,) int32 first rows of experts, or None unless ``ExpertLayout.has_offsets``.
        counts: (E,) int32 numbers of rows of experts, or None unless ``ExpertLayout.has_counts``.
        alpha: (1,), (N,), (E,) or (E, N) float32 factors, as ``Epilogue.alpha`` says, or None.
        bias: (N,) or (E, N) in ``Epilogue.bias_dtype``, or None.
        out: (R, N) in ``Epilogue.out_dtype``. Masked: (E, R / E, N). Only rows that an expert owns are written.
        prefetch: (rows, bytes) uint8, contiguous, to prefetch into L2, or None unless ``FP8GemmConfig.prefetches``.
        max_ctas: int32, number of CTAs that may run at the same time, a multiple of the cluster size. It depends only
            on the GPU.
    """


# wgmma GEMMs (``common.fp8.gemm``)

K_TILE: Final = FP8_BLOCK128.block_size
"""Number of elements along K of a k tile. Each row of ``a`` has one scale per k tile."""
GROUPS: Final = 2
"""Number of consumer warpgroups that share an output tile. Each multiplies 64 rows of the M side. If the M side has
only 64 rows, each multiplies all of them by half of the N side."""
MANY: Final = 128
"""Number of rows of ``a`` in a tile with ``a`` on the M side of the MMAs. In smaller tiles, called swapped, the weight
is on the M side."""
WIDE: Final = GROUPS * WGMMA_M
"""Number of weight rows of a tile. In swapped tiles, each consumer warpgroup multiplies 64 of them."""
SPLITS: Final = (1, 2, 3, 4, 6)
"""Supported values of ``split_k`` for tiles with few rows of ``a``."""
NARROW_SPLITS: Final = (1, 2)
"""Supported values of ``split_k`` for tiles with 64 weight rows. Clusters of two CTAs are enough to fill a GPU."""
SCALE_WARPS: Final = WARPGROUP // 32 - 1
"""Largest number of scale-loader warps: the rest of the producer's warpgroup."""
BARRIER_BYTES: Final = 272
"""Bytes of shared memory for barriers. The largest configuration needs three barriers for each of ten stages, and four
other barriers."""
RECORD_WORDS: Final = 4
"""Number of words of a stage's record, which describes the output tile: first row, number of rows from the first row
on, first column, and expert (0 if the epilogue does not depend on the expert)."""
RECORD_BYTES: Final = RECORD_WORDS * 4
LINE_SPAN: Final = 2
"""Number of k tiles per stage if each weight row's FP4 codes fill a cache line (128 bytes). L2 reads a line at once."""
FLAG_WORDS: Final = 4
"""Number of words for the flags of a k tile: one word, padded to 16 bytes."""


def unit_words(tile_n: int) -> int:
    """Return the number of words in a k tile's slot for changes of units (``common.fp8.units``): two factors per weight
    row, and the flags."""
    return 2 * tile_n + FLAG_WORDS


def reason_no_scale_layout(layout: ScaleLayout) -> str | None:
    """Return the reason that no FP8 x FP4 kernel reads weight scales in this layout, or None."""
    return None if layout.tile_rows in (0, 128) else f"weight scales in the layout {layout.name} are not supported"


@dataclass(frozen=True)
class FP8GemmConfig:
    """Static properties of an FP8 wgmma GEMM. N, K, R and the number of experts are run-time values.

    A *stage* of the pipeline holds ``span`` k tiles of ``a`` and of the weight, with their scales, and a record of the
    output tile. A *slot* is the place of one k tile in the pipeline.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on an accumulator before it is stored.
        tile_m, tile_n: numbers of rows of ``a`` and of the weight in a CTA's output tile.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of stages of the pipeline.
        pdl: True to launch with programmatic dependent launch.
        static_weight: True if the weight was complete before the previous launch on the stream. ``with_most_stages``
            sets it to False if it does not affect the kernel (``reads_ahead``).
        prefetches: True if the producer prefetches memory into L2 after its last copy.
        tiles: supported (tile_m, tile_n, split_k).
        stage_counts: supported numbers of stages, the largest first.
        registers: numbers of registers per thread: for consumers, for the producer's warpgroup, and for decoders if the
            kernel has decoders.
        in_flight: number of k tiles whose MMAs a consumer starts before it waits for the first k tile's MMAs.
        slot_words: number of fp32 words of a slot's scales, a multiple of 4.
        line: bytes of a weight row in a stage.
        span: number of k tiles of a stage.
        a_slots: number of k tiles of ``a`` in a separate pipeline, or 0 if the stages hold ``a``. With large tiles, k
            tiles of ``a`` are then copied and released one by one, although a stage holds ``span`` k tiles of the
            weight.
        k_groups: number of sets of ``GROUPS`` consumer warpgroups. With two sets, set i multiplies the i-th k tile of
            each stage, and the accumulators of both sets are added up after the last stage of a tile.
        has_token_scales: True if ``a`` has per-token scales, False if it has block scales.
        scale_warps: number of scale-loader warps, or 0 if consumers load all scales.
        scales_ahead: number of stages whose scales a scale loader loads together.
        prefetch_tile_m: largest ``tile_m`` for which the producer prefetches memory into L2.
        workspace_bytes: bytes of shared memory that only this kind of kernel needs.
        decoder_warps: number of warps of a decoder group, or 0 without decoders. A group decodes or rearranges a stage
            after the stage's copies have arrived.
        decoder_teams: number of decoder groups. Groups take the stages round-robin.
        cluster_m: number of CTAs of a cluster that share a weight tile. Each computes ``tile_m`` rows of ``a``.
        pairs_rows: True if a consumer thread's two rows of the M side are neighbours, False if they are 8 rows apart.
        unrolls: True if one iteration of the mainloop covers all stages of the pipeline, so that all addresses are
            constants.
        waits_last: True if consumers wait for the previous kernel only after their last tile, because the two kernels
            run at the same time.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tile_m: int
    tile_n: int
    split_k: int
    stages: int
    pdl: bool
    static_weight: bool
    prefetches: bool
    tiles: ClassVar[Sequence[tuple[int, int, int]]]
    stage_counts: ClassVar[Sequence[int]]
    in_flight: ClassVar[Any] = 2
    line: ClassVar[int] = K_TILE
    span: ClassVar[int] = 1
    a_slots: ClassVar[Any] = 0
    k_groups: ClassVar[Any] = 1
    has_token_scales: ClassVar[bool] = False
    scale_warps: ClassVar[Any] = SCALE_WARPS
    scales_ahead: ClassVar[Any] = 1
    prefetch_tile_m: ClassVar[int] = 16
    workspace_bytes: ClassVar[Any] = 0
    decoder_warps: ClassVar[Any] = 0
    decoder_teams: ClassVar[Any] = 1
    cluster_m = 1
    pairs_rows: ClassVar[bool] = False
    unrolls: ClassVar[Any] = False
    waits_last: ClassVar[Any] = False

    @property
    def registers(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def slot_words(self) -> int:
        raise NotImplementedError

    @staticmethod
    def reads_ahead(rows: ExpertLayout, tile_m: int, pdl: bool) -> bool:
        """Return True if the producer copies a static weight before it waits for the previous kernel.

        This needs ``pdl`` and a tile of few rows. With experts it is impossible, because an expert's rows are unknown
        before the wait.
        """
        return pdl and rows.is_plain and tile_m <= WGMMA_M

    @classmethod
    def may_prefetch(cls, rows: ExpertLayout, tile_m: int) -> bool:
        """Return True if the producer may prefetch memory into L2: only without experts, and in tiles of few rows."""
        return rows.is_plain and tile_m <= cls.prefetch_tile_m

    @property
    def waits_first(self) -> bool:
        """Return True if all threads wait for the previous kernel at the start of the kernel."""
        return self.pdl and not self.static_weight and not self.waits_last

    @property
    def is_swapped(self) -> bool:
        """Return True if the weight is on the M side of the MMAs."""
        return self.tile_m < MANY

    @property
    def m_parts(self) -> int:
        """Number of parts of a swapped tile's rows of ``a``. It is 2 if the tile has 64 weight rows: each warpgroup
        then multiplies all weight rows by one part. Otherwise it is 1."""
        return WIDE // self.tile_n if self.is_swapped else 1

    @property
    def mma_n(self) -> int:
        """N of the wgmma instruction."""
        return self.tile_m // self.m_parts if self.is_swapped else self.tile_n

    @property
    def teams_meet(self) -> bool:
        """Return True if a stage of the pipeline belongs to different decoder groups in successive rounds."""
        return self.stages % self.decoder_teams > 0

    @property
    def decoded_arrivals(self) -> int:
        """Number of decoder warps that must arrive to make a stage full."""
        return self.decoder_warps * (self.decoder_teams if self.teams_meet else 1)

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return self.split_k * self.cluster_m

    @property
    def copied_n(self) -> int:
        """Number of weight rows that a CTA copies."""
        return self.tile_n // self.cluster_m

    @property
    def consumer_warps(self) -> int:
        """Number of consumer warps."""
        return WARPGROUP // 32 * GROUPS * self.k_groups

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * (self.consumer_warps + self.decoder_teams * self.decoder_warps) + WARPGROUP

    @property
    def tells_expert(self) -> bool:
        """Return True if consumers must know the expert of a tile, because alpha or the bias depends on it."""
        return not self.rows.is_plain and (self.epilogue.is_by_expert or self.epilogue.bias_dtype is not None)

    @property
    def sum_tile(self) -> PartialSums:
        """Layout of a CTA's partial sums under split-K."""
        return PartialSums(self.tile_m, self.tile_n)

    @property
    def received_bytes(self) -> int:
        """Bytes of shared memory for the partial sums that a CTA receives from the other CTAs of its cluster.

        With ``a`` on the M side, each of two CTAs stores the rows of one consumer warpgroup. It receives the other
        CTA's accumulators of these rows.
        """
        if self.split_k == 1:
            return 0
        return self.sum_tile.received_bytes(self.split_k) if self.is_swapped else WGMMA_M * self.tile_n * 4

    @property
    def store_bytes(self) -> int:
        """Bytes of shared memory in which warps assemble lines of the result, or in which a CTA stores its partial
        sums."""
        if self.is_swapped:
            return self.sum_tile.size_bytes if self.split_k > 1 else 0
        return GROUPS * 4 * STORE_TILE_BYTES

    @property
    def boxes(self) -> int:
        """Largest number of TMA boxes in which a k tile of ``a`` is copied."""
        return -(-self.tile_m // WGMMA_M)

    @property
    def box_m(self) -> int:
        """Number of rows of ``a`` in a TMA box. A tile is copied in several boxes, so that boxes without existing rows
        can be skipped."""
        return self.tile_m // self.boxes

    @property
    def streams_weight(self) -> bool:
        """Return True if the kernel usually reads each weight tile only once."""
        return self.tile_m < 2 * WGMMA_M

    @property
    def slots(self) -> int:
        """Number of k tiles of ``a`` in shared memory."""
        return self.a_slots or self.stages * self.span

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage takes: the weight, ``a`` unless it has its own pipeline, their scales,
        and a record."""
        of_a = 0 if self.a_slots else self.tile_m * K_TILE
        return self.span * (of_a + self.slot_words * 4) + self.copied_n * self.line + RECORD_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
        return (
            self.stages * self.stage_bytes
            + self.a_slots * self.tile_m * K_TILE
            + self.workspace_bytes
            + self.store_bytes
            + self.received_bytes
            + self.rows.table_bytes
            + BARRIER_BYTES
        )

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        if not arch.has_wgmma:
            return f"{arch.name} has no wgmma instructions"
        rows = self.tile_m * self.cluster_m
        if (rows, self.tile_n, self.split_k) not in self.tiles:
            return f"no tile has tile_m={rows}, tile_n={self.tile_n} and split_k={self.split_k}"
        if self.stages < self.scale_warps:
            return f"{self.scale_warps} scale loaders take stages in turn and need one each; stages={self.stages}"
        if self.unrolls and self.stages % self.in_flight:
            return f"{self.in_flight} K tiles are multiplied together; {self.stages} stages are not a multiple of that"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)


AnyConfig = TypeVar("AnyConfig", bound=FP8GemmConfig)


def with_most_stages(
    kind: type[AnyConfig],
    *,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tile_m: int,
    tile_n: int,
    split_k: int = 1,
    arch: Arch,
    pdl: bool,
    static_weight: bool = False,
    prefetches: bool = False,
    **own: Any,
) -> AnyConfig | None:
    """Return the configuration of class ``kind`` with the most stages that fit into the shared memory of ``arch``, or
    None if none fits.

    ``own`` contains the fields that only this class has.
    """
    hints = static_weight and kind.reads_ahead(rows, tile_m, pdl), prefetches and kind.may_prefetch(rows, tile_m)
    tile = tile_m, tile_n, split_k
    return first_fit((kind(rows, epilogue, *tile, stages, pdl, *hints, **own) for stages in kind.stage_counts), arch)
