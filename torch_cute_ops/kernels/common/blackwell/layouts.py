"""A stage of operands for block-scaled ``tcgen05.mma``: no device code. What configurations of kernels of block-scaled
``tcgen05.mma`` share: no device code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core.layouts import first_fit
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.runtime.arch import Arch

# block scaled stage
#
# A stage of operands for block-scaled ``tcgen05.mma``: no device code.

MMA_M: Final = 128
"""Rows of the operand on the M side that a CTA has: the lanes of tensor memory."""
K_TILE_BYTES: Final = K_TILE // 2
"""Bytes of codes of a row in a chunk."""
MMA_K: Final = 64
"""Elements of k of an MMA."""
TMEM_COLUMNS: Final = 512
"""Of tensor memory."""
EPILOGUE_WARPS: Final = MMA_M // 32
"""Warps that load sums: each can load those of 32 lanes."""
SCALE_LOADER_WARPS: Final = 4
"""Warps that put linear scales into tiles."""
SCALE_STAGES: Final = 2
"""Chunks whose scales are in tensor memory."""
ALIGNMENT: Final = 1024
"""Of a stage: that of the 128-byte swizzle."""


@dataclass(frozen=True)
class BlockScaledStage:
    """A chunk of both operands in shared memory: codes of the M side, codes of the N side, scales of the N side, scales
    of the M side.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        mma_n: rows of the operand on the N side: columns of the accumulator.
        cta_group: CTAs of an MMA, each of which copies the codes of as many of these rows.
        spread: whether chunks may begin in the middle of a tile of scales.
    """

    fmt: FP4Format
    layout: ScaleLayout
    mma_n: int
    cta_group: int = 1
    spread: bool = False

    @property
    def has_scale_loaders(self) -> bool:
        """Whether warps of the CTA put the scales in the order of tiles."""
        return self.layout.is_linear

    @property
    def cta_mma_n(self) -> int:
        """Rows of the operand on the N side whose codes a CTA copies."""
        return self.mma_n // self.cta_group

    @property
    def scale_tile_k(self) -> int:
        """Elements of k of a tile of scales."""
        return TILE_BLOCKS * self.fmt.block_size

    @property
    def scale_tiles(self) -> int:
        """Tiles of scales of 128 rows of a chunk."""
        return K_TILE // self.scale_tile_k + self.spread

    @property
    def scale_row_tiles(self) -> int:
        """Times 128 rows that the operand on the N side has."""
        return -(-self.mma_n // MMA_M)

    @property
    def code_bytes(self) -> int:
        """Codes: those of the M side, then those of the N side."""
        return (MMA_M + self.cta_mma_n) * K_TILE_BYTES

    @property
    def n_scale_bytes(self) -> int:
        """Scales of the N side."""
        return self.scale_row_tiles * self.scale_tiles * SCALE_TILE_BYTES

    @property
    def size_bytes(self) -> int:
        """All of it."""
        size = self.code_bytes + self.n_scale_bytes + self.scale_tiles * SCALE_TILE_BYTES
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory with the scales of a chunk, those of the M side first: four for each tile."""
        return (1 + self.scale_row_tiles) * self.scale_tiles * TILE_BLOCKS

    @property
    def threads(self) -> int:
        """Threads of a CTA: warps that store, copy, multiply and arrange."""
        return 32 * (EPILOGUE_WARPS + 2 + (SCALE_LOADER_WARPS if self.has_scale_loaders else 0))

    def reason_unsupported(self) -> str | None:
        """Why there is no such stage; ``None`` if there is."""
        if self.layout.tile_rows not in (0, MMA_M):
            return f"scales are linear or in tiles of {MMA_M} rows, not {self.layout.name}"
        return None


# block scaled config
#
# What configurations of kernels of block-scaled ``tcgen05.mma`` share: no device code.

BARRIER_BYTES: Final = 512
MAX_STAGES: Final = 9
"""As many as cover the latency of memory with few rows of activations: 20 KB each at 54 bytes a nanosecond (by data
sheet)."""


class BlockScaledConfig:
    """A base of frozen dataclasses, which have a field ``stages``: stages of the ring."""

    stages: int

    @property
    def stage(self) -> BlockScaledStage:
        """A stage of the ring."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Tiles, or experts, whose sums are in tensor memory: one is stored while the next is computed."""
        raise NotImplementedError

    @property
    def acc_empty_barriers(self) -> int:
        """Barriers that say that an accumulator may be overwritten."""
        raise NotImplementedError

    @property
    def acc_columns(self) -> int:
        """Columns of tensor memory of all accumulators."""
        raise NotImplementedError

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory that are allocated: a power of two."""
        used = self.acc_columns + SCALE_STAGES * self.stage.scale_columns
        return max(32, 1 << (used - 1).bit_length())

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.stage.threads

    @property
    def stage_bytes(self) -> int:
        """All stages of a CTA."""
        return self.stages * self.stage.size_bytes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stage_bytes + BARRIER_BYTES

    def reason_unfit(self) -> str | None:
        """Why there is no such kernel, whatever the GPU; ``None`` if there is."""
        raise NotImplementedError

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if not arch.has_tcgen05:
            return f"{arch.name} has no tcgen05 instructions"
        reason = self.stage.reason_unsupported() or self.reason_unfit()
        if reason is not None:
            return reason
        if self.tmem_columns > TMEM_COLUMNS:
            return f"needs {self.tmem_columns} columns of tensor memory; there are {TMEM_COLUMNS}"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return None


Config = TypeVar("Config", bound=BlockScaledConfig)


def with_most_stages(config: Callable[[int], Config], arch: Arch) -> Config | None:
    """The configuration, a function of the number of stages, with the most of them that fit into an SM of ``arch``;
    ``None`` if none does."""
    return first_fit(map(config, range(MAX_STAGES, 1, -1)), arch)
