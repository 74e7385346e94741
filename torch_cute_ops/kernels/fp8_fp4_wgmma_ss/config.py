"""Configuration of the GEMM of FP8 activations and an FP4 weight that is decoded to shared memory. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.fp8.layouts import (
    K_TILE,
    MANY,
    NARROW_SPLITS,
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

PAIR: Final = 256
"""Number of rows of ``a`` in a tile of two CTAs. Each CTA decodes half of the weight tile for both CTAs."""
LEAST: Final = 32
"""Number of rows of ``a`` in the smallest tile. With fewer rows, the backends ``wgmma_codes`` and ``wgmma_rs`` are
faster."""
TILES: Final = (
    *((tile_m, WIDE, split_k) for tile_m in (LEAST, WGMMA_M) for split_k in SPLITS),
    # With random routing and a mean of 32 or 64 rows per expert, the rows of most experts fit into one of these tiles.
    *((tile_m, WIDE, 1) for tile_m in (48, 80, 96, MANY, PAIR)),
    # Split-K: two CTAs divide K. Each CTA adds up and stores the rows of one consumer warpgroup.
    *((MANY, tile_n, 2) for tile_n in (WGMMA_M, WIDE)),
    *((tile_m, WGMMA_M, split_k) for tile_m in (LEAST, 48, WGMMA_M, 80, 96) for split_k in NARROW_SPLITS),
)
"""Supported (tile_m, tile_n, split_k). Here, ``tile_m`` counts the rows of all CTAs of a cluster."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the FP8 x FP4 GEMM with a weight that is decoded to shared memory.

    Attributes:
        layout: scale layout of the weight.
        fmt: format of the weight.
        cluster_m: number of CTAs of a cluster that share the decoded weight. Each computes ``tile_m`` rows of ``a``.
    """

    tiles: ClassVar = TILES
    stage_counts: ClassVar = range(10, 1, -1)
    line: ClassVar = K_TILE // 2

    layout: ScaleLayout
    fmt: FP4Format
    cluster_m: int = 1

    @property
    def lanes_per_row(self) -> int:
        """Number of threads that decode a weight row of a k tile.

        If two CTAs share the decoded weight, each CTA decodes half of the rows, so two threads share a row.
        """
        return self.cluster_m

    @property
    def decoder_teams(self) -> int:
        # Use the largest number of decoder groups, in whole warpgroups, that leaves enough registers for the
        # accumulators.
        if self.tile_n < WIDE:
            return 4
        return 3 if self.is_swapped else 2

    @property
    def decoder_warps(self) -> int:
        return self.lanes_per_row * self.copied_n // 32

    @property
    def registers(self) -> tuple[int, ...]:
        # The producer, scale-loader and decoder warps release registers, which the consumers take.
        if not self.is_swapped:
            return 168, 56, 40
        return (144, 72, 40) if self.mma_n > LEAST else (136, 80, 40)

    @property
    def in_flight(self) -> int:
        # With more k tiles in flight, consumers would need more registers, and the decoders would have too few.
        return 2 if self.mma_n < WGMMA_M else 1

    @property
    def scales_ahead(self) -> int:
        return 2 if self.mma_n < WGMMA_M else 1

    @property
    def workspace_bytes(self) -> int:
        """Bytes of shared memory for the decoded weight."""
        return self.stages * self.tile_n * K_TILE

    @property
    def units_at(self) -> int:
        """Index of the first word with factors for changes of units, among a k tile's words of scales.

        These words follow the scales of ``a`` and the records (``common.fp8.units``) of the weight rows that this CTA
        decodes.
        """
        return self.tile_m + 4 * self.copied_n

    @property
    def slot_words(self) -> int:
        return self.units_at + unit_words(self.tile_n)

    def reason_unsupported(self, arch: Arch) -> str | None:
        return reason_no_scale_layout(self.layout) or super().reason_unsupported(arch)


def plan(*, tile_m: int, **given: Any) -> Config | None:
    """Return the configuration for one of ``TILES`` with the most stages that fit into shared memory, or None if none
    fits."""
    cluster_m = 2 if tile_m == PAIR else 1
    return with_most_stages(Config, tile_m=tile_m // cluster_m, cluster_m=cluster_m, **given)
