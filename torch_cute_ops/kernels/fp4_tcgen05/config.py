"""Configuration of the FP4 GEMM by tcgen05: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.blackwell.layouts import (
    COLUMNS,
    ROWS,
    SCALE_BUFFERS,
    BlockScaledConfig,
    BlockScaledStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue, PartialSums
from torch_cute_ops.runtime.arch import Arch

TILES: Final = {1: (8, 16, 32, 64, 128, 256), 2: (256,)}
"""Rows of activations of a tile, by the CTAs of an MMA."""
SPLITS: Final = (1, 2, 4, 8)
"""CTAs of a cluster that share the k of a tile."""


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out ctas")):
    """The run-time arguments, in order. Sizes: M rows of activations, N rows of the weight, K elements of a sum, in
    blocks of B; N is a multiple of 8, K of 64 (with linear scales of 4 B).

    Attributes:
        a: (M, K/2) uint8 codes.
        a_scale: (M, K/B), or, tiled, padded to whole tiles.
        b: (K/2, N) uint8 codes, the transposed view of a row-major (N, K/2) weight.
        b_scale: as ``a_scale``, of the weight's rows.
        alpha: (1,) or (N,) float32, or ``None``: as ``Config.epilogue`` says.
        bias: (N,), or ``None``.
        out: (M, N), written.
        ctas: CTAs that share all tiles, a number: the SMs. Unused with ``splits``, where each tile has its cluster.
    """


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Everything static about a kernel. M, N and K are not.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        epilogue: what is done to the sums.
        tokens: rows of activations of a tile.
        group: CTAs of an MMA, 1 or 2: each has 128 rows of the weight.
        splits: CTAs of a cluster that share the k of a tile.
        stages: stages of the ring.
        pdl: whether launches are programmatic dependent launches.
    """

    fmt: FP4Format
    layout: ScaleLayout
    epilogue: Epilogue
    tokens: int
    group: int
    splits: int
    stages: int
    pdl: bool

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.group * self.splits

    @property
    def rows(self) -> int:
        """Rows of the weight of a tile."""
        return ROWS * self.group

    @property
    def stage(self) -> BlockScaledStage:
        """A stage of the ring: the weight is on the M side."""
        return BlockScaledStage(self.fmt, self.layout, self.tokens, self.group)

    @property
    def sum_tile(self) -> PartialSums:
        """The accumulators of a CTA of a cluster that splits k, in place of the stages."""
        return PartialSums(self.tokens, ROWS)

    @property
    def accumulators(self) -> int:
        return 2 if self.splits == 1 else 1

    @property
    def loaded(self) -> int:
        """Columns of tensor memory that a thread loads at once."""
        return min(self.tokens, 32)

    @property
    def pitch(self) -> int:
        """Columns from an accumulator to the next, which overlaps it where two do not fit."""
        room = COLUMNS - SCALE_BUFFERS * self.stage.scale_columns - self.tokens
        return min(self.tokens, room // self.loaded * self.loaded)

    @property
    def shared(self) -> int:
        """Columns that two accumulators share. They are loaded first, and then the next tile may begin."""
        return self.tokens - self.pitch if self.accumulators == 2 else 0

    @property
    def sum_columns(self) -> int:
        return (self.accumulators - 1) * self.pitch + self.tokens

    @property
    def frees(self) -> int:
        """Of each accumulator, or, where they overlap, of either. With ``splits`` there is one tile."""
        if self.splits > 1:
            return 0
        return self.accumulators if self.shared == 0 else 1

    def reason_unfit(self) -> str | None:
        if self.tokens not in TILES.get(self.group, ()):
            return f"{self.group} CTAs have tiles of {TILES.get(self.group)} rows of activations, not {self.tokens}"
        if self.splits not in (SPLITS if self.group == 1 else (1,)):
            return f"{self.splits} clusters of {self.group} CTAs do not share a tile"
        if self.splits > 1 and self.sum_tile.size_bytes > self.stage_bytes:
            return f"{self.sum_tile.size_bytes} bytes of sums do not fit in place of {self.stages} stages"
        return self.epilogue.reason_unsupported()


def plan(
    *,
    fmt: FP4Format,
    layout: ScaleLayout,
    epilogue: Epilogue,
    tokens: int,
    group: int = 1,
    splits: int = 1,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if none does."""
    return with_most_stages(
        lambda stages: Config(fmt, layout, epilogue, tokens, group, splits, stages, pdl),
        arch,
    )
