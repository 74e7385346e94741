"""Configuration of the FP8 GEMM by mma.sync. No device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.kernels.common.core.layouts import Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, Arguments, ExpertLayout
from torch_cute_ops.kernels.common.fp8.warp_layouts import STAGES, TILE_N, WarpGemmConfig
from torch_cute_ops.runtime.arch import Arch

__all__ = ["MX_TILES", "TILES", "TILE_N", "Arguments", "Config", "plan"]

TILES: Final = {16: (1, 4), 64: (4, 2)}
"""(Number of warps that divide the rows, number of warps that divide the columns), keyed by ``tile_m``."""
MX_TILES: Final = {16: (1, 4), 32: (2, 4)}
"""Same as ``TILES``, for MXFP8. A warp multiplies 32 weight rows: with 64 rows, registers spill."""


@dataclass(frozen=True)
class Config(WarpGemmConfig):
    """Static properties of the FP8 GEMM by mma.sync.

    Attributes:
        has_blocks: True for block scales of both operands; False for per-token scales of ``a``, with the weight's
            scales in ``alpha``.
        is_mx: True for MXFP8. ``a_scale`` (M, ⌈K/128⌉), column-major, and ``b_scale`` (N, ⌈K/128⌉), row-major, are
            words of four ue8m0 bytes, declared as fp32.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tile_m: int
    stages: int
    pdl: bool
    has_blocks: bool = True
    is_mx: bool = False
    line: ClassVar = K_TILE

    @property
    def tiles(self) -> dict[int, tuple[int, int]]:  # type: ignore[override]
        return MX_TILES if self.is_mx else TILES


def plan(
    *,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tile_m: int,
    arch: Arch,
    pdl: bool,
    has_blocks: bool = True,
    is_mx: bool = False,
) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none
    fits."""
    return first_fit((Config(rows, epilogue, tile_m, stages, pdl, has_blocks, is_mx) for stages in STAGES), arch)
