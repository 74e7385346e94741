"""How a kernel of FP8 products by warps is built: no device code."""

from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.kernels.common import row_tile
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.runtime.arch import Arch

BLOCK: Final = 128
"""Elements of k that share a scale; a stage holds as many elements of each row."""
COLUMNS: Final = 128
"""Rows of ``b`` of a tile: one scale a block of k."""
TILES: Final = {16: (1, 4), 64: (4, 2)}
"""Rows of ``a`` of a tile, and how its warps share it: rows, columns."""


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        rows: how rows of ``a`` belong to experts.
        out_dtype: of the result.
        tokens: rows of ``a`` of a tile: 16 or 64.
        stages: blocks of k under way.
        pdl: whether launches are programmatic dependent launches.
    """

    rows: ExpertLayout
    out_dtype: torch.dtype
    tokens: int
    stages: int
    pdl: bool

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
        """Rows of ``a`` that a warp has of a tile."""
        return self.tokens // TILES[self.tokens][0]

    @property
    def warp_columns(self) -> int:
        """Rows of ``b`` that a warp has of a tile."""
        return COLUMNS // TILES[self.tokens][1]

    @property
    def stage_bytes(self) -> int:
        """A block of k of both operands."""
        return (self.tokens + COLUMNS) * BLOCK

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stages * self.stage_bytes + self.warps * row_tile.SIZE_BYTES + self.rows.table_bytes

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.tokens not in TILES:
            return f"no tile has {self.tokens} rows of a"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return None


def plan(*, rows: ExpertLayout, out_dtype: torch.dtype, tokens: int, arch: Arch, pdl: bool) -> Config | None:
    """The configuration with the most stages that ``arch`` has room for; ``None`` if it cannot run this."""
    for stages in range(4, 1, -1):
        config = Config(rows, out_dtype, tokens, stages, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
