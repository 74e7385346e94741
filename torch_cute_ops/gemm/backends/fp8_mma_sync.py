"""FP8 GEMMs with block scales by ``mma.sync``, plain or grouped by rows, on every GPU: ``kernels/fp8_mma``."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend, epilogue_of_token_scales, has_token_scales
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.kernels import fp8_mma
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = 340.0
MACS_PER_CLOCK = 3400.0
"""Fixed SM clocks per k tile of 128 elements, and additional multiply-adds per SM and clock (guesses, not measured)."""
CTAS_PER_SM = 2


class FP8MmaTactic(NamedTuple):
    """Tactic of ``FP8MmaSync``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
    """

    tile_m: int


class FP8MmaSync(FP8Backend):
    """Backend that multiplies with ``mma.sync``, on every GPU."""

    name = "mma_sync"
    tactic_type = FP8MmaTactic

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8MmaTactic, ...]:
        return tuple(map(FP8MmaTactic, fp8_mma.TILES))

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> float:
        if target.arch is not None and (target.arch.has_wgmma or target.arch.has_tcgen05):
            # wgmma is faster at any size. This backend's estimates are guesses. They must not be compared with the
            # estimates for wgmma, which are fitted to measurements. On data-center Blackwell, FP8 mma.sync is executed
            # as 16-bit MMAs, at a small fraction of the rate of tcgen05.
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


class FP8TokenMmaSync(FP8MmaSync):
    """Backend for GEMMs over experts with per-token and per-channel scales. It calls the kernel for block scales.

    The scale of a row is repeated for all its blocks of K. The block scales of the weight are 1. The per-channel scales
    are passed as the kernel's ``alpha``.
    """

    def handles(self, problem: GemmProblem) -> bool:
        return has_token_scales(problem) and problem.grouping.over == "rows"

    def kernels(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return super().kernels(with_block_scales(problem), tactic, arch)

    def launcher(self, problem: GemmProblem, tactic: FP8MmaTactic, target: Target) -> Launch:
        launch_blocks = FP8MmaSync().launcher(with_block_scales(problem), tactic, target)
        blocks, tiles = FP8_BLOCK128.scales_per_row(problem.k), -(-problem.n // FP8_BLOCK128.block_size)

        def launch(given: Operands, out: torch.Tensor) -> None:
            assert given.a_scale is not None
            columns = given.a_scale.t().expand(blocks, -1).contiguous()
            a_scale = columns.view(blocks, *given.a.shape[:-1]).movedim(0, -1)
            ones = columns.new_ones(problem.experts, tiles, blocks)
            launch_blocks(given._replace(a_scale=a_scale, b_scale=ones, alpha=given.b_scale), out)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: FP8MmaTactic) -> bool:
        return False


def with_block_scales(problem: GemmProblem) -> GemmProblem:
    """Return an equivalent problem with block scales, in which ``alpha`` holds the per-channel scales."""
    epilogue = epilogue_of_token_scales(problem)
    return replace(problem, a=Operand(FP8_BLOCK128, COLUMN), b=Operand(FP8_BLOCK128), epilogue=epilogue)
