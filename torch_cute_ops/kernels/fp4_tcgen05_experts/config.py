"""Configuration of the FP4 GEMM over experts by tcgen05: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ROWS,
    STEP,
    STORING_WARPS,
    BlockScaledConfig,
    BlockScaledStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime.arch import Arch

TILES: Final = (32, 64, 128)
"""Rows of the weight of a tile."""
PARTS: Final = (1, 2, 3, 5, 8)
"""Parts of the experts by which work is divided: an expert's part is its number modulo this."""
ACCUMULATORS: Final = 2
"""Experts whose sums are in tensor memory: one is added up while the next is computed."""
LOADED: Final = 32
"""Columns of tensor memory that a thread loads at once."""
MOST_ARRANGED: Final = {False: 64, True: 32}
"""Most rows of the weight of a tile with linear scales, without a bias or with one: beside the warps that arrange
these, a thread that stores has no registers for totals of more (they spilled)."""
GROUP: Final = 8
"""Columns of the result that a thread stores at once."""
WORD: Final = 32
"""Experts of a part whose bits are in a word."""


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out workspace ctas")):
    """The run-time arguments, in order. Sizes: M rows of activations, N rows of the weight, E experts with
    ``Config.width`` elements of k each, K elements in all, in blocks of B; N is a multiple of 8, with linear scales K
    of 4 B.

    Attributes:
        a: (M, K/2) uint8 codes.
        a_scale: (M, K/B), or, tiled, padded to whole tiles.
        b: (K/2, N) uint8 codes, the transposed view of a row-major (N, K/2) weight.
        b_scale: as ``a_scale``, of the weight's rows.
        alpha: (M, E) float32, any strides; where it is zero nothing is added.
        bias: (E, N), added to an expert's sum before the factor; or ``None``.
        out: (M, N), written.
        workspace: ``Config.workspace_bytes``, uint8, written; or ``None``, where these are none.
        ctas: CTAs that share all units, a number: the SMs.
    """


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Everything static about a kernel. M, N and the number of experts are not.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        out_dtype: dtype of the result.
        width: elements of k of an expert.
        columns: rows of the weight of a tile.
        parts: parts of the experts by which work is divided.
        routed: whether experts are passed over that no token of the tile is routed to.
        stages: stages of the ring.
        pdl: whether launches are programmatic dependent launches.
        bias_dtype: dtype of the experts' biases; ``None``: there are none.
    """

    fmt: FP4Format
    layout: ScaleLayout
    out_dtype: torch.dtype
    width: int
    columns: int
    parts: int
    routed: bool
    stages: int
    pdl: bool
    bias_dtype: torch.dtype | None = None

    @property
    def stage(self) -> BlockScaledStage:
        """A stage of the ring: the activations are on the M side."""
        spread = self.width % BlockScaledStage(self.fmt, self.layout, self.columns).tile_elements != 0
        return BlockScaledStage(self.fmt, self.layout, self.columns, spread=spread)

    @property
    def chunks(self) -> int:
        """Chunks of an expert."""
        return -(-self.width // K_TILE)

    @property
    def bias_bytes(self) -> int:
        """Shared memory for an expert's bias, fp32, of each storing warp."""
        return 0 if self.bias_dtype is None else 4 * self.columns * STORING_WARPS

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + self.bias_bytes

    @property
    def shares_tiles(self) -> bool:
        """Whether a result is the sum of several units' totals, which another kernel adds up."""
        return self.parts > 1

    @property
    def has_workspace(self) -> bool:
        """Whether there is a workspace: for totals, or for bits of experts."""
        return self.shares_tiles or self.routed

    def workspace_bytes(self, m: int, n: int, experts: int) -> int:
        """Bytes of workspace: totals of all units, of the tokens that a tile has; and, routed, the bits of experts of
        each tile of tokens and part."""
        token_tiles = -(-m // ROWS)
        totals = 4 * token_tiles * min(m, ROWS) * -(-n // self.columns) * self.columns * self.parts
        words = -(-experts // (self.parts * WORD))
        return (totals if self.shares_tiles else 0) + (4 * token_tiles * self.parts * words if self.routed else 0)

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
        if self.columns not in TILES or self.parts not in PARTS:
            return f"tiles have {TILES} rows of the weight, in {PARTS} parts; not {self.columns} in {self.parts}"
        most = MOST_ARRANGED[self.bias_dtype is not None]
        if self.stage.arranges and self.columns > most:
            return f"with linear scales, tiles have at most {most} rows of the weight, not {self.columns}"
        return None


def plan(
    *,
    fmt: FP4Format,
    layout: ScaleLayout,
    out_dtype: torch.dtype,
    width: int,
    columns: int,
    parts: int,
    routed: bool,
    arch: Arch,
    pdl: bool,
    bias_dtype: torch.dtype | None = None,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if none does."""
    return with_most_stages(
        lambda stages: Config(fmt, layout, out_dtype, width, columns, parts, routed, stages, pdl, bias_dtype),
        arch,
    )
