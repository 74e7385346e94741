"""Host side of kernels with ``tcgen05.mma``: layout of a stage, and base classes of configurations. No device code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core.layouts import first_fit
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.runtime.arch import Arch

# Stage

MMA_M: Final = 128
"""Number of rows of the operand on the M side per CTA. Each row is a lane of tensor memory."""
K_TILE_BYTES: Final = K_TILE // 2
"""Bytes of FP4 codes in one k tile of a row."""
MMA_K: Final = 64
"""Number of elements along K that an MMA multiplies."""
TMEM_COLUMNS: Final = 512
"""Number of columns of tensor memory of an SM."""
EPILOGUE_WARPS: Final = MMA_M // 32
"""Number of epilogue warps. Each warp can load 32 lanes of tensor memory."""
SCALE_LOADER_WARPS: Final = 4
"""Number of scale-loader warps. These warps load linear scales and store them in the 128x4 layout."""
SCALE_STAGES: Final = 2
"""Number of buffers for scales in tensor memory. Each buffer holds the scales of one k tile."""
ALIGNMENT: Final = 1024
"""Alignment of a stage in bytes. The 128-byte swizzle requires it."""


class OperandStage:
    """Layout of a stage in shared memory: one k tile of both operands, M side first. Each row takes ``K_TILE_BYTES``
    bytes. Subclasses are frozen dataclasses.

    Attributes:
        mma_n: number of rows of the operand on the N side, which are columns of the accumulator.
        cta_group: number of CTAs that compute an MMA together. Each CTA copies the codes of ``mma_n / cta_group`` rows
            of the N side.
        scale_loader_warps: number of scale-loader warps if ``has_scale_loaders`` is True.
    """

    mma_n: int
    cta_group: int
    scale_loader_warps: ClassVar[int] = SCALE_LOADER_WARPS

    @property
    def has_scale_loaders(self) -> bool:
        """True if the CTA contains scale-loader warps."""
        raise NotImplementedError

    @property
    def scale_loaders_fill(self) -> bool:
        """True if a stage becomes full only after a scale loader has arrived at its full barrier."""
        return self.has_scale_loaders

    @property
    def full_arrivals(self) -> int:
        """Number of arrivals that make a stage full, in addition to the bytes of copies."""
        return 1 + self.scale_loaders_fill

    @property
    def empty_arrivals(self) -> int:
        """Number of arrivals that make a stage empty: the commit of its MMAs, and the arrivals of other readers."""
        return 1

    @property
    def cta_mma_n(self) -> int:
        """Number of rows of the operand on the N side whose codes one CTA copies."""
        return self.mma_n // self.cta_group

    @property
    def code_bytes(self) -> int:
        """Number of bytes of a stage's codes, for the M side and the N side together."""
        return (MMA_M + self.cta_mma_n) * K_TILE_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the stage in bytes."""
        return -(-self.code_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def scale_columns(self) -> int:
        """Number of columns of tensor memory for a k tile's scales."""
        return 0

    @property
    def threads(self) -> int:
        """Number of threads of a CTA: epilogue, producer, MMA and scale-loader warps."""
        return 32 * (EPILOGUE_WARPS + 2 + (self.scale_loader_warps if self.has_scale_loaders else 0))

    def reason_unsupported(self) -> str | None:
        """Reason that the stage is not supported, or None."""
        return None


@dataclass(frozen=True)
class BlockScaledStage(OperandStage):
    """Layout of a stage in shared memory. A stage holds one k tile: codes of the M side, codes of the N side, scales of
    the N side, scales of the M side.

    Attributes:
        fmt, layout: format and scale layout of all operands.
        mma_n, cta_group: attributes that ``OperandStage`` describes.
        spread: True if a k tile may begin in the middle of a scale tile.
        n_operands: number of operands on the N side, each with ``mma_n`` rows, its own MMAs and its own accumulator.
    """

    fmt: FP4Format
    layout: ScaleLayout
    mma_n: int
    cta_group: int = 1
    spread: bool = False
    n_operands: int = 1

    @property
    def code_bytes(self) -> int:
        return (MMA_M + self.n_operands * self.cta_mma_n) * K_TILE_BYTES

    @property
    def has_scale_loaders(self) -> bool:
        """True if scale-loader warps write the scales, because the operands' scales are linear."""
        return self.layout.is_linear

    @property
    def scale_tile_k(self) -> int:
        """Number of elements along K that a scale tile covers."""
        return TILE_BLOCKS * self.fmt.block_size

    @property
    def scale_tiles(self) -> int:
        """Number of scale tiles that a k tile spans along K."""
        return K_TILE // self.scale_tile_k + self.spread

    @property
    def scale_row_tiles(self) -> int:
        """Number of scale tiles that an operand on the N side spans along its rows."""
        return -(-self.mma_n // MMA_M)

    @property
    def n_scale_bytes(self) -> int:
        """Number of bytes of a stage's scales for one operand on the N side."""
        return self.scale_row_tiles * self.scale_tiles * SCALE_TILE_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the stage in bytes."""
        size = self.code_bytes + self.n_operands * self.n_scale_bytes + self.scale_tiles * SCALE_TILE_BYTES
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def scale_columns(self) -> int:
        """Number of columns of tensor memory for a k tile's scales. The scales of the M side come first. A scale tile
        takes four columns."""
        return (1 + self.n_operands * self.scale_row_tiles) * self.scale_tiles * TILE_BLOCKS

    def reason_unsupported(self) -> str | None:
        if self.layout.tile_rows not in (0, MMA_M):
            return f"scales are linear or in tiles of {MMA_M} rows, not {self.layout.name}"
        return None


# Configurations

BARRIER_BYTES: Final = 512
MAX_STAGES: Final = 9
"""Largest number of stages. A stage with few rows of activations takes 20 KB. Nine such stages cover the latency of
global memory at 54 bytes/ns (data sheet)."""


class Tcgen05Config:
    """Base class of the configurations of kernels with ``tcgen05.mma``. Subclasses are frozen dataclasses with a field
    ``stages``, the number of stages.

    Attributes:
        scale_stages: number of k tiles whose scales fit into tensor memory at the same time.
        waits_first: True if all threads wait for the previous kernel before they take their roles.
    """

    stages: int
    scale_stages: ClassVar[int] = 0
    waits_first: ClassVar[Any] = False

    @property
    def stage(self) -> Any:
        """Layout of a pipeline stage, which holds one k tile."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Number of accumulators in tensor memory. With two accumulators, the epilogue stores one while MMAs compute
        the other."""
        raise NotImplementedError

    @property
    def acc_empty_barriers(self) -> int:
        """Number of barriers by which the epilogue signals that MMAs may overwrite an accumulator."""
        raise NotImplementedError

    @property
    def acc_columns(self) -> int:
        """Number of columns of tensor memory that all accumulators take."""
        raise NotImplementedError

    @property
    def tmem_columns(self) -> int:
        """Number of columns of tensor memory to allocate, a power of two."""
        used = self.acc_columns + self.scale_stages * self.stage.scale_columns
        return max(32, 1 << (used - 1).bit_length())

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.stage.threads

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that all stages take."""
        return self.stages * self.stage.size_bytes

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
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


class BlockScaledConfig(Tcgen05Config):
    """Base class of the configurations of block-scaled kernels."""

    scale_stages: ClassVar[int] = SCALE_STAGES

    @property
    def stage(self) -> BlockScaledStage:
        """Layout of a stage."""
        raise NotImplementedError


Config = TypeVar("Config", bound=Tcgen05Config)


def with_most_stages(config: Callable[[int], Config], arch: Arch) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``config`` is a function that returns the configuration for a number of stages.
    """
    return first_fit(map(config, range(MAX_STAGES, 1, -1)), arch)
