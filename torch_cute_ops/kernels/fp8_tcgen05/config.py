"""Configuration of the FP8 tcgen05 GEMM. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.kernels.common.blackwell.fp8_layouts import SPLIT_K, FP8TileConfig, splits
from torch_cute_ops.kernels.common.blackwell.layouts import (
    OperandStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp8.layouts import Arguments, ExpertLayout
from torch_cute_ops.runtime.arch import Arch

__all__ = ["SPLIT_K", "TILES_M", "Arguments", "Config", "plan", "splits"]

TILES_M: Final = {
    (True, 1): (16, 32, 64, 128),
    (False, 1): (16, 32, 64, 128, 256),
    (True, 2): (128,),
    (False, 2): (256,),
}
"""Supported ``tile_m``, keyed by (True if the operands have block scales, number of CTAs of an MMA). With block scales,
a thread keeps ``tile_m`` accumulators in registers."""
SCALE_LOADERS: Final = 2
"""Number of scale-loader warps. With more than eight warps in a CTA, a thread has only 168 registers, and the sums of
128 tokens spill."""
SCALES_AHEAD: Final = 2
"""Number of k tiles whose scales a scale loader loads at once."""
FACTOR_SLOTS: Final = 2 * SCALES_AHEAD * SCALE_LOADERS
"""Number of slots in shared memory, each for the products of one k tile's scales. The number is a multiple of the
number of scale loaders, so that the same warp always writes a slot."""


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
class Config(FP8TileConfig):
    """Static properties of the FP8 tcgen05 GEMM. N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on the finished accumulators.
        has_blocks: True for block scales, False for per-token scales. With per-token scales, ``alpha`` contains the
            weight's scales.
        tile_m: number of rows of ``a`` per tile.
        cta_group: number of CTAs that compute an MMA together, 1 or 2. Each CTA holds 128 rows of the weight.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of pipeline stages.
        pdl: True to launch with programmatic dependent launch.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    has_blocks: bool
    tile_m: int
    cta_group: int
    split_k: int
    stages: int
    pdl: bool
    tiles: ClassVar = TILES_M

    @property
    def stage(self) -> FP8Stage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return FP8Stage(self.tile_m, self.cta_group, self.has_blocks)

    @property
    def factor_slots(self) -> int:
        return FACTOR_SLOTS if self.has_blocks else 0


def plan(*, cta_group: int = 1, split_k: int = 1, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    given |= {"cta_group": cta_group, "split_k": split_k}
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
