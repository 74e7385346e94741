"""Configuration of the FP8 GEMM by mma.sync. No device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.kernels.common.core.layouts import Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, STORE_TILE_BYTES, Arguments, ExpertLayout
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

TILE_N: Final = 128
"""Number of rows of ``b`` in a tile. They share a scale in each k tile."""
TILES: Final = {16: (1, 4), 64: (4, 2)}
"""(Number of warps that divide the rows, number of warps that divide the columns), keyed by ``tile_m``."""


@dataclass(frozen=True)
class Config:
    """Static properties of the FP8 GEMM by mma.sync. N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on an accumulator before it is stored.
        tile_m: number of rows of ``a`` in a tile, 16 or 64.
        stages: number of stages of the pipeline. A stage holds one k tile.
        pdl: True to launch with programmatic dependent launch.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tile_m: int
    stages: int
    pdl: bool
    prefetches: ClassVar[bool] = False
    """False: this kernel never prefetches (see ``FP8GemmConfig.prefetches``)."""

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        down, across = TILES[self.tile_m]
        return down * across

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * self.warps

    @property
    def warp_m(self) -> int:
        """Number of rows of ``a`` that a warp multiplies."""
        return self.tile_m // TILES[self.tile_m][0]

    @property
    def warp_n(self) -> int:
        """Number of rows of ``b`` that a warp multiplies."""
        return TILE_N // TILES[self.tile_m][1]

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory for a k tile of both operands."""
        return (self.tile_m + TILE_N) * K_TILE

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
        return self.stages * self.stage_bytes + self.warps * STORE_TILE_BYTES + self.rows.table_bytes

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        if self.tile_m not in TILES:
            return f"no tile has tile_m={self.tile_m}"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)


def plan(*, rows: ExpertLayout, epilogue: Epilogue, tile_m: int, arch: Arch, pdl: bool) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none
    fits."""
    return first_fit((Config(rows, epilogue, tile_m, stages, pdl) for stages in range(4, 1, -1)), arch)
