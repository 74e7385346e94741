"""Configuration of the FP8 x FP4 GEMM with per-token scales. No device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.kernels.common.fp8.layouts import (
    GROUPS,
    K_TILE,
    LINE_SPAN,
    NARROW_SPLITS,
    SPLITS,
    WGMMA_M,
    WIDE,
    Arguments,
    FP8GemmConfig,
    with_most_stages,
)
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

SPAN_K: Final = LINE_SPAN * K_TILE
"""Number of elements of K in a stage. Activations are interleaved within each group of this size."""
FAST_TILE_M: Final = 256
"""Number of rows of ``a`` of the largest tiles. There are not enough registers for a second set of accumulators, so
``fast_accum`` must be True."""
TILES: Final = (
    *((tile_m, WIDE, split_k) for tile_m in (8, 16, 32, 64) for split_k in SPLITS),
    *((tile_m, WIDE, split_k) for tile_m in (128, FAST_TILE_M) for split_k in NARROW_SPLITS),
)
"""Supported (tile_m, tile_n, split_k)."""
TABLES: Final = 256
TABLE_BYTES: Final = 8
"""Number of decoding tables, and bytes of a table: one e4m3 number per e2m1 magnitude."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the FP8 x FP4 GEMM with per-token scales.

    Attributes:
        fmt: format of the weight.
        fast_accum: True if tensor cores add up all of K, False if sums of 512 elements are added in fp32.
    """

    fmt: FP4Format
    fast_accum: bool = False
    tiles: ClassVar = TILES
    stage_counts: ClassVar = range(10, 2, -1)
    line: ClassVar = SPAN_K // 2
    span: ClassVar = LINE_SPAN
    has_token_scales: ClassVar = True
    in_flight: ClassVar = 1
    pairs_rows: ClassVar = True
    pass_stages: ClassVar = 2
    """Number of stages that a consumer multiplies in an iteration of the mainloop: 512 elements of K."""

    @property
    def is_swapped(self) -> bool:
        return True

    @property
    def k_groups(self) -> int:
        # Larger tiles would spill registers with four consumer warpgroups. With split-K, tiles of 64 rows would have
        # room for only three stages.
        most = 64 if self.fast_accum and self.split_k == 1 else 32
        return 2 if self.tile_m <= most else 1

    @property
    def a_slots(self) -> int:
        # If a stage held two k tiles of ``a``, only two stages would fit, and copies would come too late.
        if self.tile_m != FAST_TILE_M:
            return 0
        return 5 if self.split_k == 1 else 3  # with split-K, received accumulators take 64 KB

    @property
    def exchanges(self) -> bool:
        """True if two CTAs exchange accumulators: each adds up both CTAs' accumulators of one consumer warpgroup."""
        return self.split_k > 1 and self.tile_m > WGMMA_M

    @property
    def received_bytes(self) -> int:
        return WGMMA_M * self.tile_m * 4 if self.exchanges else super().received_bytes

    @property
    def store_bytes(self) -> int:
        return 0 if self.exchanges else super().store_bytes

    @property
    def registers(self) -> tuple[int, ...]:
        # At launch, each of the 640 (or 384) threads has 96 (or 168) registers. The producer's warpgroup releases some
        # of its registers for the consumers.
        return (112, 32) if self.k_groups == 2 else (232, 40)

    @property
    def promotes(self) -> bool:
        """True if the sums of each iteration of the mainloop are added to accumulators in fp32."""
        return not self.fast_accum

    @property
    def tells_expert(self) -> bool:
        return not self.rows.is_plain  # the weight rows' units depend on the expert

    @property
    def scale_bytes(self) -> int:
        """Bytes of a weight row's indices in a stage: one byte per block."""
        return SPAN_K // self.fmt.block_size

    @property
    def slot_words(self) -> int:
        return self.tile_n * self.scale_bytes // 4 // LINE_SPAN

    @property
    def tables_at(self) -> int:
        """Offset of the decoding tables in the workspace, after the second K group's accumulators."""
        return self.tile_n * self.tile_m * 4 if self.k_groups == 2 else 0

    @property
    def token_scales_at(self) -> int:
        """Offset of the scales of ``a`` in the workspace. Each warpgroup that stores results has two buffers."""
        return self.tables_at + TABLES * TABLE_BYTES

    @property
    def workspace_bytes(self) -> int:
        """Bytes of shared memory for accumulators, decoding tables and scales of ``a``."""
        return self.token_scales_at + 2 * GROUPS * self.tile_m * 4

    def reason_unsupported(self, arch: Arch) -> str | None:
        if self.tile_m == FAST_TILE_M and not self.fast_accum:
            return f"tiles of {self.tile_m} rows have no registers for fp32 sums: fast_accum must be True"
        return super().reason_unsupported(arch)


plan = functools.partial(with_most_stages, Config)
