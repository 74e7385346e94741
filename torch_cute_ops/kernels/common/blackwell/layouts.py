"""Host side of kernels with block-scaled ``tcgen05.mma``: layout of a stage, and base class of configurations. No
device code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core.layouts import first_fit
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.runtime.arch import Arch

# Stage of operands

MMA_M: Final = 128
"""Rows of the operand on the M side in a CTA: lanes of tensor memory."""
K_TILE_BYTES: Final = K_TILE // 2
"""Bytes of codes of a row in a k tile."""
MMA_K: Final = 64
"""Elements of k of an MMA."""
TMEM_COLUMNS: Final = 512
"""Number of columns of tensor memory."""
EPILOGUE_WARPS: Final = MMA_M // 32
"""Number of epilogue warps. Each can load 32 lanes of tensor memory."""
SCALE_LOADER_WARPS: Final = 4
"""Number of warps that write linear scales in tile order."""
SCALE_STAGES: Final = 2
"""Number of k tiles whose scales are in tensor memory."""
ALIGNMENT: Final = 1024
"""Alignment of a stage in bytes, as the 128-byte swizzle needs it."""


@dataclass(frozen=True)
class BlockScaledStage:
    """K tile of both operands in shared memory: codes of the M side, codes of the N side, scales of the N side, scales
    of the M side.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        mma_n: rows of the operand on the N side: columns of the accumulator.
        cta_group: number of CTAs that compute an MMA together. Each of them copies the codes of an equal number of rows
            of the N side.
        spread: True if k tiles may begin in the middle of a scale tile.
    """

    fmt: FP4Format
    layout: ScaleLayout
    mma_n: int
    cta_group: int = 1
    spread: bool = False

    @property
    def has_scale_loaders(self) -> bool:
        """True if warps of the CTA write the scales in the layout of tiles."""
        return self.layout.is_linear

    @property
    def cta_mma_n(self) -> int:
        """Rows of the operand on the N side whose codes one CTA copies."""
        return self.mma_n // self.cta_group

    @property
    def scale_tile_k(self) -> int:
        """Elements of k of a scale tile."""
        return TILE_BLOCKS * self.fmt.block_size

    @property
    def scale_tiles(self) -> int:
        """Number of scale tiles of 128 rows of a k tile."""
        return K_TILE // self.scale_tile_k + self.spread

    @property
    def scale_row_tiles(self) -> int:
        """Number of scale tiles along the rows of the operand on the N side."""
        return -(-self.mma_n // MMA_M)

    @property
    def code_bytes(self) -> int:
        """Bytes of codes of both sides."""
        return (MMA_M + self.cta_mma_n) * K_TILE_BYTES

    @property
    def n_scale_bytes(self) -> int:
        """Bytes of the scales of the N side."""
        return self.scale_row_tiles * self.scale_tiles * SCALE_TILE_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the stage."""
        size = self.code_bytes + self.n_scale_bytes + self.scale_tiles * SCALE_TILE_BYTES
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory for the scales of a k tile, M side first: four columns per scale tile."""
        return (1 + self.scale_row_tiles) * self.scale_tiles * TILE_BLOCKS

    @property
    def threads(self) -> int:
        """Number of threads of a CTA: epilogue, producer, MMA and scale-loader warps."""
        return 32 * (EPILOGUE_WARPS + 2 + (SCALE_LOADER_WARPS if self.has_scale_loaders else 0))

    def reason_unsupported(self) -> str | None:
        """Reason that the stage is not supported, or None."""
        if self.layout.tile_rows not in (0, MMA_M):
            return f"scales are linear or in tiles of {MMA_M} rows, not {self.layout.name}"
        return None


# Configurations

BARRIER_BYTES: Final = 512
MAX_STAGES: Final = 9
"""Largest number of stages. With few rows of activations a stage takes 20 KB; nine of them cover the latency of memory
at 54 bytes/ns (data sheet)."""


class BlockScaledConfig:
    """Base of frozen dataclasses with a field ``stages``, the number of stages."""

    stages: int

    @property
    def stage(self) -> BlockScaledStage:
        """Layout of a stage."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Number of accumulators in tensor memory. With two, one accumulator is stored while the next is computed."""
        raise NotImplementedError

    @property
    def acc_empty_barriers(self) -> int:
        """Number of barriers that signal that an accumulator may be overwritten."""
        raise NotImplementedError

    @property
    def acc_columns(self) -> int:
        """Columns of tensor memory of all accumulators."""
        raise NotImplementedError

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory to allocate: a power of two."""
        used = self.acc_columns + SCALE_STAGES * self.stage.scale_columns
        return max(32, 1 << (used - 1).bit_length())

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.stage.threads

    @property
    def stage_bytes(self) -> int:
        """Bytes of all stages of a CTA."""
        return self.stages * self.stage.size_bytes

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.stage_bytes + BARRIER_BYTES

    def reason_unfit(self) -> str | None:
        """Reason that no GPU can run this configuration, or None."""
        raise NotImplementedError

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Reason that the kernel cannot run on ``arch``, or None."""
        if not arch.has_tcgen05:
            return f"{arch.name} has no tcgen05 instructions"
        reason = self.stage.reason_unsupported() or self.reason_unfit()
        if reason is not None:
            return reason
        if self.tmem_columns > TMEM_COLUMNS:
            return f"needs {self.tmem_columns} columns of tensor memory; an SM has {TMEM_COLUMNS}"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return None


Config = TypeVar("Config", bound=BlockScaledConfig)


def with_most_stages(config: Callable[[int], Config], arch: Arch) -> Config | None:
    """Return the configuration with the largest number of stages that fits into an SM of ``arch``, or None.

    ``config`` returns the configuration with a given number of stages.
    """
    return first_fit(map(config, range(MAX_STAGES, 1, -1)), arch)
