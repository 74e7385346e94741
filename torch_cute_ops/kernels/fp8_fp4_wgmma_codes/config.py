"""Configuration of the GEMM that multiplies FP8 activations by codes of an MXFP4 weight. No device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import MXFP4, FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.fp8.layouts import (
    FLAG_WORDS,
    K_TILE,
    LINE_SPAN,
    SPLITS,
    WIDE,
    Arguments,
    FP8GemmConfig,
    reason_no_scale_layout,
    with_most_stages,
)
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

BLOCKS: Final = K_TILE // MXFP4.block_size
"""Number of scale blocks of a row in a k tile."""
TILES: Final = (*((tile_m, WIDE, split_k) for tile_m in (8, 16, 24) for split_k in SPLITS), (32, WIDE, 1))
"""Supported (tile_m, tile_n, split_k). Each block has its own accumulators, so there are not enough registers for more
rows of ``a``."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the FP8 x MXFP4 GEMM that multiplies the weight's codes.

    Attributes:
        layout: scale layout of the weight.
    """

    tiles: ClassVar = TILES
    # Each number of stages is a multiple of the number of decoder groups, so that a stage belongs to the same group in
    # every round.
    stage_counts: ClassVar = (8, 6, 4)
    in_flight: ClassVar = LINE_SPAN
    line: ClassVar = LINE_SPAN * K_TILE // 2
    span: ClassVar = LINE_SPAN
    decoder_warps: ClassVar = LINE_SPAN
    decoder_teams: ClassVar = 2
    fmt: ClassVar[FP4Format] = MXFP4

    layout: ScaleLayout

    @property
    def registers(self) -> tuple[int, ...]:
        # With 40 registers and split-K, decoders of tiles of 24 rows would spill 8 bytes.
        return (200, 56, 56) if self.tile_m == 24 else (208, 56, 40)

    @property
    def amounts_at(self) -> int:
        """Index of the first word with amounts for the rounding of codes (see ``codes.rounded``), in a k tile's scales.

        These words follow the scales of ``a`` and one factor per weight row and block.
        """
        return self.tile_m + BLOCKS * self.tile_n

    @property
    def flags_at(self) -> int:
        """Index of the flag word among the scale words of a k tile."""
        return self.amounts_at + self.tile_n

    @property
    def slot_words(self) -> int:
        return self.flags_at + FLAG_WORDS

    def reason_unsupported(self, arch: Arch) -> str | None:
        return reason_no_scale_layout(self.layout) or super().reason_unsupported(arch)


plan = functools.partial(with_most_stages, Config)
