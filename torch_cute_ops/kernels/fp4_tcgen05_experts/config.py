"""Configuration of the FP4 GEMM over experts by tcgen05: no device code."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.activation_layout import CHUNK
from torch_cute_ops.kernels.common.block_scaled_config import BlockScaledConfig, with_most_stages
from torch_cute_ops.kernels.common.block_scaled_stage import ROWS, STEP, BlockScaledStage
from torch_cute_ops.kernels.common.sum_tile import SumTile
from torch_cute_ops.runtime.arch import Arch

TILES: Final = (32, 64, 128)
"""Rows of the weight of a tile."""
SPLITS: Final = (1, 2, 4, 8)
"""CTAs of a cluster that share the experts of a tile."""
ACCUMULATORS: Final = 2
"""Experts whose sums are in tensor memory: one is added up while the next is computed."""
LOADED: Final = 32
"""Columns of tensor memory that a thread loads at once."""
MOST_ARRANGED: Final = 64
"""Most rows of the weight of a tile with linear scales: beside the warps that arrange these, a thread that stores has
no registers for totals of more (they spilled)."""
LIST_BYTES: Final = 4 * MAX_EXPERTS + MAX_EXPERTS // 8
"""The list of experts that are touched, and a bit for each expert."""


class Arguments(NamedTuple):
    """The run-time arguments, in order. Sizes: M rows of activations, N rows of the weight, E experts with
    ``Config.width`` elements of k each, K elements in all, in blocks of B; N is a multiple of 8, with linear scales K
    of 4 B.

    Attributes:
        a: (M, K/2) uint8 codes.
        a_scale: (M, K/B), or, tiled, padded to whole tiles.
        b: (K/2, N) uint8 codes, the transposed view of a row-major (N, K/2) weight.
        b_scale: as ``a_scale``, of the weight's rows.
        alpha: (M, E) float32, any strides; where it is zero nothing is added.
        out: (M, N), written.
    """

    a: Any
    a_scale: Any
    b: Any
    b_scale: Any
    alpha: Any
    out: Any


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Everything static about a kernel. M, N and the number of experts are not.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        out_dtype: dtype of the result.
        width: elements of k of an expert.
        columns: rows of the weight of a tile.
        splits: CTAs of a cluster that share the experts of a tile.
        routed: whether experts are passed over that no token of the tile is routed to.
        stages: stages of the ring.
        pdl: whether launches are programmatic dependent launches.
    """

    fmt: FP4Format
    layout: ScaleLayout
    out_dtype: torch.dtype
    width: int
    columns: int
    splits: int
    routed: bool
    stages: int
    pdl: bool

    @property
    def stage(self) -> BlockScaledStage:
        """A stage of the ring: the activations are on the M side."""
        spread = self.width % BlockScaledStage(self.fmt, self.layout, self.columns).tile_elements != 0
        return BlockScaledStage(self.fmt, self.layout, self.columns, spread=spread)

    @property
    def chunks(self) -> int:
        """Chunks of an expert."""
        return -(-self.width // CHUNK)

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + (LIST_BYTES if self.routed else 0)

    @property
    def sum_tile(self) -> SumTile:
        """The totals of a CTA, in place of the stages."""
        return SumTile(ROWS, self.columns)

    @property
    def accumulators(self) -> int:
        return ACCUMULATORS

    @property
    def frees(self) -> int:
        return ACCUMULATORS

    @property
    def sum_columns(self) -> int:
        return ACCUMULATORS * self.columns

    def reason_unfit(self) -> str | None:
        if self.width % STEP:
            return f"an expert's width is {self.width}; it has to be a multiple of {STEP}"
        if self.columns not in TILES or self.splits not in SPLITS:
            return f"tiles have {TILES} rows of the weight, for {SPLITS} CTAs; not {self.columns} for {self.splits}"
        if self.stage.arranges and self.columns > MOST_ARRANGED:
            return f"with linear scales, tiles have at most {MOST_ARRANGED} rows of the weight, not {self.columns}"
        if self.sum_tile.size_bytes > self.stage_bytes:
            return f"{self.sum_tile.size_bytes} bytes of sums do not fit in place of {self.stages} stages"
        return None


def plan(
    *,
    fmt: FP4Format,
    layout: ScaleLayout,
    out_dtype: torch.dtype,
    width: int,
    columns: int,
    splits: int,
    routed: bool,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if none does."""
    return with_most_stages(
        lambda stages: Config(fmt, layout, out_dtype, width, columns, splits, routed, stages, pdl),
        arch,
    )
