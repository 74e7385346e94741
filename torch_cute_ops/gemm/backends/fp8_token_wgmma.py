"""FP8 GEMMs with per-token and per-channel scales by Hopper's warpgroup MMA: ``kernels/fp8_token_wgmma``."""

import itertools

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Tactic, FP8TokenBackend, plan_of_tile
from torch_cute_ops.gemm.backends.fp8_wgmma import FEW_WAIT, ONE_GROUP, READ_AGAIN, SHARE_CLOCKS, WAIT
from torch_cute_ops.gemm.decode import reason_no_wgmma
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, rows_of_expert
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_token_wgmma
from torch_cute_ops.kernels.fp8_token_wgmma import MANY
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

FEW_K_TILE_CLOCKS = 150.0
FEW_ROW_CLOCKS = 4.8
"""SM clocks per k tile for tiles of up to 64 rows: fixed clocks, and clocks per row (measured on an H200)."""
K_TILE_CLOCKS = 205.0
COLUMN_CLOCKS = 4.3
"""SM clocks per k tile for tiles of 128 rows: fixed clocks, and clocks per column, of which tensor cores take 4 (fitted
to calls with 256 and 4,096 rows on an H200)."""


class FP8TokenWgmma(FP8TokenBackend):
    """Backend for FP8 operands without block scales, on Hopper."""

    name = "wgmma"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_wgmma(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8Tactic, ...]:
        rows, is_plain = rows_of_expert(problem, m), problem.grouping.rows.is_plain
        useful = [
            tactic
            for tactic in itertools.starmap(FP8Tactic, fp8_token_wgmma.TILES)
            if (rows > MANY // 4 if tactic.tile_m == MANY else rows <= 4 * MANY)
            and (tactic.tile_m == MANY or tactic.tile_n == K_TILE or is_plain)
            and (tactic.split_k == 1 or rows <= tactic.tile_m)
        ]
        # Among tactics with equal estimates, the caller chooses the first. So sort by rows (fewest first), then by tile
        # width (widest first), then by CTAs (fewest first).
        return tuple(sorted(useful, key=lambda tactic: (tactic.tile_m, -tactic.tile_n, tactic.split_k)))

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8Tactic, target: Target) -> float:
        tile = self.tile(tactic)
        if tile.tile_m < MANY:
            clocks = FEW_K_TILE_CLOCKS + FEW_ROW_CLOCKS * tile.tile_m * tile.tile_n / K_TILE
            return tile.seconds(problem, m, target, clocks, FEW_WAIT, share_clocks=SHARE_CLOCKS, read_again=READ_AGAIN)
        clocks = K_TILE_CLOCKS + COLUMN_CLOCKS * tile.tile_n
        if rows_of_expert(problem, m) <= MANY // 2:
            clocks *= ONE_GROUP
        return tile.seconds(problem, m, target, clocks, WAIT)

    def kernels(self, problem: GemmProblem, tactic: FP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        given = plan_of_tile(problem, self.tile(tactic), arch)
        given["epilogue"] = self.epilogue(problem)
        config = fp8_token_wgmma.plan(**given, fast_accum=problem.fast_accum)
        return (KernelSpec(fp8_token_wgmma.KERNEL, config),)

    def tile(self, tactic: FP8Tactic) -> Tile:
        return Tile(*tactic)
