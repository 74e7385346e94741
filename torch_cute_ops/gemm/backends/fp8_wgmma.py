"""FP8 GEMMs with block scales by Hopper's warpgroup MMA, plain or grouped by rows: ``kernels/fp8_wgmma``."""

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend, plan_of_tile
from torch_cute_ops.gemm.decode import reason_no_wgmma
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, rows_of_expert
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = 314.0
"""Fixed SM clocks per k tile, for tiles of 128 rows (fitted to tile_n 64 and 128 on an H200)."""
MACS_PER_CLOCK = 5600.0
"""Multiply-adds per SM and further clock, for tiles of 128 rows (from the same fit; not the tensor cores' rate)."""
ONE_GROUP = 0.69
"""Factor on these clocks if one warpgroup owns all rows of a tile (measured on an H200)."""
FEW_BLOCK_CLOCKS = 225.0
FEW_ROW_CLOCKS = 4.8
"""SM clocks per k tile for tiles of fewer rows: fixed, and per row (measured on an H200)."""
WAIT = 0.345
FEW_WAIT = 0.5
"""Share of a k tile's transfer time that the MMAs wait for it, for tiles of 128 rows and of fewer rows (measured on
an H200)."""
READ_AGAIN = 0.2
"""Share of the weight that is read from memory again if several row tiles of fewer rows run side by side, for any
number of row tiles: in a layer, CTAs do not start together. On an H100, gate and up of a 70B model take 200 µs for
32 rows in two tiles of 16, and 169 µs for 64 rows in one tile of 64."""
SHARE_CLOCKS = 1500.0
"""Clocks to add up the partial sums of a tile, for each CTA that shares it except the first (measured on an H100)."""


class FP8Wgmma(FP8Backend):
    """Tactics are (tile_m, tile_n, split_k)."""

    name = "wgmma"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_wgmma(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        rows = rows_of_expert(problem, m)
        # With several row tiles, split-K reads the weight more than once: 10 % slower. Experts give enough tiles, so
        # that tiles with 64 weight rows gain nothing.
        useful = [
            (tile_m, tile_n, split_k)
            for tile_m, tile_n, split_k in fp8_wgmma.TILES
            if (rows > MANY // 4 if tile_m == MANY else tile_n == K_TILE or problem.grouping.rows.is_plain)
            and (split_k == 1 or rows <= tile_m)
        ]
        # Among equal estimates the first is taken: the fewest rows, the widest tile, the fewest CTAs.
        return tuple(sorted(useful, key=lambda tile: (tile[0], -tile[1], tile[2])))

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        tile = self.tile(tactic)
        if tile.tile_m < MANY:
            clocks = FEW_BLOCK_CLOCKS + FEW_ROW_CLOCKS * tile.tile_m * tile.tile_n / K_TILE
            return tile.seconds(problem, m, target, clocks, FEW_WAIT, share_clocks=SHARE_CLOCKS, read_again=READ_AGAIN)
        return many_rows_seconds(tile, problem, m, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(fp8_wgmma.KERNEL, fp8_wgmma.plan(**plan_of_tile(problem, self.tile(tactic), arch))),)

    def tile(self, tactic: Tactic) -> Tile:
        return Tile(*map(int, tactic))


def many_rows_seconds(tile: Tile, problem: GemmProblem, m: int, target: Target) -> float:
    """Estimate the time of a call in tiles of 128 rows of ``a``."""
    clocks = BLOCK_CLOCKS + tile.tile_m * tile.tile_n * K_TILE / MACS_PER_CLOCK
    if rows_of_expert(problem, m) <= MANY // 2:
        clocks *= ONE_GROUP
    return tile.seconds(problem, m, target, clocks, WAIT)
