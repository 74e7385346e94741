"""GEMMs of FP8 matrices with block scales by Hopper's wgmma, plain or grouped by rows: ``kernels/fp8_wgmma``."""

import itertools

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend, FP8Tactic, plan_of_tile
from torch_cute_ops.gemm.decode import reason_no_wgmma
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, rows_of_expert
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = 314.0
"""Fixed SM clocks per k tile, for tiles of 128 rows (fitted to tiles of 64 and 128 columns on an H200)."""
MACS_PER_CLOCK = 5600.0
"""Multiply-adds per SM and clock, in addition to the fixed clocks, for tiles of 128 rows (from the same fit; this is
not the tensor cores' rate)."""
ROW_SCALE_CLOCKS = 2.3
"""SM clocks per k tile and column, in addition, to multiply by block scales of each weight row, for tiles of 128 rows
(measured on an H200)."""
ONE_GROUP = 0.69
"""Factor on the clocks of a k tile if a single warpgroup computes all rows of a tile (measured on an H200)."""
FEW_BLOCK_CLOCKS = 225.0
FEW_ROW_CLOCKS = 4.8
"""SM clocks per k tile for tiles of fewer than 128 rows: fixed clocks, and clocks per row (measured on an H200)."""
WAIT = 0.345
FEW_WAIT = 0.5
"""Fraction of a k tile's transfer time during which the MMAs wait: for tiles of 128 rows, and for smaller tiles
(measured on an H200)."""
READ_AGAIN = 0.2
"""Fraction of the weight that is read a second time if several small m tiles run at the same time. It applies in a
layer, where CTAs do not start together.

On an H100, gate and up of a 70B model take 200 µs for 32 rows in two tiles of 16, and 169 µs for 64 rows in one tile.
"""
SHARE_CLOCKS = 1500.0
"""SM clocks to add the partial sums of a tile, for each CTA of the cluster after the first (measured on an H100)."""


class FP8Wgmma(FP8Backend):
    """Backend for FP8 activations and an FP8 weight, both with block scales."""

    name = "wgmma"
    takes_row_scales = True

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_wgmma(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8Tactic, ...]:
        rows, is_plain = rows_of_expert(problem, m), problem.grouping.rows.is_plain
        # If CTAs split K and several m tiles run at the same time, the weight is read more than once, and the GEMM is
        # 10 % slower. With experts, the tiles keep all SMs busy, so narrow tiles of few rows do not speed up the GEMM.
        useful = [
            tactic
            for tactic in itertools.starmap(FP8Tactic, fp8_wgmma.TILES)
            if (rows > MANY // 4 if tactic.tile_m == MANY else tactic.tile_n == K_TILE or is_plain)
            and (tactic.split_k == 1 or rows <= tactic.tile_m)
        ]
        # Among tactics with equal estimates, the caller chooses the first. So sort by rows (fewest first), then by tile
        # width (widest first), then by CTAs (fewest first).
        return tuple(sorted(useful, key=lambda tactic: (tactic.tile_m, -tactic.tile_n, tactic.split_k)))

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8Tactic, target: Target) -> float:
        tile = self.tile(tactic)
        if tile.tile_m < MANY:
            clocks = FEW_BLOCK_CLOCKS + FEW_ROW_CLOCKS * tile.tile_m * tile.tile_n / K_TILE
            return tile.seconds(problem, m, target, clocks, FEW_WAIT, share_clocks=SHARE_CLOCKS, read_again=READ_AGAIN)
        return many_rows_seconds(tile, problem, m, target)

    def kernels(self, problem: GemmProblem, tactic: FP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        given = plan_of_tile(problem, self.tile(tactic), arch)
        scales = "rows" if problem.b.scales_by_row else "blocks"
        return (KernelSpec(fp8_wgmma.KERNEL, fp8_wgmma.plan(**given, weight_scales=scales)),)

    def tile(self, tactic: FP8Tactic) -> Tile:
        return Tile(*tactic)


def many_rows_seconds(tile: Tile, problem: GemmProblem, m: int, target: Target) -> float:
    """Estimate the seconds that a call takes if its tiles have 128 rows of ``a``."""
    clocks = BLOCK_CLOCKS + tile.tile_m * tile.tile_n * K_TILE / MACS_PER_CLOCK
    if problem.b.scales_by_row:
        clocks += ROW_SCALE_CLOCKS * tile.tile_n
    if rows_of_expert(problem, m) <= MANY // 2:
        clocks *= ONE_GROUP
    return tile.seconds(problem, m, target, clocks, WAIT)
