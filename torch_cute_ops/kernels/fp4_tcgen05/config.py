"""Configuration of the FP4 tcgen05 GEMM. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.blackwell.layouts import (
    MMA_M,
    SCALE_STAGES,
    TMEM_COLUMNS,
    BlockScaledConfig,
    BlockScaledStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue, PartialSums
from torch_cute_ops.runtime.arch import Arch

TILES_M: Final = {1: (8, 16, 32, 64, 128, 256), 2: (256,)}
"""Supported ``tile_m``, keyed by the number of CTAs of an MMA."""
SPLIT_K: Final = (1, 2, 4, 8)
"""Supported ``split_k``, the number of CTAs of a cluster that split a tile's K range."""


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias row_scale out num_ctas")):
    """Run-time arguments, in order, for M rows of activations, N rows of the weight, and K elements per row in blocks
    of B. N is a multiple of 8. K is a multiple of 64, and with linear scales also of 4 · B.

    Attributes:
        a: (M, K/2) uint8 FP4 codes.
        a_scale: block scales of ``a``: (M, K/B) if linear, the shape ``ScaleLayout.shape`` if tiled.
        b: (K/2, N) uint8 FP4 codes, the transposed view of a row-major (N, K/2) weight.
        b_scale: block scales of the weight's rows, in the same layout as ``a_scale``.
        alpha: (1,) or (N,) float32, or None, as ``Config.epilogue`` says.
        bias: (N,), or None.
        row_scale: (M,) float32, or None.
        out: (M, N), written.
        num_ctas: int32, number of persistent CTAs: the number of SMs. Unused if ``split_k`` is above 1.
    """


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Static properties of the FP4 tcgen05 GEMM. M, N and K are run-time values.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        epilogue: operations on the finished accumulators.
        tile_m: number of rows of activations of a tile.
        cta_group: number of CTAs that compute an MMA together, 1 or 2. Each CTA holds 128 rows of the weight.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of pipeline stages.
        pdl: True to launch with programmatic dependent launch.
    """

    fmt: FP4Format
    layout: ScaleLayout
    epilogue: Epilogue
    tile_m: int
    cta_group: int
    split_k: int
    stages: int
    pdl: bool

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return self.cta_group * self.split_k

    @property
    def tile_n(self) -> int:
        """Number of weight rows of a tile."""
        return MMA_M * self.cta_group

    @property
    def stage(self) -> BlockScaledStage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return BlockScaledStage(self.fmt, self.layout, self.tile_m, self.cta_group)

    @property
    def sum_tile(self) -> PartialSums:
        """Layout of a CTA's partial sums with split-K. In shared memory, the partial sums overwrite the stages."""
        return PartialSums(self.tile_m, MMA_M)

    @property
    def accumulators(self) -> int:
        return 2 if self.split_k == 1 else 1

    @property
    def columns_per_load(self) -> int:
        """Number of columns of tensor memory that a thread loads at once."""
        return min(self.tile_m, 32)

    @property
    def acc_pitch(self) -> int:
        """Number of columns between the starts of the two accumulators. If tensor memory is too small for two separate
        accumulators, they overlap."""
        room = TMEM_COLUMNS - SCALE_STAGES * self.stage.scale_columns - self.tile_m
        return min(self.tile_m, room // self.columns_per_load * self.columns_per_load)

    @property
    def shared_columns(self) -> int:
        """Number of columns that the two accumulators share. The epilogue loads these columns first, so that the next
        tile's MMAs may begin as soon as these columns are loaded."""
        return self.tile_m - self.acc_pitch if self.accumulators == 2 else 0

    @property
    def acc_columns(self) -> int:
        return (self.accumulators - 1) * self.acc_pitch + self.tile_m

    @property
    def acc_empty_barriers(self) -> int:
        """Number of barriers by which the epilogue signals that MMAs may overwrite an accumulator.

        Each accumulator has its own barrier, except that accumulators that overlap share one barrier. With ``split_k``,
        the number is 0, because a CTA computes only one tile.
        """
        if self.split_k > 1:
            return 0
        return self.accumulators if self.shared_columns == 0 else 1

    def reason_unfit(self) -> str | None:
        tiles = TILES_M.get(self.cta_group, ())
        if self.tile_m not in tiles:
            return f"tile_m is {self.tile_m}; it has to be one of {tiles} with {self.cta_group} CTAs for each MMA"
        split_k = SPLIT_K if self.cta_group == 1 else (1,)
        if self.split_k not in split_k:
            return f"split_k is {self.split_k}; it has to be one of {split_k} with {self.cta_group} CTAs for each MMA"
        if self.split_k > 1 and self.sum_tile.size_bytes > self.stage_bytes:
            return f"{self.sum_tile.size_bytes} bytes of partial sums do not fit into {self.stages} stages"
        return self.epilogue.reason_unsupported()


def plan(*, cta_group: int = 1, split_k: int = 1, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    given |= {"cta_group": cta_group, "split_k": split_k}
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
