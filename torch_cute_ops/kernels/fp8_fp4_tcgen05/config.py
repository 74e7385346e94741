"""Configuration of the FP8 x FP4 tcgen05 GEMM. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.prepared_scales import SLAB_K
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import (
    CODE_BYTES,
    SPLIT_K,
    TEAM_WARPS,
    DecodedStage,
    FP8TileConfig,
    splits,
)
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ALIGNMENT,
    K_TILE_BYTES,
    MMA_M,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, Arguments, ExpertLayout, reason_no_scale_layout
from torch_cute_ops.runtime.arch import Arch

__all__ = ["SPLIT_K", "TILES_M", "Arguments", "Config", "plan", "splits", "teams"]

TILES_M: Final = {(True, 1): (16, 32, 64), (False, 1): (16, 32, 64, 128, 256)}
"""Supported ``tile_m``, keyed by (True if ``a`` has block scales, number of CTAs of an MMA). With block scales, a
thread keeps ``tile_m`` sums in registers."""
FACTOR_SLOTS: Final = 4
"""Number of slots in shared memory, each for the factors of one k tile. The number is a multiple of the number of
decoder groups, so that each slot is always written by the same group."""


def teams(has_blocks: bool, tile_m: int) -> int:
    """Return the number of decoder groups for tiles of ``tile_m`` tokens.

    Two groups hide latency better than one. But with two groups, a thread has 128 instead of 168 registers, too few for
    64 accumulators with block scales. Two groups also need an even number of stages, so tiles of 256 tokens would get
    only two stages.
    """
    return 1 if tile_m > (32 if has_blocks else MMA_M) else 2


@dataclass(frozen=True)
class FP8FP4Stage(DecodedStage):
    """Layout of a stage in shared memory: a k tile of the weight in e4m3, of the activations, and of the weight's FP4
    codes."""

    @property
    def code_bytes(self) -> int:
        """Number of bytes that the producer copies to a stage: activations, and FP4 codes of the weight."""
        return self.mma_n * K_TILE_BYTES + MMA_M * CODE_BYTES

    @property
    def codes_offset(self) -> int:
        """Offset of the weight's FP4 codes in the stage."""
        return (MMA_M + self.mma_n) * K_TILE_BYTES

    @property
    def size_bytes(self) -> int:
        return -(-(self.codes_offset + MMA_M * CODE_BYTES) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Config(FP8TileConfig):
    """Static properties of the FP8 x FP4 tcgen05 GEMM. N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on the finished accumulators.
        fmt: format of the weight.
        layout: layout of the weight's block scales if ``a`` has block scales. If ``a`` has per-token scales, the
            weight's scales are prepared, and the layout is None.
        tile_m: number of rows of ``a`` per tile.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of pipeline stages.
        pdl: True to launch with programmatic dependent launch.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    fmt: FP4Format
    layout: ScaleLayout | None
    tile_m: int
    split_k: int
    stages: int
    pdl: bool
    cta_group: ClassVar[int] = 1
    tiles: ClassVar = TILES_M
    factor_arrivals: ClassVar[int] = TEAM_WARPS

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        """True for block scales of ``a``, False for per-token scales."""
        return self.layout is not None

    @property
    def teams(self) -> int:
        """Number of decoder groups."""
        return teams(self.has_blocks, self.tile_m)

    @property
    def stage(self) -> FP8FP4Stage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return FP8FP4Stage(self.tile_m, self.teams)

    @property
    def stage_writers(self) -> int:
        return self.stage.scale_loader_warps

    @property
    def columns_per_load(self) -> int:
        # With 16 or 32 columns instead of 8, kernels with 64 block-scaled sums spill 28 to 256 bytes.
        return min(self.tile_m, 8 if self.has_blocks and self.teams == 1 else 32)

    @property
    def factor_slots(self) -> int:
        return FACTOR_SLOTS if self.has_blocks else 0

    @property
    def slot_words(self) -> int:
        # The scales of the tokens come first, then the powers of two of the weight rows.
        return self.tile_m + (MMA_M if self.has_blocks else 0)

    @property
    def copied_barriers(self) -> int:
        return self.stages

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
        return self.stage.reason_uneven(self.stages) or super().reason_unfit()


def plan(*, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
