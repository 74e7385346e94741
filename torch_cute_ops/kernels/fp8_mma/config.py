"""Configuration of the FP8 GEMM by mma.sync. No device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.kernels.common.core.layouts import Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, Arguments, ExpertLayout
from torch_cute_ops.kernels.common.fp8.warp_layouts import STAGES, TILE_N, WarpGemmConfig
from torch_cute_ops.runtime.arch import Arch

__all__ = ["MX_TILES", "SCALED_TILES", "SPLIT_K", "TILES", "TILE_N", "Arguments", "Config", "mx_tiles", "plan"]

SPLIT_K: Final = (1, 2, 4, 8)
"""Supported numbers of CTAs of a cluster."""
TILES: Final = {16: (1, 4), 64: (4, 2)}
"""(Number of warps that divide the rows, number of warps that divide the columns), keyed by ``tile_m``."""
MX_TILES: Final = {16: (1, 4), 32: (2, 4)}
"""Same as ``TILES``, for scales of single weight rows: MXFP8 and ``Config.scales_by_row``. A warp multiplies 32 weight
rows: with 64 rows, registers spill."""
SCALED_TILES: Final = {16: (1, 4), 32: (2, 4), 64: (2, 4)}
"""Same as ``MX_TILES``, for block-scaled MMAs, which need fewer registers because they take the scales as bytes."""


@dataclass(frozen=True)
class Config(WarpGemmConfig):
    """Static properties of the FP8 GEMM by mma.sync.

    Attributes:
        has_blocks: True for block scales of both operands; False for per-token scales of ``a``, with the weight's
            scales in ``alpha``.
        is_mx: True for MXFP8. ``a_scale`` (M, ⌈K/128⌉), column-major, and ``b_scale`` (N, ⌈K/128⌉), row-major, are
            words of four ue8m0 bytes, declared as fp32.
        has_scaled_mmas: True if block-scaled MMAs apply the scales of MXFP8 operands.
        split_k: number of CTAs of a cluster, which compute one tile, each over a range of k tiles.
        scales_by_row: True if the weight has a block scale for each row and 128 elements (1 × 128), column-major, False
            if 128 rows share a block scale.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    tile_m: int
    stages: int
    pdl: bool
    has_blocks: bool = True
    is_mx: bool = False
    has_scaled_mmas: bool = False
    split_k: int = 1
    scales_by_row: bool = False
    line: ClassVar = K_TILE

    @property
    def tiles(self) -> dict[int, tuple[int, int]]:  # type: ignore[override]
        if self.has_scaled_mmas:
            return SCALED_TILES
        return MX_TILES if self.is_mx or self.scales_by_row else TILES

    @property
    def slot_bytes(self) -> int:  # type: ignore[override]
        """Bytes of a slot: for block-scaled MMAs, a word of scales for each column and each row of a tile."""
        return (TILE_N + self.tile_m) * 4 if self.has_scaled_mmas else 0

    @property
    def holds_weight(self) -> bool:  # type: ignore[override]
        """True for block-scaled MMAs, which add to the accumulators. Otherwise they would wait for each other."""
        return self.has_scaled_mmas

    def reason_unsupported(self, arch: Arch) -> str | None:
        if self.has_scaled_mmas and not (self.is_mx and arch.has_block_scaled_mma):
            return "block-scaled MMAs of FP8 need MXFP8 operands and compute capability 12.0 or 12.1"
        if self.split_k not in SPLIT_K:
            return f"split_k is {self.split_k}; it has to be one of {SPLIT_K}"
        return super().reason_unsupported(arch)


def mx_tiles(arch: Arch) -> tuple[int, ...]:
    """Return the numbers of rows of ``a`` in the tiles for MXFP8."""
    return tuple(SCALED_TILES if arch.has_block_scaled_mma else MX_TILES)


def plan(
    *,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tile_m: int,
    arch: Arch,
    pdl: bool,
    has_blocks: bool = True,
    is_mx: bool = False,
    split_k: int = 1,
    scales_by_row: bool = False,
) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none
    fits."""
    scaled = is_mx and arch.has_block_scaled_mma
    return first_fit(
        (
            Config(rows, epilogue, tile_m, stages, pdl, has_blocks, is_mx, scaled, split_k, scales_by_row)
            for stages in STAGES
        ),
        arch,
    )
