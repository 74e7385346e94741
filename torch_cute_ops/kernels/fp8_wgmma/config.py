"""How a warpgroup kernel of FP8 products is built: no device code."""

from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.kernels.common import row_tile
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.sum_tile import SumTile
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS, WARPGROUP
from torch_cute_ops.runtime.arch import Arch

BLOCK: Final = 128
"""Elements of k that share a scale, and rows of ``b`` that do; a stage holds as many elements of each row."""
GROUPS: Final = 2
"""Warpgroups that multiply."""
THREADS: Final = (GROUPS + 1) * WARPGROUP
SCALE_WARPS: Final = WARPGROUP // 32 - 1
"""Warps that load scales: all of the third warpgroup but the one that copies."""
MANY: Final = 128
"""Rows of ``a`` of a tile that has these on the M side; with fewer it has ``b`` there."""
TILES: Final = (
    *((tokens, 128, splits) for tokens in (16, 32, 64) for splits in (1, 2, 4)),
    *((MANY, columns, 1) for columns in (64, 128)),
)
"""Rows of ``a`` and of ``b`` of a tile, and CTAs that share it."""
TOGETHER: Final = 2
"""Blocks of k whose products a warpgroup starts one after the other before it waits for the first: as many as there are
registers for."""
BARRIER_BYTES: Final = 256
RECORD_WORDS: Final = 4
"""Of what the copying warp tells of a tile with its blocks: first row, rows from there on, first column, a zero."""
RECORD_BYTES: Final = RECORD_WORDS * 4


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        rows: how rows of ``a`` belong to experts.
        out_dtype: of the result.
        tokens, columns, splits: one of ``TILES``: rows of ``a`` and of ``b`` of a tile, and CTAs of a cluster, which
            share it, each with a part of k.
        stages: blocks of k under way.
        pdl: whether launches are programmatic dependent launches.
    """

    rows: ExpertLayout
    out_dtype: torch.dtype
    tokens: int
    columns: int
    splits: int
    stages: int
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def is_swapped(self) -> bool:
        """Whether the M side of the products are rows of ``b``."""
        return self.tokens < MANY

    @property
    def sum_tile(self) -> SumTile:
        """Where the sums of CTAs that share a tile lie."""
        return SumTile(self.tokens, self.columns)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies, and of another."""
        return 224, 56

    @property
    def product_columns(self) -> int:
        """N of a product."""
        return self.tokens if self.is_swapped else self.columns

    @property
    def unrolls(self) -> bool:
        """Whether a pass of the loop over k is a whole round of the ring, so that all addresses are constants: where
        tensor cores limit, the GPU lowers its clock for power, and instructions that are left out raise it."""
        return not self.is_swapped and self.columns == BLOCK

    @property
    def box_rows(self) -> int:
        """Rows of ``a`` that are copied at once: none that only a warpgroup without rows would read."""
        return min(self.tokens, GROUP_ROWS)

    @property
    def boxes(self) -> int:
        """Such copies of a stage, at most."""
        return self.tokens // self.box_rows

    @property
    def stage_scales(self) -> int:
        """Scales of a stage: of rows of ``a``, then that of the columns; whole pieces of 16 bytes."""
        return self.tokens + 4

    @property
    def stage_bytes(self) -> int:
        """A block of k of both operands, its scales, and where the tile lies."""
        return (self.tokens + self.columns) * BLOCK + self.stage_scales * 4 + RECORD_BYTES

    @property
    def store_bytes(self) -> int:
        """Shared memory in which warps put rows of the result together, or CTAs leave their sums."""
        if self.is_swapped:
            return self.sum_tile.size_bytes if self.splits > 1 else 0
        return GROUPS * 4 * row_tile.SIZE_BYTES

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stages * self.stage_bytes + self.store_bytes + self.rows.table_bytes + BARRIER_BYTES

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if arch.name != "sm_90a":
            return f"wgmma is of sm_90a; this is {arch.name}"
        if (self.tokens, self.columns, self.splits) not in TILES:
            return f"no tile has {self.tokens} rows of a and {self.columns} of b, shared by {self.splits} CTAs"
        if self.stages < SCALE_WARPS:
            return f"{SCALE_WARPS} warps that load scales by turns need as many stages; there are {self.stages}"
        if self.unrolls and self.stages % TOGETHER:
            return f"{TOGETHER} blocks are multiplied together: {self.stages} stages have not whole ones"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return None


MOST_STAGES: Final = 12


def plan(
    *, rows: ExpertLayout, out_dtype: torch.dtype, tokens: int, columns: int, splits: int = 1, arch: Arch, pdl: bool
) -> Config | None:
    """The configuration with the most stages that ``arch`` has room for; ``None`` if it cannot run this."""
    for stages in range(MOST_STAGES, 1, -1):
        config = Config(rows, out_dtype, tokens, columns, splits, stages, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
