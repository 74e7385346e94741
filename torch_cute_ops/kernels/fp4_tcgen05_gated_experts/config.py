"""Configuration of the FP4 tcgen05 GEMM over experts with a gate. No device code."""

from dataclasses import dataclass
from typing import Any, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.blackwell.layouts import (
    MMA_M,
    SCALE_STAGES,
    TMEM_COLUMNS,
    BlockScaledConfig,
    BlockScaledStage,
    with_most_stages,
)
from torch_cute_ops.kernels.common.experts.gated_layouts import Arguments, GatedEpilogue
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "GatedEpilogue", "plan"]

TILES_N: Final = (64, 128, 256)
"""Supported ``tile_n``, the number of weight rows of an n tile: half gate, half up."""
BLOCK_M_TILES: Final = 8
"""Number of m tiles of a token block."""
TOKEN_BLOCK: Final = BLOCK_M_TILES * MMA_M
"""Number of tokens of a token block."""
LIST_THREADS: Final = MAX_EXPERTS
"""Number of threads of a CTA that lists touched m tiles: one for each expert that may exist."""


@dataclass(frozen=True)
class Config(BlockScaledConfig):
    """Static properties of the FP4 tcgen05 GEMM over experts with a gate. M, H, I and the number of experts are
    run-time values.

    I is a multiple of 64 and of ``tile_n / 2``. H is a multiple of 64 and, with linear scales of B elements per block,
    of 4 · B.

    Attributes:
        fmt, layout: format and scale layout of both operands.
        epilogue: epilogue of a work tile.
        tile_n: number of weight rows of an n tile.
        stages: number of stages.
        pdl: True to launch with programmatic dependent launch.
    """

    fmt: FP4Format
    layout: ScaleLayout
    epilogue: GatedEpilogue
    tile_n: int
    stages: int
    pdl: bool

    @property
    def out_columns(self) -> int:
        """Number of columns of the result that an n tile computes."""
        return self.tile_n // 2

    @property
    def stage(self) -> BlockScaledStage:
        """Layout of a pipeline stage. Gate and up are the two operands on the N side."""
        return BlockScaledStage(self.fmt, self.layout, self.out_columns, n_operands=2)

    @property
    def accumulators(self) -> int:
        columns = 2 * self.tile_n + SCALE_STAGES * self.stage.scale_columns
        return 2 if columns <= TMEM_COLUMNS else 1

    @property
    def acc_empty_barriers(self) -> int:
        return self.accumulators

    @property
    def acc_columns(self) -> int:
        return self.accumulators * self.tile_n

    @property
    def list_threads(self) -> int:
        """Number of threads of a CTA of the kernel that lists touched m tiles."""
        return LIST_THREADS

    def workspace_bytes(self, m: int, experts: int) -> int:
        """Return the size of the workspace in bytes: for each token block, the number of touched m tiles, and a list
        with room for all m tiles of all experts. The numbers of all token blocks precede the lists."""
        return 4 * -(-m // TOKEN_BLOCK) * (1 + experts * BLOCK_M_TILES)

    def reason_unfit(self) -> str | None:
        if self.tile_n not in TILES_N:
            return f"tile_n is {self.tile_n}; it has to be one of {TILES_N}"
        return self.epilogue.reason_unsupported()


def plan(*, arch: Arch, **given: Any) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    ``given`` holds the other fields of ``Config``.
    """
    return with_most_stages(lambda stages: Config(**given, stages=stages), arch)
