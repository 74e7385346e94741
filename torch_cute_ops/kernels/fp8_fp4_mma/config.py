"""Configuration of the FP8 x FP4 GEMM with mma.sync. No device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.core.layouts import Epilogue, first_fit
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, Arguments, ExpertLayout, reason_no_scale_layout
from torch_cute_ops.kernels.common.fp8.warp_layouts import STAGES, TILE_N, WarpGemmConfig
from torch_cute_ops.runtime.arch import Arch

__all__ = ["CODE_BYTES", "TILES", "TILE_N", "Arguments", "Config", "plan"]

TILES: Final = {16: (1, 8), 64: (1, 8)}
"""(Number of warps that divide the rows, number of warps that divide the columns), keyed by ``tile_m``. Each weight row
belongs to one warp, so that no row is decoded twice."""
CODE_BYTES: Final = K_TILE // 2
"""Bytes of FP4 codes in a weight row of a k tile."""


@dataclass(frozen=True)
class Config(WarpGemmConfig):
    """Static properties of the FP8 x FP4 GEMM with mma.sync.

    Attributes:
        fmt: format of the weight.
        layout: layout of the weight's block scales if ``a`` has block scales. If ``a`` has per-token scales, the
            weight's scales are prepared, and the layout is None.
        is_interleaved: True if k of ``a`` is interleaved, which is supported with per-token scales.
    """

    rows: ExpertLayout
    epilogue: Epilogue
    fmt: FP4Format
    layout: ScaleLayout | None
    tile_m: int
    stages: int
    pdl: bool
    is_interleaved: bool = False
    tiles: ClassVar = TILES
    line: ClassVar = CODE_BYTES

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        """True for block scales of ``a``, False for per-token scales."""
        return self.layout is not None

    @property
    def tile_scales(self) -> int:
        """Number of scales of a weight row in a k tile."""
        return K_TILE // self.fmt.block_size

    @property
    def units_at(self) -> int:
        """Offset of the units in a slot. The units follow the weight rows' scales, which are stored in float16, divided
        by the units."""
        return TILE_N * self.tile_scales * 2

    @property
    def a_scales_at(self) -> int:
        """Offset of the scales of ``a`` in a slot. These scales follow the units, one fp32 number per weight row."""
        return self.units_at + TILE_N * 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot. With per-token scales of ``a``, a slot contains neither units nor scales of ``a``."""
        return self.a_scales_at + self.tile_m * 4 if self.has_blocks else self.units_at

    def reason_unsupported(self, arch: Arch) -> str | None:
        if self.layout is not None:
            if self.is_interleaved:
                return "k of activations with block scales is never interleaved"
            if (reason := reason_no_scale_layout(self.layout)) is not None:
                return reason
        return super().reason_unsupported(arch)


def plan(*, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    return first_fit((Config(**given, stages=stages) for stages in STAGES), arch)
