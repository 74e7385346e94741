"""FP8 GEMMs with block scales by ``mma.sync``, plain or grouped by rows, on every GPU: ``kernels/fp8_mma``."""

import math
from typing import NamedTuple

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_mma
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = 340.0
MACS_PER_CLOCK = 3400.0
"""Fixed SM clocks per 128-wide K block, and multiply-adds per SM and clock beyond them (a guess, not measured)."""
CTAS_PER_SM = 2


class FP8MmaTactic(NamedTuple):
    """Tactic of ``FP8MmaSync``.

    Attributes:
        tile_m: rows of ``a`` in a tile.
    """

    tile_m: int


class FP8MmaSync(FP8Backend):
    """Backend for every GPU that multiplies with ``mma.sync``."""

    name = "mma_sync"
    tactic_type = FP8MmaTactic

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8MmaTactic, ...]:
        return tuple(map(FP8MmaTactic, fp8_mma.TILES))

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> float:
        if target.arch is not None and target.arch.has_wgmma:
            # Warpgroup MMA is faster at any size. The estimates of this backend are guesses, and must not compete with
            # measured estimates of warpgroup MMA.
            return math.inf
        tile = self.tile(tactic)
        clocks = BLOCK_CLOCKS + tile.tile_m * tile.tile_n * K_TILE / MACS_PER_CLOCK
        return tile.seconds(problem, m, target, clocks, 0.0)

    def kernels(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> tuple[KernelSpec, ...]:
        config = fp8_mma.plan(
            rows=problem.grouping.rows, epilogue=problem.epilogue, tile_m=tactic.tile_m, arch=arch, pdl=settings.PDL
        )
        return (KernelSpec(fp8_mma.KERNEL, config),)

    def tile(self, tactic: FP8MmaTactic) -> Tile:
        return Tile(tactic.tile_m, fp8_mma.TILE_N, ctas_per_sm=CTAS_PER_SM)
