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
"""Supported ``split_k``, the number of CTAs of a cluster that divide the k of a tile."""
SCALE_LOADERS: Final = 2
"""Number of scale-loader warps. With more than eight warps in a CTA, a thread has 168 registers, and the sums of 128
tokens spill."""
SCALES_AHEAD: Final = 2
"""Number of k tiles whose scales a scale loader loads at once."""
FACTOR_SLOTS: Final = 2 * SCALES_AHEAD * SCALE_LOADERS
"""Number of k tiles whose products of scales fit into shared memory. It is a multiple of the number of scale loaders,
so that a slot always belongs to the same warp."""
FEW_COLUMNS: Final = 64
"""Largest number of columns of an accumulator for which tensor memory holds four accumulators instead of two. MMAs of
few columns take less time than a commit takes to allow the next MMA."""


def splits(rows: ExpertLayout, has_blocks: bool, tile_m: int, cta_group: int) -> tuple[int, ...]:
    """Return the supported values of ``split_k``.

    Only 1 is supported with experts, with CTA pairs, and for many tokens. With block scales, more than 64 tokens are
    too many, because kernels that store partial sums would spill.
    """
    widest = FEW_COLUMNS if has_blocks else MMA_M
    return SPLIT_K if rows.is_plain and cta_group == 1 and tile_m <= widest else (1,)


@dataclass(frozen=True)
class FP8Stage(OperandStage):
    """Layout of a stage in shared memory: one k tile (128 elements along K) of both operands.

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
        """True if scale-loader warps load block scales and multiply the two operands' scales."""
        return self.has_blocks

    @property
    def scale_loaders_fill(self) -> bool:
        """False, because scales are passed through a separate pipeline."""
        return False


@dataclass(frozen=True)
class Config(Tcgen05Config):
    """Static properties of the FP8 GEMM by tcgen05. N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on the finished accumulators.
        has_blocks: True for block scales, False for per-token scales. With per-token scales, ``alpha`` contains the
            weight's scales.
        tile_m: number of rows of ``a`` of a tile.
        cta_group: number of CTAs that compute an MMA together, 1 or 2. Each CTA holds 128 rows of the weight.
        split_k: number of CTAs of a cluster that divide the k of a tile.
        stages: number of stages.
        pdl: True to launch with programmatic dependent launch.
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
        """Number of weight rows of a tile."""
        return MMA_M * self.cta_group

    @property
    def streams_weight(self) -> bool:
        """True if the kernel usually reads each weight tile only once."""
        return self.tile_m < MMA_M

    @property
    def stage(self) -> FP8Stage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return FP8Stage(self.tile_m, self.cta_group, self.has_blocks)

    @property
    def waits_first(self) -> bool:
        """True if experts own the rows, because all threads then read offsets and counts."""
        return self.pdl and not self.rows.is_plain

    @property
    def sum_tile(self) -> PartialSums:
        """Layout of a CTA's partial sums under split-K. In shared memory, they overwrite the stages."""
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
        """Number of columns of tensor memory that a thread loads at once. It is smaller if the thread holds 128 sums in
        registers."""
        return min(self.tile_m, 16 if self.has_blocks and self.tile_m > FEW_COLUMNS else 32)

    @property
    def factor_slots(self) -> int:
        """Number of k tiles whose products of scales fit into shared memory at the same time."""
        return FACTOR_SLOTS if self.has_blocks else 0

    @property
    def factor_bytes(self) -> int:
        """Bytes of shared memory for scales: products of both operands' block scales, or one copy of a tile's per-token
        scales per epilogue warp."""
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
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none
    fits."""
    return with_most_stages(
        lambda stages: Config(rows, epilogue, has_blocks, tile_m, cta_group, split_k, stages, pdl),
        arch,
    )
