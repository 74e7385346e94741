"""Configuration of the FP8 GEMM by mma.sync. No device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.kernels.common.core.layouts import Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, Arguments, ExpertLayout
from torch_cute_ops.kernels.common.fp8.warp_layouts import STAGES, TILE_N, WarpGemmConfig
from torch_cute_ops.runtime.arch import Arch

__all__ = ["TILES", "TILE_N", "Arguments", "Config", "plan"]

TILES: Final = {16: (1, 4), 64: (4, 2)}
"""(Number of warps that divide the rows, number of warps that divide the columns), keyed by ``tile_m``."""


@dataclass(frozen=True)
class Config(WarpGemmConfig):
    """Static properties of the FP8 GEMM by mma.sync.

    Attributes:
        has_blocks: True for block scales of both operands; False for per-token scales of ``a``, with the weight's
            scales in ``alpha``.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tile_m: int
    stages: int
    pdl: bool
    has_blocks: bool = True
    tiles: ClassVar = TILES
    line: ClassVar = K_TILE


def plan(
    *, rows: ExpertLayout, epilogue: Epilogue, tile_m: int, arch: Arch, pdl: bool, has_blocks: bool = True
) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none
    fits."""
    return first_fit((Config(rows, epilogue, tile_m, stages, pdl, has_blocks) for stages in STAGES), arch)
