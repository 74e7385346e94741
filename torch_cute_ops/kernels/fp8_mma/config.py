"""Configuration of the FP8 GEMM by mma.sync: no device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.kernels.common.core.layouts import Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import (
    STORE_TILE_BYTES,
    Arguments,
    ExpertLayout,
)
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

BLOCK: Final = 128
"""Elements of k that share a scale, and of a stage."""
COLUMNS: Final = 128
"""Rows of ``b`` of a tile, which share a scale."""
TILES: Final = {16: (1, 4), 64: (4, 2)}
"""Rows of ``a`` of a tile, and how many warps divide its rows and its columns."""


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        rows: how rows of ``a`` belong to experts.
        epilogue: what is done to the sums.
        tokens: rows of ``a`` of a tile: 16 or 64.
        stages: K blocks in flight.
        pdl: whether launches are programmatic dependent launches.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tokens: int
    stages: int
    pdl: bool
    prefetches: ClassVar[bool] = False
    """As of ``FP8TilesConfig``."""

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        down, across = TILES[self.tokens]
        return down * across

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def warp_rows(self) -> int:
        """Rows of ``a`` of a warp."""
        return self.tokens // TILES[self.tokens][0]

    @property
    def warp_columns(self) -> int:
        """Rows of ``b`` of a warp."""
        return COLUMNS // TILES[self.tokens][1]

    @property
    def stage_bytes(self) -> int:
        """A K block of both operands."""
        return (self.tokens + COLUMNS) * BLOCK

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stages * self.stage_bytes + self.warps * STORE_TILE_BYTES + self.rows.table_bytes

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.tokens not in TILES:
            return f"no tile has {self.tokens} rows of a"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)


def plan(*, rows: ExpertLayout, epilogue: Epilogue, tokens: int, arch: Arch, pdl: bool) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if it cannot run this."""
    return first_fit((Config(rows, epilogue, tokens, stages, pdl) for stages in range(4, 1, -1)), arch)
