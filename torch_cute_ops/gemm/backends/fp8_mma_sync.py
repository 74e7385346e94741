"""FP8 GEMMs with block scales by ``mma.sync``, plain or grouped by rows, on every GPU: ``kernels/fp8_mma``."""

import math

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp8_mma
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = 340.0
MACS_PER_CLOCK = 3400.0
"""Fixed SM clocks per k tile, and multiply-adds per SM and further clock (guesses, not measured)."""
CTAS_PER_SM = 2


class FP8MmaSync(FP8Backend):
    """Tactics are (tile_m,)."""

    name = "mma_sync"

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return tuple((tile_m,) for tile_m in fp8_mma.TILES)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        if target.arch is not None and target.arch.has_wgmma:
            # Warpgroup MMA is faster at any size, and these guesses must not compete with its measured figures.
            return math.inf
        tile = self.tile(tactic)
        clocks = BLOCK_CLOCKS + tile.tile_m * tile.tile_n * K_TILE / MACS_PER_CLOCK
        return tile.seconds(problem, m, target, clocks, 0.0)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        (tile_m,) = map(int, tactic)
        config = fp8_mma.plan(
            rows=problem.grouping.rows, epilogue=problem.epilogue, tile_m=tile_m, arch=arch, pdl=settings.PDL
        )
        return (KernelSpec(fp8_mma.KERNEL, config),)

    def tile(self, tactic: Tactic) -> Tile:
        (tile_m,) = map(int, tactic)
        return Tile(tile_m, fp8_mma.TILE_N, ctas_per_sm=CTAS_PER_SM)
