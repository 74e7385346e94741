"""Configuration of the FP8 wgmma GEMM. No device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from torch_cute_ops.kernels.common.fp8.layouts import (
    K_TILE,
    MANY,
    NARROW_SPLITS,
    SPLITS,
    Arguments,
    FP8GemmConfig,
    with_most_stages,
)

__all__ = ["Arguments", "Config", "plan"]

TILES: Final = (
    *((tile_m, 128, split_k) for tile_m in (16, 32, 64) for split_k in SPLITS),
    # If the weight has few rows, narrow tiles give work to more CTAs. Clusters of more than two CTAs are not supported,
    # because they would leave some SMs idle.
    *((tile_m, 64, split_k) for tile_m in (16, 32, 64) for split_k in NARROW_SPLITS),
    *((MANY, tile_n, 1) for tile_n in (64, 128)),
)
"""Supported (tile_m, tile_n, split_k)."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the FP8 wgmma GEMM with block scales.

    Attributes:
        weight_scales: ``"blocks"`` for a scale of each 128 weight rows and 128 elements (128 × 128); ``"rows"`` for a
            scale of each weight row and 128 elements (1 × 128); ``"alpha"`` for a scale of each weight row, which
            ``alpha`` contains.
    """

    weight_scales: Literal["blocks", "rows", "alpha"] = "blocks"
    tiles: ClassVar = TILES
    stage_counts: ClassVar = range(12, 1, -1)
    prefetch_tile_m: ClassVar = 64
    """Largest ``tile_m`` with a prefetch. On an H100, prefetches make a layer of an 8B model 5.2, 2.8 and 1 µs faster
    at 1, 16 and 64 rows."""

    @property
    def scales_ahead(self) -> int:
        return 2 if self.weight_scales == "rows" and not self.is_swapped else 4

    @property
    def registers(self) -> tuple[int, ...]:
        return 224, 56

    @property
    def unrolls(self) -> bool:
        # The largest tiles use so much power that the power limit lowers the clock. With fewer instructions, the clock
        # is higher.
        return not self.is_swapped and self.tile_n == K_TILE

    @property
    def slot_words(self) -> int:
        """Number of words of a k tile's scales: one per row of ``a``, and for the weight one per row, one, or none,
        rounded up to a multiple of 16 bytes."""
        return self.tile_m + {"blocks": 4, "rows": self.tile_n, "alpha": 0}[self.weight_scales]


plan = functools.partial(with_most_stages, Config)
