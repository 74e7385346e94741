"""Configuration of the MXFP8 wgmma GEMM. No device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.fp8.layouts import WIDE, Arguments, FP8GemmConfig, with_most_stages
from torch_cute_ops.kernels.fp8_wgmma.config import TILES

__all__ = ["TILES", "Arguments", "Config", "plan"]


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the MXFP8 wgmma GEMM.

    ``a`` is folded: (M, K) e4m3 with ``a_scale`` (M, ⌈K/128⌉) float32, column-major. ``b_scale`` (N, ⌈K/128⌉) contains
    words of four ue8m0 bytes, declared as fp32.
    """

    tiles: ClassVar = TILES
    stage_counts: ClassVar = range(10, 1, -1)

    @property
    def decoder_teams(self) -> int:
        # Use the largest number of decoder groups, in whole warpgroups, that leaves enough registers for the
        # accumulators.
        if self.tile_n < WIDE:
            return 4
        return 3 if self.is_swapped else 2

    @property
    def decoder_warps(self) -> int:
        return self.tile_n // 32

    @property
    def registers(self) -> tuple[int, ...]:
        # All other warps release registers, which the consumers take.
        if self.mma_n > WGMMA_M:
            return 168, 56, 40
        return (144, 72, 40) if self.mma_n == WGMMA_M else (136, 80, 40)

    @property
    def in_flight(self) -> int:
        # With more k tiles in flight, consumers would need more registers, and too few would be left for the decoders.
        return 2 if self.mma_n < WGMMA_M else 1

    @property
    def scales_ahead(self) -> int:
        return 4 if self.is_swapped else 2

    @property
    def powers_at(self) -> int:
        """Index of the first word with differences of exponents, among a k tile's words of scales. The scales of the
        rows of ``a`` and of the weight rows precede these words."""
        return self.tile_m + self.tile_n

    @property
    def slot_words(self) -> int:
        return self.tile_m + 2 * self.tile_n


plan = functools.partial(with_most_stages, Config)
