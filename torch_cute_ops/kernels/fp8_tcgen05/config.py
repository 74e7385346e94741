"""Configuration of the FP8 GEMM by tcgen05. No device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.kernels.common.blackwell.layouts import (
    BARRIER_BYTES,
    EPILOGUE_WARPS,
    MMA_M,
    OperandStage,
    Tcgen05Config,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue, PartialSums
from torch_cute_ops.kernels.common.fp8.layouts import Arguments, ExpertLayout
from torch_cute_ops.runtime.arch import Arch

__all__ = ["SPLIT_K", "TILES_M", "Arguments", "Config", "plan", "splits"]

TILES_M: Final = {
    (True, 1): (16, 32, 64, 128),
    (False, 1): (16, 32, 64, 128, 256),
    (True, 2): (128,),
    (False, 2): (256,),
}
"""Supported ``tile_m``, keyed by whether operands have block scales, and by the number of CTAs of an MMA. With block
scales, a thread keeps ``tile_m`` accumulators in registers."""
SPLIT_K: Final = (1, 2, 4, 8)
"""Supported numbers of CTAs of a cluster that share the k of a tile."""
SCALE_LOADERS: Final = 2
"""Number of scale-loader warps. With more than eight warps in a CTA, a thread has 168 registers, and the sums of 128
tokens spill."""
SCALES_AHEAD: Final = 2
"""Number of k tiles whose scales a scale loader loads at once."""
FACTOR_SLOTS: Final = 2 * SCALES_AHEAD * SCALE_LOADERS
"""Number of k tiles whose products of scales are in shared memory: a multiple of the scale loaders, so that a slot
always belongs to the same warp."""
FEW_COLUMNS: Final = 64
"""Columns of an accumulator up to which tensor memory holds four accumulators instead of two: MMAs of few columns take
less time than the way from a commit to the next MMA."""


def splits(rows: ExpertLayout, has_blocks: bool, tile_m: int, cta_group: int) -> tuple[int, ...]:
    """Return the numbers of CTAs that may share the k of a tile.

    With block scales and more than 64 tokens, kernels that store partial sums spill.
    """
    widest = FEW_COLUMNS if has_blocks else MMA_M
    return SPLIT_K if rows.is_plain and cta_group == 1 and tile_m <= widest else (1,)


@dataclass(frozen=True)
class FP8Stage(OperandStage):
    """K tile of both operands in shared memory, 128 elements of K.

    Attributes:
        mma_n, cta_group: as in ``OperandStage``.
        has_blocks: True for block scales.
    """

    mma_n: int
    cta_group: int
    has_blocks: bool
    scale_loader_warps: ClassVar[int] = SCALE_LOADERS

    @property
    def has_scale_loaders(self) -> bool:
        """True if warps of the CTA load the scales and multiply them."""
        return self.has_blocks

    @property
    def scale_loaders_fill(self) -> bool:
        """False: scales have their own pipeline."""
        return False


@dataclass(frozen=True)
class Config(Tcgen05Config):
    """Static properties of a kernel. N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on the accumulator.
        has_blocks: True for block scales, False for per-token scales; ``alpha`` then contains the weight's scales.
        tile_m: rows of ``a`` of a tile.
        cta_group: number of CTAs that share an MMA, 1 or 2. Each CTA computes 128 rows of the weight.
        split_k: number of CTAs of a cluster that share the k of a tile.
        stages: number of stages.
        pdl: True for programmatic dependent launches.
        prefetches: as in ``FP8GemmConfig``.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    has_blocks: bool
    tile_m: int
    cta_group: int
    split_k: int
    stages: int
    pdl: bool
    prefetches: ClassVar[bool] = False

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return self.cta_group * self.split_k

    @property
    def tile_n(self) -> int:
        """Rows of the weight of a tile."""
        return MMA_M * self.cta_group

    @property
    def stage(self) -> FP8Stage:
        """Layout of a stage. The weight is on the M side."""
        return FP8Stage(self.tile_m, self.cta_group, self.has_blocks)

    @property
    def waits_first(self) -> bool:
        """True if experts own the rows: all threads read offsets and counts."""
        return self.pdl and not self.rows.is_plain

    @property
    def sum_tile(self) -> PartialSums:
        """Partial sums of a CTA in a cluster that splits k. In shared memory, the partial sums replace the stages."""
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
        """Columns of tensor memory that a thread loads at once: fewer if it keeps 128 sums in registers."""
        return min(self.tile_m, 16 if self.has_blocks and self.tile_m > FEW_COLUMNS else 32)

    @property
    def factor_slots(self) -> int:
        """Number of k tiles whose products of scales are in shared memory."""
        return FACTOR_SLOTS if self.has_blocks else 0

    @property
    def factor_bytes(self) -> int:
        """Bytes of shared memory for scales: products of both operands' scales, or each epilogue warp's copy of a
        tile's per-token scales."""
        return 4 * self.tile_m * (FACTOR_SLOTS if self.has_blocks else EPILOGUE_WARPS)

    @property
    def factor_offset(self) -> int:
        """Offset of the scales in shared memory, after the stages and the barriers of stages and accumulators."""
        return self.stage_bytes + BARRIER_BYTES

    @property
    def table_offset(self) -> int:
        """Offset of the table of experts in shared memory, after the scales and the barriers of their pipeline."""
        return self.factor_offset + self.factor_bytes + 16 * self.factor_slots

    @property
    def smem_bytes(self) -> int:
        return self.table_offset + self.rows.table_bytes

    def reason_unfit(self) -> str | None:
        tiles = TILES_M.get((self.has_blocks, self.cta_group), ())
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


def plan(
    *,
    rows: ExpertLayout,
    epilogue: Epilogue,
    has_blocks: bool,
    tile_m: int,
    cta_group: int = 1,
    split_k: int = 1,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """Return the configuration with the largest number of stages that fits into an SM of ``arch``, or None."""
    return with_most_stages(
        lambda stages: Config(rows, epilogue, has_blocks, tile_m, cta_group, split_k, stages, pdl),
        arch,
    )
