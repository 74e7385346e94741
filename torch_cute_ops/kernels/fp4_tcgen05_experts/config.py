"""Configuration of the FP4 GEMM over experts by tcgen05: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.blackwell.layouts import (
    EPILOGUE_WARPS,
    MMA_K,
    MMA_M,
    BlockScaledConfig,
    BlockScaledStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime.arch import Arch

TILES_N: Final = (32, 64, 128)
"""Rows of the weight of a tile."""
CLASSES: Final = (1, 2, 3, 5, 8)
"""Parts of the experts by which work is divided: an expert's part is its number modulo this."""
ACCUMULATORS: Final = 2
"""Experts whose sums are in tensor memory: one is added up while the next is computed."""
COLUMNS_PER_LOAD: Final = 32
"""Columns of tensor memory that a thread loads at once."""
MAX_LINEAR_SCALES_TILE_N: Final = {False: 64, True: 32}
"""Most rows of the weight of a tile with linear scales, without a bias or with one: beside the warps that arrange
these, a thread that stores has no registers for totals of more (they spilled)."""
STORE_COLUMNS: Final = 8
"""Columns of the result that a thread stores at once."""
EXPERTS_PER_WORD: Final = 32
"""Experts of a part whose bits are in a word."""


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out workspace num_ctas")):
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
        num_ctas: CTAs that share all units, a number: the SMs.
    """


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Everything static about a kernel. M, N and the number of experts are not.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        out_dtype: dtype of the result.
        width: elements of k of an expert.
        tile_n: rows of the weight of a tile.
        classes: parts of the experts by which work is divided.
        routed: whether experts are passed over that no token of the tile is routed to.
        stages: stages of the ring.
        pdl: whether launches are programmatic dependent launches.
        bias_dtype: dtype of the experts' biases; ``None``: there are none.
    """

    fmt: FP4Format
    layout: ScaleLayout
    out_dtype: torch.dtype
    width: int
    tile_n: int
    classes: int
    routed: bool
    stages: int
    pdl: bool
    bias_dtype: torch.dtype | None = None

    @property
    def stage(self) -> BlockScaledStage:
        """A stage of the ring: the activations are on the M side."""
        spread = self.width % BlockScaledStage(self.fmt, self.layout, self.tile_n).scale_tile_k != 0
        return BlockScaledStage(self.fmt, self.layout, self.tile_n, spread=spread)

    @property
    def k_tiles(self) -> int:
        """Chunks of an expert."""
        return -(-self.width // K_TILE)

    @property
    def bias_bytes(self) -> int:
        """Shared memory for an expert's bias, fp32, of each storing warp."""
        return 0 if self.bias_dtype is None else 4 * self.tile_n * EPILOGUE_WARPS

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + self.bias_bytes

    @property
    def has_partial_sums(self) -> bool:
        """Whether a result is the sum of several units' totals, which another kernel adds up."""
        return self.classes > 1

    @property
    def has_workspace(self) -> bool:
        """Whether there is a workspace: for totals, or for bits of experts."""
        return self.has_partial_sums or self.routed

    def workspace_bytes(self, m: int, n: int, experts: int) -> int:
        """Bytes of workspace: totals of all units, of the tokens that a tile has; and, routed, the bits of experts of
        each tile of tokens and part."""
        m_tiles = -(-m // MMA_M)
        partial_sums = 4 * m_tiles * min(m, MMA_M) * -(-n // self.tile_n) * self.tile_n * self.classes
        words = -(-experts // (self.classes * EXPERTS_PER_WORD))
        return (partial_sums if self.has_partial_sums else 0) + (
            4 * m_tiles * self.classes * words if self.routed else 0
        )

    @property
    def accumulators(self) -> int:
        return ACCUMULATORS

    @property
    def acc_empty_barriers(self) -> int:
        return ACCUMULATORS

    @property
    def acc_columns(self) -> int:
        return ACCUMULATORS * self.tile_n

    def reason_unfit(self) -> str | None:
        if self.width % MMA_K:
            return f"an expert's width is {self.width}; it has to be a multiple of {MMA_K}"
        if self.tile_n not in TILES_N:
            return f"tile_n is {self.tile_n}; it has to be one of {TILES_N}"
        if self.classes not in CLASSES:
            return f"there are {self.classes} classes of experts; the number has to be one of {CLASSES}"
        most = MAX_LINEAR_SCALES_TILE_N[self.bias_dtype is not None]
        if self.stage.has_scale_loaders and self.tile_n > most:
            return f"tile_n is {self.tile_n}; with linear scales it has to be at most {most}"
        return None


def plan(
    *,
    fmt: FP4Format,
    layout: ScaleLayout,
    out_dtype: torch.dtype,
    width: int,
    tile_n: int,
    classes: int,
    routed: bool,
    arch: Arch,
    pdl: bool,
    bias_dtype: torch.dtype | None = None,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if none does."""
    return with_most_stages(
        lambda stages: Config(fmt, layout, out_dtype, width, tile_n, classes, routed, stages, pdl, bias_dtype),
        arch,
    )
