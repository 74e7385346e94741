"""Configuration of the MXFP8 tcgen05 GEMM. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import SPLIT_K, FP8TileConfig, splits
from torch_cute_ops.kernels.common.blackwell.layouts import ALIGNMENT, OperandStage, with_most_stages
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp4.layouts import SCALE_TILE_BYTES
from torch_cute_ops.kernels.common.fp8.layouts import Arguments, ExpertLayout
from torch_cute_ops.runtime.arch import Arch

__all__ = ["SPLIT_K", "TILED", "TILES_M", "Arguments", "Config", "plan", "splits"]

TILES_M: Final = {(False, 1): (16, 32, 64, 128), (False, 2): (128,)}
"""Supported ``tile_m``, keyed by (False, because nothing is promoted; number of CTAs of an MMA). Two accumulators of
256 columns would leave no tensor memory for scales."""
TILED: Final = SCALE_LAYOUTS["128x4"]
"""Layout of both operands' scales."""
SCALE_COLUMNS: Final = 2 * TILE_BLOCKS
"""Number of columns of tensor memory for a k tile's scales: the weight's, then the tokens'."""


@dataclass(frozen=True)
class MXFP8Stage(OperandStage):
    """Layout of a stage in shared memory: a k tile of both operands, a tile of the tokens' scales, and a tile of the
    weight's scales.

    Attributes:
        mma_n, cta_group: as in ``OperandStage``.
    """

    mma_n: int
    cta_group: int

    @property
    def has_scale_loaders(self) -> bool:
        """False, because TMA copies the scales."""
        return False

    @property
    def size_bytes(self) -> int:
        return -(-(self.code_bytes + 2 * SCALE_TILE_BYTES) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Config(FP8TileConfig):
    """Static properties of the MXFP8 tcgen05 GEMM. M, N and K are run-time values.

    Attributes:
        epilogue: operations on the finished accumulators.
        tile_m: number of rows of ``a`` per tile.
        cta_group: number of CTAs that compute an MMA together, 1 or 2. Each CTA holds 128 rows of the weight.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of pipeline stages.
        pdl: True to launch with programmatic dependent launch.
        has_blocks: False, because the epilogue warps neither promote nor scale.
    """

    epilogue: Epilogue
    tile_m: int
    cta_group: int
    split_k: int
    stages: int
    pdl: bool
    has_blocks: ClassVar[bool] = False
    rows: ClassVar[ExpertLayout] = ExpertLayout()
    tiles: ClassVar = TILES_M

    @property
    def stage(self) -> MXFP8Stage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return MXFP8Stage(self.tile_m, self.cta_group)

    @property
    def factor_slots(self) -> int:
        return 0

    @property
    def slot_words(self) -> int:
        return 0

    @property
    def tmem_columns(self) -> int:
        used = self.acc_columns + self.stages * SCALE_COLUMNS
        return max(32, 1 << (used - 1).bit_length())


def plan(*, cta_group: int = 1, split_k: int = 1, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    given |= {"cta_group": cta_group, "split_k": split_k}
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
