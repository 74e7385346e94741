"""Configuration of the FP8 x MXFP4 tcgen05 GEMM. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import MXFP4, FP4Format, ScaleLayout
from torch_cute_ops.formats.prepared_scales import SLAB_K
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import SPLIT_K, FP8TileConfig, splits
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ALIGNMENT,
    BARRIER_BYTES,
    K_TILE_BYTES,
    MMA_M,
    OperandStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp4.layouts import SCALE_TILE_BYTES
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, Arguments, ExpertLayout, reason_no_scale_layout
from torch_cute_ops.runtime.arch import Arch

__all__ = ["ALIGN", "MULTIPLE", "SPLIT_K", "TILES_M", "Arguments", "Config", "plan", "splits"]

TILES_M: Final = {(True, 1): (16, 32, 64, 128), (False, 1): (16, 32, 64, 128)}
"""Supported ``tile_m``, keyed by (True if ``a`` has block scales, number of CTAs of an MMA). Two accumulators of 256
columns would leave no tensor memory for scales."""
MULTIPLE: Final = 128
"""K must be a multiple of this number, because TMA spreads 128 codes at a time."""
ALIGN: Final = 32
"""Alignment in bytes of the codes, which TMA requires to spread them."""
SCALE_LOADERS: Final = 2
"""Number of scale-loader warps. If a CTA had more than eight warps, the accumulators of 128 tokens would spill."""
SCALES_AHEAD: Final = 2
"""Number of k tiles whose scales a scale loader loads at once."""
FACTOR_SLOTS: Final = 2 * SCALES_AHEAD * SCALE_LOADERS
"""Number of slots in shared memory, each for the tokens' scales of one k tile. The number is a multiple of the number
of scale loaders, so that each slot is always written by the same warp."""


@dataclass(frozen=True)
class MXStage(OperandStage):
    """Layout of a stage in shared memory: a k tile of the weight (e2m1, one byte per element), a k tile of the
    activations, and a tile of the weight's scales.

    Attributes:
        mma_n: number of tokens per tile.
    """

    mma_n: int
    cta_group: ClassVar[int] = 1
    scale_loader_warps: ClassVar[int] = SCALE_LOADERS

    @property
    def has_scale_loaders(self) -> bool:
        """True, because scale-loader warps store the weight's scales."""
        return True

    @property
    def code_bytes(self) -> int:
        """Number of bytes that a barrier counts for a stage's copies: activations, and 4 bits per weight element."""
        return self.mma_n * K_TILE_BYTES + MMA_M * K_TILE // 2

    @property
    def scales_offset(self) -> int:
        """Offset of the weight's scales in the stage."""
        return (MMA_M + self.mma_n) * K_TILE_BYTES

    @property
    def size_bytes(self) -> int:
        return -(-(self.scales_offset + SCALE_TILE_BYTES) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Config(FP8TileConfig):
    """Static properties of the FP8 x MXFP4 tcgen05 GEMM. N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on the finished accumulators.
        layout: layout of the weight's block scales if ``a`` has block scales. If ``a`` has per-token scales, the
            weight's scales are prepared, and the layout is None.
        tile_m: number of rows of ``a`` per tile.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of pipeline stages. It is even, so that a stage always belongs to the same scale loader.
        pdl: True to launch with programmatic dependent launch.
        fmt: format of the weight.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    layout: ScaleLayout | None
    tile_m: int
    split_k: int
    stages: int
    pdl: bool
    cta_group: ClassVar[int] = 1
    tiles: ClassVar = TILES_M
    stage_writers: ClassVar[int] = SCALE_LOADERS
    fmt: ClassVar[FP4Format] = MXFP4

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        """True for block scales of ``a``, False for per-token scales."""
        return self.layout is not None

    @property
    def stage(self) -> MXStage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return MXStage(self.tile_m)

    @property
    def factor_slots(self) -> int:
        return FACTOR_SLOTS if self.has_blocks else 0

    @property
    def ones_offset(self) -> int:
        """Offset in shared memory of a tile of scales that are 1."""
        return self.stage_bytes + BARRIER_BYTES

    @property
    def factor_offset(self) -> int:
        return self.ones_offset + SCALE_TILE_BYTES

    @property
    def ones_column(self) -> int:
        """First column of the tokens' scales, which are 1, in tensor memory. The columns before this column hold the
        weight's scales, separately for each stage."""
        return self.acc_columns + self.stages * TILE_BLOCKS

    @property
    def tmem_columns(self) -> int:
        return max(32, 1 << (self.ones_column + TILE_BLOCKS - 1).bit_length())

    @property
    def tile_scales(self) -> int:
        """Number of scales of a weight row in a k tile."""
        return K_TILE // self.fmt.block_size

    @property
    def slab_tiles(self) -> int:
        """Number of k tiles whose indices are in one slab of prepared scales (``formats.prepared_scales``)."""
        return SLAB_K // K_TILE

    def reason_unfit(self) -> str | None:
        if self.layout is not None and (reason := reason_no_scale_layout(self.layout)) is not None:
            return reason
        if self.stages % SCALE_LOADERS:
            return f"stages is {self.stages}; it has to be a multiple of {SCALE_LOADERS}, the number of scale loaders"
        return super().reason_unfit()


def plan(*, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
