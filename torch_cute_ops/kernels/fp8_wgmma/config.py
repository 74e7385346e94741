"""Configuration of the FP8 GEMM by wgmma: no device code."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from torch_cute_ops.kernels.common.core.layouts import WGMMA_M, Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import (
    BLOCK,
    GROUPS,
    NARROW_SPLITS,
    SCALE_WARPS,
    SPLITS,
    STORE_TILE_BYTES,
    Arguments,
    ExpertLayout,
    FP8TilesConfig,
)
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

MANY: Final = 128
"""Rows of ``a`` of a tile with ``a`` on the M side; a tile with fewer has ``b`` there."""
TILES: Final = (
    *((tokens, 128, splits) for tokens in (16, 32, 64) for splits in SPLITS),
    # More CTAs where there are few rows of b: of clusters of more than two not all that would fit run at once.
    *((tokens, 64, splits) for tokens in (16, 32, 64) for splits in NARROW_SPLITS),
    *((MANY, columns, 1) for columns in (64, 128)),
)
"""Rows of ``a`` and of ``b`` of a tile, and CTAs that share it."""
TOGETHER: Final = 2
"""K blocks whose MMAs a consumer starts before it waits for the first: as many as there are registers for."""


@dataclass(frozen=True)
class Config(FP8TilesConfig):
    """Everything static about a kernel; ``tokens``, ``columns`` and ``splits`` are one of ``TILES``."""

    tiles: ClassVar[tuple] = TILES
    stage_counts: ClassVar[Sequence[int]] = range(12, 1, -1)
    """Numbers of stages to choose from, the most first."""
    line: ClassVar[int] = BLOCK
    scales_ahead: ClassVar[int] = 4
    prefetching_tokens: ClassVar[int] = 64
    """Most rows of ``a`` of a tile behind which something is brought into L2: a layer of an 8B model is 5.2, 2.8 and 1
    µs faster with it on an H100, with 1, 16 and 64 rows."""
    own_bytes: ClassVar[int] = 0
    helpers: ClassVar[int] = 0

    @property
    def is_swapped(self) -> bool:
        """Whether rows of ``b`` are the M side of the MMAs."""
        return self.tokens < MANY

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers per thread of consumers, of the producer's warpgroup, and of helpers, if there are any."""
        return 224, 56

    @property
    def together(self) -> int:
        """K blocks whose MMAs a consumer starts before it waits for the first."""
        return TOGETHER

    @property
    def token_parts(self) -> int:
        """Parts of the rows of ``a`` of a swapped tile: where it has rows of ``b`` for one consumer warpgroup only,
        each of the two takes half of the rows of ``a``."""
        return GROUPS * WGMMA_M // self.columns if self.is_swapped else 1

    @property
    def mma_columns(self) -> int:
        """N of an MMA."""
        return self.tokens // self.token_parts if self.is_swapped else self.columns

    @property
    def unrolls(self) -> bool:
        """Whether a pass of the loop over k is a whole round of the ring, so that all addresses are constants. Where
        the tensor cores are the limit, the GPU lowers its clock for power, and fewer instructions raise it."""
        return not self.is_swapped and self.columns == BLOCK

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``, then that of the columns; whole pieces of 16 bytes."""
        return self.tokens + 4

    @property
    def received_bytes(self) -> int:
        """Shared memory for what the CTAs of a cluster send to one of them: in tiles of many rows, of which each of two
        CTAs finishes those of one consumer warpgroup, its sums of these."""
        if self.is_swapped or self.splits == 1:
            return super().received_bytes
        return WGMMA_M * self.columns * 4

    @property
    def store_bytes(self) -> int:
        """Shared memory in which warps assemble lines of the result, or CTAs leave partial sums."""
        if self.is_swapped:
            return self.sum_tile.size_bytes if self.splits > 1 else 0
        return GROUPS * 4 * STORE_TILE_BYTES

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if not arch.has_wgmma:
            return f"{arch.name} has no wgmma instructions"
        rows = self.tokens * self.row_ctas
        if (rows, self.columns, self.splits) not in self.tiles:
            return f"no tile has {rows} rows of a and {self.columns} of b, shared by {self.splits} CTAs"
        if self.stages < SCALE_WARPS:
            return f"{SCALE_WARPS} warps that load scales in turn need as many stages; there are {self.stages}"
        if self.unrolls and self.stages % self.together:
            return f"{self.together} blocks are multiplied together; {self.stages} is no multiple of that"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def with_most_stages(
    kind: type[AnyConfig],
    *,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tokens: int,
    columns: int,
    splits: int = 1,
    arch: Arch,
    pdl: bool,
    static_weight: bool = False,
    prefetches: bool = False,
    **own: Any,
) -> AnyConfig | None:
    """The configuration of a kind with the most stages that fit into an SM of ``arch``; ``None`` if it cannot run this.
    ``own``: the fields that only this kind has."""
    ahead = static_weight and kind.reads_ahead(rows, tokens, pdl)
    hints = ahead, prefetches and kind.may_prefetch(rows, tokens)
    sizes, every = (tokens, columns, splits), kind.stage_counts
    return first_fit((kind(rows, epilogue, *sizes, stages, pdl, *hints, **own) for stages in every), arch)


plan = functools.partial(with_most_stages, Config)
