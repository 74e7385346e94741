"""Configuration of the GEMM of FP8 activations and an NVFP4 weight that is decoded to registers. No device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.fp8.layouts import (
    K_TILE,
    LINE_SPAN,
    SPLITS,
    WIDE,
    Arguments,
    FP8GemmConfig,
    reason_no_scale_layout,
    unit_words,
    with_most_stages,
)
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

TILES: Final = (*((tile_m, WIDE, split_k) for tile_m in (8, 16) for split_k in SPLITS), (24, WIDE, 1))
"""Supported (tile_m, tile_n, split_k). With 24 rows, ``split_k`` must be 1, because consumers would spill."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the FP8 x NVFP4 GEMM with a weight that is decoded to registers.

    Attributes:
        layout: scale layout of the weight.
    """

    tiles: ClassVar = TILES
    # Each number of stages is a multiple of the number of decoder groups, so that a stage belongs to the same group in
    # every round.
    stage_counts: ClassVar = (8, 6, 4)
    line: ClassVar = LINE_SPAN * K_TILE // 2
    span: ClassVar = LINE_SPAN
    k_groups: ClassVar = LINE_SPAN
    decoder_warps: ClassVar = LINE_SPAN
    decoder_teams: ClassVar = 2
    fmt: ClassVar[FP4Format] = NVFP4

    layout: ScaleLayout

    @property
    def registers(self) -> tuple[int, ...]:
        # At launch, each of the 768 threads has 80 registers. Producer, scale-loader and decoder warps release some for
        # the consumers. With 40 registers, decoders of tiles of 24 rows would spill 8 bytes.
        return (88, 72, 56) if self.tile_m == 24 else (88, 80, 40)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of shared memory for the second K group's accumulators."""
        return self.tile_n * self.tile_m * 4

    @property
    def units_at(self) -> int:
        """Index of the first word with factors for changes of units, among a k tile's words of scales.

        These words follow the scales of ``a`` and the weight rows' records (``common.fp8.units``).
        """
        return self.tile_m + 4 * self.copied_n

    @property
    def slot_words(self) -> int:
        return self.units_at + unit_words(self.tile_n)

    def reason_unsupported(self, arch: Arch) -> str | None:
        return reason_no_scale_layout(self.layout) or super().reason_unsupported(arch)


plan = functools.partial(with_most_stages, Config)
