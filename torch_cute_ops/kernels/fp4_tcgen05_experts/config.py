"""Configuration of the FP4 tcgen05 GEMM over experts. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Final

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
"""Supported ``tile_n``, the number of weight rows of a tile."""
CLASSES: Final = (1, 2, 3, 5, 8)
"""Supported numbers of classes of experts. An expert's class is its index modulo the number of classes."""
ACCUMULATORS: Final = 2
"""Number of accumulators in tensor memory. The epilogue reads one accumulator while the MMAs compute the other
accumulator."""
COLUMNS_PER_LOAD: Final = 32
"""Number of columns of tensor memory that a thread loads at once."""
MAX_LINEAR_SCALES_TILE_N: Final = {False: 64, True: 32}
"""Largest ``tile_n`` with linear scales, keyed by True if a bias is added. In wider tiles, the epilogue's sums would
spill, because with linear scales the CTA also contains scale-loader warps."""
STORE_COLUMNS: Final = 8
"""Number of columns of the result that a thread stores at once."""
EXPERTS_PER_WORD: Final = 32
"""Number of experts whose bits share a 32-bit word. All experts of a word belong to the same class."""


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out workspace num_ctas")):
    """Run-time arguments, in order, for M rows of activations, N rows of the weight, and E experts with
    ``Config.expert_k`` elements of k each, in blocks of B. K is the number of elements of a row, for all experts. N is
    a multiple of 8, and with linear scales K is a multiple of 4 · B.

    Attributes:
        a: (M, K/2) uint8 FP4 codes.
        a_scale: block scales of ``a``: (M, K/B) if linear, the shape ``ScaleLayout.shape`` if tiled.
        b: (K/2, N) uint8 FP4 codes, the transposed view of a row-major (N, K/2) weight.
        b_scale: block scales of the weight's rows, in the same layout as ``a_scale``.
        alpha: (M, E) float32 factors, any strides. An expert whose factor is zero adds nothing to a token.
        bias: (E, N), or None. The bias is added to an expert's accumulator before the multiplication by the factor.
        out: (M, N) in ``Config.out_dtype``, written.
        workspace: ``Config.workspace_bytes`` uint8, written, or None if this size is 0.
        num_ctas: int32, number of persistent CTAs: the number of SMs.
    """


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Static properties of the FP4 tcgen05 GEMM over experts. M, N and the number of experts are run-time values.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        out_dtype: dtype of the result.
        expert_k: number of elements along K that each expert owns.
        tile_n: number of weight rows of a tile.
        classes: number of classes into which the experts are divided.
        routed: True to skip experts to which no token of the m tile is routed.
        stages: number of pipeline stages.
        pdl: True to launch with programmatic dependent launch.
        bias_dtype: dtype of the experts' biases, or None without biases.
    """

    fmt: FP4Format
    layout: ScaleLayout
    out_dtype: torch.dtype
    expert_k: int
    tile_n: int
    classes: int
    routed: bool
    stages: int
    pdl: bool
    bias_dtype: torch.dtype | None = None

    @property
    def stage(self) -> BlockScaledStage:
        """Layout of a pipeline stage. The activations are on the M side of the MMAs."""
        spread = self.expert_k % BlockScaledStage(self.fmt, self.layout, self.tile_n).scale_tile_k != 0
        return BlockScaledStage(self.fmt, self.layout, self.tile_n, spread=spread)

    @property
    def k_tiles(self) -> int:
        """Number of k tiles of an expert."""
        return -(-self.expert_k // K_TILE)

    @property
    def bias_bytes(self) -> int:
        """Bytes of shared memory in which the epilogue warps store an expert's bias in float32, one copy per warp."""
        return 0 if self.bias_dtype is None else 4 * self.tile_n * EPILOGUE_WARPS

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + self.bias_bytes

    @property
    def has_partial_sums(self) -> bool:
        """True if a result is the sum over several classes, whose partial sums another kernel adds up."""
        return self.classes > 1

    @property
    def has_workspace(self) -> bool:
        """True if a call needs a workspace: for partial sums, or for the bits of experts."""
        return self.has_partial_sums or self.routed

    def workspace_bytes(self, m: int, n: int, experts: int) -> int:
        """Return the size of the workspace in bytes: partial sums of all work tiles and, if ``routed``, one bit per m
        tile and expert."""
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
        if self.expert_k % MMA_K:
            return f"an expert's width is {self.expert_k}; it has to be a multiple of {MMA_K}"
        if self.tile_n not in TILES_N:
            return f"tile_n is {self.tile_n}; it has to be one of {TILES_N}"
        if self.classes not in CLASSES:
            return f"there are {self.classes} classes of experts; the number has to be one of {CLASSES}"
        most = MAX_LINEAR_SCALES_TILE_N[self.bias_dtype is not None]
        if self.stage.has_scale_loaders and self.tile_n > most:
            return f"tile_n is {self.tile_n}; with linear scales it must be at most {most}"
        return None


def plan(*, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
