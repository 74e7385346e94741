"""Configuration of the tcgen05 GEMM with 16-bit activations and an FP4 weight. No device code."""

from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import (
    CODE_BYTES,
    DecodedStage,
    FP8TileConfig,
    splits,
)
from torch_cute_ops.kernels.common.blackwell.layouts import (
    K_TILE_BYTES,
    MMA_M,
    with_most_stages,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp4.layouts import reason_undecodable
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, ExpertLayout
from torch_cute_ops.kernels.common.fp8.layouts import Arguments as FP8Arguments
from torch_cute_ops.runtime.arch import Arch

__all__ = ["K_TILE", "STREAM_K", "TILES_M", "Arguments", "Config", "plan", "split_ks", "teams"]

TILES_M: Final = (16, 32, 64, 128, 256)
"""Supported ``tile_m``."""
STREAM_K: Final = 0
"""Value of ``split_k`` for stream-K: all CTAs multiply the same number of k tiles. A CTA's work may begin and end
inside a tile."""
SLOTS: Final = 2
"""Largest number of n tiles for which a CTA stores partial sums with stream-K: the CTA's first and last n tile."""
LINES: Final = 2 * K_TILE // K_TILE_BYTES
"""Number of 128-byte lines of activations that a token has in a k tile."""
WEIGHT_COLUMNS: Final = K_TILE // 2
"""Number of columns of tensor memory for the decoded weight of a k tile. A column holds two elements of each row."""
LEAST_SMEM_BYTES: Final = 116 * 1024
"""Least number of bytes of shared memory of a CTA. It is more than half of an SM's shared memory, so that two CTAs
never share an SM. A CTA allocates most of an SM's tensor memory, and waits until that memory is free. If CTAs of two
clusters shared SMs, each cluster could hold tensor memory that a CTA of the other cluster waits for: a deadlock."""


def teams(tile_m: int) -> int:
    """Return the number of decoder groups for tiles of ``tile_m`` tokens.

    Two groups hide latency better than one. Two groups take turns at the k tiles, so the number of stages must be even:
    then each group always uses the same stages. With an odd number, a group could mistake an earlier phase of a stage's
    barrier for the phase that it waits for. With 256 tokens only three stages fit, so one group decodes.
    """
    return 1 if tile_m > MMA_M else 2


def split_ks(tile_m: int) -> tuple[int, ...]:
    """Return the supported values of ``split_k`` for tiles of ``tile_m`` tokens."""
    clusters = splits(ExpertLayout(), False, tile_m, 1)
    return (*clusters, STREAM_K) if len(clusters) > 1 else clusters


class Arguments(namedtuple("Arguments", (*FP8Arguments._fields, "workspace"))):
    """Run-time arguments, in order: all fields of ``common.fp8.layouts.Arguments``, and a workspace.

    Attributes:
        workspace: ``Config.workspace_bytes`` uint8, written, or None without stream-K.
    """


@dataclass(frozen=True)
class WeightStage(DecodedStage):
    """Layout of a stage in shared memory: a k tile of the activations, and of the weight's FP4 codes."""

    @property
    def line_bytes(self) -> int:
        """Bytes of one line of all tokens' activations."""
        return self.mma_n * K_TILE_BYTES

    @property
    def codes_offset(self) -> int:
        """Offset of the weight's FP4 codes in the stage."""
        return LINES * self.line_bytes

    @property
    def code_bytes(self) -> int:
        """Number of bytes that the producer copies to a stage: activations, and FP4 codes of the weight."""
        return self.codes_offset + MMA_M * CODE_BYTES


@dataclass(frozen=True)
class Config(FP8TileConfig):
    """Static properties of the tcgen05 GEMM with 16-bit activations. M, N and K are run-time values.

    Attributes:
        dtype: dtype of the MMAs' operands (activations, decoded weight): bfloat16, or float16 (NVFP4 only).
        fmt, layout: format and scale layout of the weight.
        epilogue: operations on the finished accumulators.
        tile_m: number of rows of ``a`` per tile.
        split_k: number of CTAs of a cluster that split a tile's K range, or ``STREAM_K``.
        stages: number of pipeline stages.
        pdl: True to launch with programmatic dependent launch.
        has_blocks: False, because the epilogue warps do not promote.
        stage_writers: number of decoder warps, which read the stages.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    epilogue: Epilogue
    tile_m: int
    split_k: int
    stages: int
    pdl: bool
    has_blocks: ClassVar[bool] = False
    cta_group: ClassVar[int] = 1
    rows: ClassVar[ExpertLayout] = ExpertLayout()
    tiles: ClassVar = {(False, 1): TILES_M}
    factor_slots: ClassVar[int] = 0
    slot_words: ClassVar[int] = 0

    @property
    def cluster(self) -> int:
        return max(self.split_k, 1)

    @property
    def teams(self) -> int:
        """Number of decoder groups."""
        return teams(self.tile_m)

    @property
    def stage(self) -> WeightStage:
        """Layout of a pipeline stage. The weight is on the M side of the MMAs."""
        return WeightStage(self.tile_m, self.teams)

    @property
    def stage_writers(self) -> int:
        return self.stage.scale_loader_warps

    @property
    def accumulators(self) -> int:
        return 1 if self.split_k > 1 or self.tile_m > MMA_M else 2

    @property
    def tmem_columns(self) -> int:
        used = self.acc_columns + self.stages * WEIGHT_COLUMNS
        return max(32, 1 << (used - 1).bit_length())

    @property
    def smem_bytes(self) -> int:
        return max(super().smem_bytes, LEAST_SMEM_BYTES)

    @property
    def copied_barriers(self) -> int:
        return self.stages

    @property
    def tile_scales(self) -> int:
        """Number of scales of a weight row in a k tile."""
        return K_TILE // self.fmt.block_size

    def workspace_bytes(self, m: int, max_ctas: int) -> int:
        """Return the bytes of workspace of a call: with stream-K, partial sums of all rows, otherwise 0."""
        return SLOTS * max_ctas * m * MMA_M * 4 if self.split_k == STREAM_K else 0

    def reason_unsupported(self, arch: Arch) -> str | None:
        return reason_undecodable(self.dtype, self.fmt, self.smem_bytes, arch) or super().reason_unsupported(arch)

    def reason_unfit(self) -> str | None:
        if self.split_k == STREAM_K and STREAM_K in split_ks(self.tile_m):
            # A CTA needs the same memory as a CTA that computes whole tiles.
            return replace(self, split_k=1).reason_unfit()
        if self.layout.tile_rows not in (0, MMA_M):
            return f"the layout {self.layout.name} is not for scales of weights"
        if self.epilogue.has_row_scale:
            return "16-bit activations have no row_scale"
        return self.stage.reason_uneven(self.stages) or super().reason_unfit()


def plan(*, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory and the tensor memory of ``arch``,
    or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
