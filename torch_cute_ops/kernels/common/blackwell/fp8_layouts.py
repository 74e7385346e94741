"""Host side of GEMMs with ``tcgen05.mma`` and FP8 operands: base class of their configurations. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.kernels.common.blackwell.layouts import (
    BARRIER_BYTES,
    EPILOGUE_WARPS,
    MMA_M,
    OperandStage,
    Tcgen05Config,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue, PartialSums
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, ExpertLayout

SPLIT_K: Final = (1, 2, 4, 8)
"""Supported ``split_k``, the number of CTAs of a cluster that split a tile's K range."""
FEW_COLUMNS: Final = 64
"""Largest number of columns of an accumulator for which tensor memory holds four accumulators instead of two. MMAs with
so few columns take less time than the commit after which an accumulator changes hands, so two accumulators are not
enough."""
TEAM_WARPS: Final = MMA_M // 32
"""Number of warps of a decoder group. Each thread decodes one row of a weight tile, one k tile at a time."""
CODE_BYTES: Final = K_TILE // 2
"""Bytes of FP4 codes in one k tile of a weight row."""


def splits(rows: ExpertLayout, has_blocks: bool, tile_m: int, cta_group: int) -> tuple[int, ...]:
    """Return the supported values of ``split_k``.

    Only 1 is supported with experts, with CTA pairs, and for large ``tile_m``. With block scales, the limit is 64
    tokens, because kernels with more tokens would spill registers when they store partial sums.
    """
    widest = FEW_COLUMNS if has_blocks else MMA_M
    return SPLIT_K if rows.is_plain and cta_group == 1 and tile_m <= widest else (1,)


@dataclass(frozen=True)
class DecodedStage(OperandStage):
    """Base class of the layouts of a stage whose FP4 codes decoder warps read.

    Attributes:
        mma_n: number of tokens per tile.
        teams: number of decoder groups, which take stages in turn.
    """

    mma_n: int
    teams: int
    cta_group: ClassVar[int] = 1

    @property
    def has_scale_loaders(self) -> bool:
        """True, because decoder warps take the role of scale loaders."""
        return True

    @property
    def scale_loader_warps(self) -> int:  # type: ignore[override]
        """Number of decoder warps."""
        return self.teams * TEAM_WARPS

    @property
    def full_arrivals(self) -> int:
        """Number of decoder warps that fill a stage."""
        return TEAM_WARPS

    @property
    def empty_arrivals(self) -> int:
        """Number of arrivals that make a stage empty: the decoder warps, which read the codes, and the MMAs' commit."""
        return TEAM_WARPS + 1

    def reason_uneven(self, stages: int) -> str | None:
        """Return the reason that ``stages`` stages cannot be divided evenly among the decoder groups, or None."""
        if stages % self.teams == 0:
            return None
        return f"stages is {stages}; it has to be a multiple of {self.teams}, the number of decoder groups"


class FP8TileConfig(Tcgen05Config):
    """Base class of the configurations of ``FP8GemmKernel``. Subclasses are frozen dataclasses.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on the finished accumulators.
        has_blocks: True for block scales of ``a``, False for per-token scales, or if the MMAs apply all scales.
        tile_m: number of rows of ``a`` per tile.
        cta_group: number of CTAs that compute an MMA together, 1 or 2. Each CTA stores 128 rows of the weight tile.
        split_k: number of CTAs of a cluster that split a tile's K range.
        pdl: True to launch with programmatic dependent launch.
        prefetches: True if the producer prefetches memory into L2 after its last copy.
        tiles: supported ``tile_m``, keyed by ``has_blocks`` and ``cta_group``.
        stage_writers: number of warps that load from stages or store to them, or 0 if only TMA and MMAs access them.
        factor_arrivals: number of arrivals that complete a slot with factors.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    has_blocks: bool
    tile_m: int
    cta_group: int
    split_k: int
    pdl: bool
    prefetches: ClassVar[bool] = False
    tiles: ClassVar[dict[tuple[bool, int], tuple[int, ...]]]
    stage_writers: ClassVar[Any] = 0
    factor_arrivals: ClassVar[int] = 1

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return self.cta_group * self.split_k

    @property
    def tile_n(self) -> int:
        """Number of weight rows per tile."""
        return MMA_M * self.cta_group

    @property
    def streams_weight(self) -> bool:
        """True if the kernel usually reads each weight tile only once."""
        return self.tile_m < MMA_M

    @property
    def waits_first(self) -> bool:
        """True if experts own the rows, because all threads then read offsets and counts."""
        return self.pdl and not self.rows.is_plain

    @property
    def sum_tile(self) -> PartialSums:
        """Layout of a CTA's partial sums with split-K. In shared memory, the partial sums overwrite the stages."""
        return PartialSums(self.tile_m, MMA_M)

    @property
    def accumulators(self) -> int:
        if self.has_blocks:
            return 4 if self.tile_m <= FEW_COLUMNS else 2
        return 2 if self.split_k == 1 else 1

    @property
    def acc_empty_barriers(self) -> int:
        return self.accumulators

    @property
    def acc_columns(self) -> int:
        return self.accumulators * self.tile_m

    @property
    def columns_per_load(self) -> int:
        """Number of columns of tensor memory that a thread loads at once. The number is smaller if the thread holds 128
        accumulators in registers."""
        return min(self.tile_m, 16 if self.has_blocks and self.tile_m > FEW_COLUMNS else 32)

    @property
    def factor_slots(self) -> int:
        """Number of k tiles whose factors fit into shared memory at the same time."""
        raise NotImplementedError

    @property
    def copied_barriers(self) -> int:
        """Number of barriers that complete when the copies to a stage have arrived, or 0 if the barriers of full stages
        count the copies."""
        return 0

    @property
    def slot_words(self) -> int:
        """Number of fp32 words of a slot with factors, or of an epilogue warp's per-token scales."""
        return self.tile_m

    @property
    def factor_bytes(self) -> int:
        """Bytes of shared memory for scales: the factors of k tiles (block scales), or one copy of a tile's per-token
        scales for each epilogue warp."""
        return 4 * self.slot_words * (self.factor_slots if self.has_blocks else EPILOGUE_WARPS)

    @property
    def factor_offset(self) -> int:
        """Offset of the scales in shared memory, after the stages and the barriers of stages and accumulators."""
        return self.stage_bytes + BARRIER_BYTES

    @property
    def table_offset(self) -> int:
        """Offset of the table of experts in shared memory, after the scales and their barriers, and the barriers of
        copies."""
        return self.factor_offset + self.factor_bytes + 16 * self.factor_slots + 8 * self.copied_barriers

    @property
    def smem_bytes(self) -> int:
        return self.table_offset + self.rows.table_bytes

    def reason_unfit(self) -> str | None:
        tiles = self.tiles.get((self.has_blocks, self.cta_group), ())
        if self.tile_m not in tiles:
            return f"tile_m is {self.tile_m}; it has to be one of {tiles} with {self.cta_group} CTAs for each MMA"
        split_k = splits(self.rows, self.has_blocks, self.tile_m, self.cta_group)
        if self.split_k not in split_k:
            return (
                f"split_k is {self.split_k}; it has to be one of {split_k} with tile_m={self.tile_m} and "
                f"{self.cta_group} CTAs for each MMA, {'without' if self.rows.is_plain else 'with'} experts"
            )
        if self.split_k > 1 and self.sum_tile.size_bytes > self.stage_bytes:
            return f"{self.sum_tile.size_bytes} bytes of partial sums do not fit into {self.stages} stages"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)
