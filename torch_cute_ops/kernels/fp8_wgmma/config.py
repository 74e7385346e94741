"""Configuration of the FP8 GEMM by wgmma: no device code."""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.kernels.common import row_tile
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.fp8_arguments import Arguments
from torch_cute_ops.kernels.common.sum_tile import SumTile
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS, WARPGROUP
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

BLOCK: Final = 128
"""Elements of k that share a scale, rows of ``b`` that do, and elements of k of a stage."""
GROUPS: Final = 2
"""Consumer warpgroups."""
THREADS: Final = (GROUPS + 1) * WARPGROUP
SCALE_WARPS: Final = WARPGROUP // 32 - 1
"""Warps that load scales: the producer's warpgroup but for the producer."""
MANY: Final = 128
"""Rows of ``a`` of a tile with ``a`` on the M side; a tile with fewer has ``b`` there."""
TILES: Final = (
    *((tokens, 128, splits) for tokens in (16, 32, 64) for splits in (1, 2, 4)),
    *((MANY, columns, 1) for columns in (64, 128)),
)
"""Rows of ``a`` and of ``b`` of a tile, and CTAs that share it."""
TOGETHER: Final = 2
"""K blocks whose MMAs a consumer starts before it waits for the first: as many as there are registers for."""
BARRIER_BYTES: Final = 256
RECORD_WORDS: Final = 4
"""Words of a stage's record of its tile: first row, rows from there on, first column, and expert, or 0 where the
epilogue does not depend on it."""
RECORD_BYTES: Final = RECORD_WORDS * 4


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        rows: how rows of ``a`` belong to experts.
        epilogue: what is done to the sums.
        tokens, columns, splits: one of ``TILES``: rows of ``a`` and of ``b`` of a tile, and CTAs of a cluster, which
            share the k of a tile.
        stages: K blocks in flight.
        pdl: whether launches are programmatic dependent launches.
    """

    rows: ExpertLayout
    epilogue: Epilogue
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
    def tells_expert(self) -> bool:
        """Whether consumers need the expert of a tile, for its alpha or bias."""
        return not self.rows.is_plain and (self.epilogue.is_by_expert or self.epilogue.bias_dtype is not None)

    @property
    def is_swapped(self) -> bool:
        """Whether rows of ``b`` are the M side of the MMAs."""
        return self.tokens < MANY

    @property
    def sum_tile(self) -> SumTile:
        """The sums of a CTA that shares a tile."""
        return SumTile(self.tokens, self.columns)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of consumers, and of other warps."""
        return 224, 56

    @property
    def mma_columns(self) -> int:
        """N of an MMA."""
        return self.tokens if self.is_swapped else self.columns

    @property
    def unrolls(self) -> bool:
        """Whether a pass of the loop over k is a whole round of the ring, so that all addresses are constants. Where
        the tensor cores are the limit, the GPU lowers its clock for power, and fewer instructions raise it."""
        return not self.is_swapped and self.columns == BLOCK

    @property
    def box_rows(self) -> int:
        """Rows of ``a`` of a copy: those of one consumer, so that rows that do not exist need not be copied."""
        return min(self.tokens, GROUP_ROWS)

    @property
    def boxes(self) -> int:
        """The most such copies of a stage."""
        return self.tokens // self.box_rows

    @property
    def stage_scales(self) -> int:
        """Scales of a stage: those of the rows of ``a``, then that of the columns; whole pieces of 16 bytes."""
        return self.tokens + 4

    @property
    def stage_bytes(self) -> int:
        """A K block of both operands, its scales, and its record."""
        return (self.tokens + self.columns) * BLOCK + self.stage_scales * 4 + RECORD_BYTES

    @property
    def store_bytes(self) -> int:
        """Shared memory in which warps assemble lines of the result, or CTAs exchange partial sums."""
        if self.is_swapped:
            return self.sum_tile.size_bytes if self.splits > 1 else 0
        return GROUPS * 4 * row_tile.SIZE_BYTES

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stages * self.stage_bytes + self.store_bytes + self.rows.table_bytes + BARRIER_BYTES

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if not arch.has_wgmma:
            return f"{arch.name} has no wgmma instructions"
        if (self.tokens, self.columns, self.splits) not in TILES:
            return f"no tile has {self.tokens} rows of a and {self.columns} of b, shared by {self.splits} CTAs"
        if self.stages < SCALE_WARPS:
            return f"{SCALE_WARPS} warps that load scales in turn need as many stages; there are {self.stages}"
        if self.unrolls and self.stages % TOGETHER:
            return f"{TOGETHER} blocks are multiplied together; {self.stages} is no multiple of that"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)


MOST_STAGES: Final = 12


def plan(
    *, rows: ExpertLayout, epilogue: Epilogue, tokens: int, columns: int, splits: int = 1, arch: Arch, pdl: bool
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if it cannot run this."""
    for stages in range(MOST_STAGES, 1, -1):
        config = Config(rows, epilogue, tokens, columns, splits, stages, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
