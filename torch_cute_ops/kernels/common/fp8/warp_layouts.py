"""Host side of the FP8 GEMMs by mma.sync (``common.fp8.warp_gemm``): base class of their configurations. No device
code."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, STORE_TILE_BYTES, ExpertLayout
from torch_cute_ops.runtime.arch import Arch

TILE_N: Final = 128
"""Number of weight rows in a tile. Rows of an FP8 weight with block scales share a scale in each k tile."""
STAGES: Final = range(4, 1, -1)
"""Supported numbers of stages, the largest first."""
SLOTS: Final = 2
"""Number of k tiles whose scales are in shared memory: threads store the scales of a k tile while slower warps still
multiply the previous k tile."""
RESERVED_BYTES: Final = 1024
"""Bytes of an SM's shared memory that the system reserves for each CTA (CUDA C++ Programming Guide)."""


class WarpGemmConfig:
    """Base class of the configurations of ``WarpGemm``. Subclasses are frozen dataclasses.

    N, K, R and the number of experts are run-time values.

    Attributes:
        rows: assignment of rows of ``a`` to experts.
        epilogue: operations on an accumulator before it is stored.
        tile_m: number of rows of ``a`` in a tile, a key of ``tiles``.
        stages: number of stages of the pipeline. A stage holds one k tile.
        pdl: True to launch with programmatic dependent launch.
        has_blocks: True if ``a`` has block scales, False if it has per-token scales.
        split_k: number of CTAs of a cluster, which compute one tile, each over a range of k tiles.
        tiles: (number of warps that divide the rows, number of warps that divide the columns), keyed by ``tile_m``.
        line: bytes of a weight row in a stage.
        slot_bytes: bytes of a slot, which holds scales of a k tile in shared memory; a multiple of 16.
        holds_weight: True to load all weight rows of a warp and k tile before the first MMA, so that consecutive MMAs
            add to different accumulators. If False, the smaller operand of a warp is loaded first.
        prefetches: False: these kernels never prefetch (see ``FP8GemmConfig.prefetches``).
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tile_m: int
    stages: int
    pdl: bool
    has_blocks: bool
    split_k: ClassVar[Any] = 1
    tiles: ClassVar[Mapping[int, tuple[int, int]]]
    line: ClassVar[int]
    slot_bytes: ClassVar[Any] = 0
    holds_weight: ClassVar[Any] = False
    prefetches: ClassVar[bool] = False

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        down, across = self.tiles[self.tile_m]
        return down * across

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * self.warps

    @property
    def warp_m(self) -> int:
        """Number of rows of ``a`` that a warp multiplies."""
        return self.tile_m // self.tiles[self.tile_m][0]

    @property
    def warp_n(self) -> int:
        """Number of weight rows that a warp multiplies."""
        return TILE_N // self.tiles[self.tile_m][1]

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory for a k tile of both operands."""
        return self.tile_m * K_TILE + TILE_N * self.line

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
        stores = self.warps * STORE_TILE_BYTES
        return self.stages * self.stage_bytes + SLOTS * self.slot_bytes + stores + self.rows.table_bytes

    def ctas_per_sm(self, arch: Arch) -> int:
        """Return the number of CTAs, 1 or 2, for which an SM's shared memory suffices."""
        return 2 if 2 * (self.smem_bytes + RESERVED_BYTES) <= arch.smem_per_sm else 1

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        if self.tile_m not in self.tiles:
            return f"no tile has tile_m={self.tile_m}"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)
