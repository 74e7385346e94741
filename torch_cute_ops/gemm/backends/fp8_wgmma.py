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
"""Fixed SM clocks per 128-wide K block, for tiles of 128 rows (fitted to tiles of 64 and 128 columns on an H200)."""
MACS_PER_CLOCK = 5600.0
"""Multiply-adds per SM and clock beyond those, for tiles of 128 rows (the same fit, not the tensor cores' rate)."""
ONE_GROUP = 0.69
"""Share of these clocks that a tile takes where one warpgroup has all rows (measured on an H200)."""
FEW_BLOCK_CLOCKS = 225.0
FEW_ROW_CLOCKS = 4.8
"""SM clocks per K block for tiles of fewer rows: fixed, and per row (measured on an H200)."""
WAIT = 0.345
FEW_WAIT = 0.5
"""Share of a K block's transfer time that the MMAs wait for it, for tiles of 128 rows and of fewer (measured on an
H200)."""
READ_AGAIN = 0.2
"""Share of the weight that is read once more by tiles of fewer rows side by side, however many, in a layer, where CTAs
do not start together (measured on an H100: gate and up of a 70B take 200 µs for 32 rows by two tiles of 16, and 169 for
64 rows by one tile of 64)."""
SHARE_CLOCKS = 1500.0
"""Clocks to add up the partial sums of a tile, per CTA that shares it but the first (measured on an H100)."""


class FP8Wgmma(FP8Backend):
    """A tactic is (rows of ``a`` in a tile, rows of ``b``, CTAs that share it)."""

    name = "wgmma"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_wgmma(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        rows = rows_of_expert(problem, m)
        # CTAs that share a tile beside others of the same columns read the weight more than once: 10 % slower. Experts
        # have tiles enough, so that those with few rows of both gain nothing.
        useful = [
            (tokens, columns, splits)
            for tokens, columns, splits in fp8_wgmma.TILES
            if (rows > MANY // 4 if tokens == MANY else columns == K_TILE or problem.grouping.rows.is_plain)
            and (splits == 1 or rows <= tokens)
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
        tokens, columns, splits = map(int, tactic)
        return Tile(tokens, columns, splits)


def many_rows_seconds(tile: Tile, problem: GemmProblem, m: int, target: Target) -> float:
    """Time of a call in tiles of 128 rows of ``a``."""
    clocks = BLOCK_CLOCKS + tile.tile_m * tile.tile_n * K_TILE / MACS_PER_CLOCK
    if rows_of_expert(problem, m) <= MANY // 2:
        clocks *= ONE_GROUP
    return tile.seconds(problem, m, target, clocks, WAIT)
