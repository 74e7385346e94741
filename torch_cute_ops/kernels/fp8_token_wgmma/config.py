"""Configuration of the FP8 wgmma GEMM with per-token scales. No device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

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
    *((MANY, tile_n, 1) for tile_n in (64, 128, 192)),
)
"""Supported (tile_m, tile_n, split_k)."""
PROMOTED_K: Final = 512
"""Number of elements of K that tensor cores add up before the sum is added to accumulators in fp32, unless
``fast_accum``."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the FP8 wgmma GEMM with per-token scales.

    Attributes:
        fast_accum: True if tensor cores add up all of K, False if sums of 512 elements are added in fp32.
    """

    fast_accum: bool = False
    tiles: ClassVar = TILES
    stage_counts: ClassVar = range(12, 3, -1)
    has_token_scales: ClassVar = True
    scale_warps: ClassVar = 0
    slot_words: ClassVar = 0
    in_flight: ClassVar = 1
    prefetch_tile_m: ClassVar = 64
    pass_k_tiles: ClassVar = PROMOTED_K // K_TILE
    """Number of k tiles that a consumer multiplies in a pass of the mainloop."""

    @property
    def registers(self) -> tuple[int, ...]:
        return 240, 24

    @property
    def promotes(self) -> bool:
        """True if the sums of each pass of the mainloop are added to accumulators in fp32."""
        return not self.fast_accum


plan = functools.partial(with_most_stages, Config)
