"""Layout of the lines of a result that a warp assembles in shared memory: no device code. How threads share rows that
are quantised to FP8: no device code. Which rows of a buffer belong to which expert: no device code. Run-time arguments
of the FP8 GEMM kernels: no device code. Sizes of kernels by wgmma with FP8 activations
(``kernels.common.fp8.fp8_tiles_kernel``): no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, WGMMA_M, Epilogue, PartialSums

# row tile
#
# Layout of the lines of a result that a warp assembles in shared memory: no device code.

STORE_ROWS: Final = 16
STORE_LINE: Final = 128
"""Bytes of a row."""
STORE_PITCH: Final = STORE_LINE + 16
"""Bytes from a row to the next; what lanes write at once is then in different banks."""
STORE_TILE_BYTES: Final = STORE_ROWS * STORE_PITCH


# fp8 units
#
# How threads share rows that are quantised to FP8: no device code.

FP8_UNIT = 16
"""Elements that a thread processes at once: their codes fill a 16-byte store. Rows are multiples of it."""
SCALE_THREADS = FP8_BLOCK128.block_size // FP8_UNIT
"""Neighbouring threads that share a block of 128 elements, and its scale."""


# expert layout
#
# Which rows of a buffer belong to which expert: no device code.

TABLE_BYTES: Final = 3 * (MAX_EXPERTS + 4) * 4 + 128
"""Bytes of the table of experts in shared memory: for each its first row, its number of rows, and the tiles of the
experts before it; and a sum for each warp."""


@dataclass(frozen=True)
class ExpertLayout:
    """How rows belong to experts.

    Attributes:
        has_offsets: whether offsets are given. An expert's rows begin at its offset; they end where counts say, or
            without counts at the next offset.
        has_counts: whether counts are given. Without offsets each expert has an equal part of the buffer.

    With neither there is one expert with all rows.
    """

    has_offsets: bool = False
    has_counts: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is one expert, which has all rows."""
        return not (self.has_offsets or self.has_counts)

    @property
    def is_masked(self) -> bool:
        """Whether each expert has an equal part of the buffer, so that tensors have three dimensions."""
        return self.has_counts and not self.has_offsets

    @property
    def table_bytes(self) -> int:
        """Shared memory for the table of experts."""
        return 0 if self.is_plain else TABLE_BYTES


# fp8 arguments
#
# Run-time arguments of the FP8 GEMM kernels: no device code.


class Arguments(namedtuple("Arguments", "a b a_scale b_scale offsets counts alpha bias out prefetch max_ctas")):
    """The run-time arguments of an FP8 GEMM, in order.

    Sizes: R rows of activations, of all experts; E experts; N rows of an expert's weight, a multiple of 8; K elements
    of a sum, a multiple of 64; ``blocks`` = ⌈K / 128⌉. In the masked layout (``ExpertLayout.is_masked``) each expert
    has R / E rows, and ``a``, ``a_scale`` and ``out`` have three dimensions, of which the last two are contiguous.

    Attributes:
        a: (R, K) e4m3, contiguous; masked (E, R / E, K).
        b: (K, N) e4m3, the transposed view of a row-major (N, K) weight; of grouped GEMMs (E, N, K).
        a_scale: (blocks, R) float32, any pitch between blocks; masked (blocks, E, R / E).
        b_scale: (⌈N / 128⌉, blocks) float32; of grouped GEMMs (E, ⌈N / 128⌉, blocks).
        offsets: (E + 1,) int32, or ``None``: as ``ExpertLayout`` says.
        counts: (E,) int32, or ``None``.
        alpha: (1,), (N,), (E,) or (E, N) float32, or ``None``: as ``Config.epilogue`` says.
        bias: (N,) or (E, N), or ``None``.
        out: (R, N), written in rows that an expert has; masked (E, R / E, N).
        prefetch: (rows, bytes) uint8, contiguous, which ``FP8TilesConfig.prefetches`` is about; or ``None``.
        max_ctas: how many CTAs may run at once, a number: of a GPU, not of a call; a multiple of ``Config.splits``.
    """


# fp8 stages
#
# Sizes of kernels by wgmma with FP8 activations (``kernels.common.fp8.fp8_tiles_kernel``): no device code.

BLOCK: Final = FP8_BLOCK128.block_size
"""Elements of k of a K block, which share a scale."""
GROUPS: Final = 2
"""Consumer warpgroups that share the rows of the M side of a tile; or, where it has 64, those of the N side."""
SPLITS: Final = (1, 2, 3, 4, 6)
"""Numbers of CTAs that share the k of a tile of few rows."""
NARROW_SPLITS: Final = (1, 2)
"""The same where the tile has half of the rows of the weight: clusters of two fill a GPU."""
SCALE_WARPS: Final = WARPGROUP // 32 - 1
"""Warps that load scales: the producer's warpgroup but for the producer."""
BARRIER_BYTES: Final = 272
"""For three barriers of each of ten stages, two of a cluster, and two of sets that divide k: the most that any has."""
RECORD_WORDS: Final = 4
"""Words of a stage's record of its tile: first row, rows from there on, first column, and expert, or 0 where the
epilogue does not depend on it."""
RECORD_BYTES: Final = RECORD_WORDS * 4


@dataclass(frozen=True)
class FP8TilesConfig:
    """Everything static about such a kernel. N, K, R and the number of experts are not.

    Attributes:
        rows: how rows of ``a`` belong to experts.
        epilogue: what is done to the sums.
        tokens, columns, splits: rows of ``a`` and of ``b`` of a tile, and CTAs of a cluster, which share its k.
        stages: stages of the ring.
        line: bytes of a row of the weight in a stage.
        span: K blocks of a stage.
        k_groups: sets of ``GROUPS`` consumer warpgroups: one, or as many as a stage has K blocks, two. Then set i takes
            the i-th K block of every stage, and the sets' sums are added up behind a tile's last stage.
        place_scales: fp32 scales of a K block in the ring; whole pieces of 16 bytes.
        scales_ahead: stages whose scales a warp loads together.
        prefetching_tokens: most rows of ``a`` of a tile behind which something is brought into L2.
        own_bytes: shared memory that the kernel has besides.
        helpers, teams: warps that complete a stage which has arrived, if there are any; and how many times so many
            there are, which take the stages in turns.
        row_ctas: CTAs of a cluster whose rows of ``a`` follow each other, beside the same columns: a tile is one of
            each.
        pdl: whether launches are programmatic dependent launches.
        static_weight: whether the weight was complete before the previous launch, where that makes a difference: with
            ``pdl``, in tiles of few rows without experts, whose rows are not known before the wait.
        prefetches: whether the producer, when it has started its last copy, has something brought into L2: without
            experts, in tiles of few rows.
        store_bytes: shared memory in which lines of the result are assembled, or partial sums left.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tokens: int
    columns: int
    splits: int
    stages: int
    pdl: bool
    static_weight: bool
    prefetches: bool
    line: ClassVar[int]
    scales_ahead: ClassVar[int]
    prefetching_tokens: ClassVar[int]
    own_bytes: ClassVar[int]
    helpers: ClassVar[int]
    row_ctas = 1
    teams = 1
    span = 1
    k_groups = 1

    @staticmethod
    def reads_ahead(rows: ExpertLayout, tokens: int, pdl: bool) -> bool:
        """Whether the producer of such a kernel reads a static weight before the wait."""
        return pdl and rows.is_plain and tokens <= WGMMA_M

    @classmethod
    def may_prefetch(cls, rows: ExpertLayout, tokens: int) -> bool:
        """Whether the producer of such a kernel may have something brought into L2."""
        return rows.is_plain and tokens <= cls.prefetching_tokens

    @property
    def waits_last(self) -> bool:
        """Whether consumers alone wait for the kernel before this one, which runs beside it, and behind their last
        tile."""
        return False

    @property
    def waits_first(self) -> bool:
        """Whether all threads wait for the kernels before this one at once."""
        return self.pdl and not self.static_weight and not self.waits_last

    @property
    def teams_meet(self) -> bool:
        """Whether a stage is one team's in a round of the ring and another's in the next."""
        return self.stages % self.teams > 0

    @property
    def full_arrivals(self) -> int:
        """Arrivals of helpers that make a stage full."""
        return self.helpers * (self.teams if self.teams_meet else 1)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.splits * self.row_ctas

    @property
    def copied_columns(self) -> int:
        """Rows of the weight that a CTA copies."""
        return self.columns // self.row_ctas

    @property
    def place_scales(self) -> int:
        raise NotImplementedError

    @property
    def store_bytes(self) -> int:
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumer_warps + self.teams * self.helpers) + WARPGROUP

    @property
    def consumer_warps(self) -> int:
        """Warps that multiply."""
        return WARPGROUP // 32 * GROUPS * self.k_groups

    @property
    def tells_expert(self) -> bool:
        """Whether consumers need the expert of a tile, for its alpha or bias."""
        return not self.rows.is_plain and (self.epilogue.is_by_expert or self.epilogue.bias_dtype is not None)

    @property
    def sum_tile(self) -> PartialSums:
        """The sums of a CTA that shares a tile."""
        return PartialSums(self.tokens, self.columns)

    @property
    def received_bytes(self) -> int:
        """Shared memory for what the CTAs of a cluster send to one of them."""
        return self.sum_tile.received_bytes(self.splits) if self.splits > 1 else 0

    @property
    def box_rows(self) -> int:
        """Rows of ``a`` of a copy, an equal part of the tile's, so that rows that do not exist need not be copied."""
        return self.tokens // self.boxes

    @property
    def boxes(self) -> int:
        """The most such copies of a K block."""
        return -(-self.tokens // WGMMA_M)

    @property
    def streams_weight(self) -> bool:
        """Whether the weight is read once, as a rule."""
        return self.tokens < 2 * WGMMA_M

    @property
    def stage_bytes(self) -> int:
        """The K blocks of both operands, their scales, and a record."""
        of_blocks = self.span * (self.tokens * BLOCK + self.place_scales * 4)
        return of_blocks + self.copied_columns * self.line + RECORD_BYTES

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return (
            self.stages * self.stage_bytes
            + self.own_bytes
            + self.store_bytes
            + self.received_bytes
            + self.rows.table_bytes
            + BARRIER_BYTES
        )
