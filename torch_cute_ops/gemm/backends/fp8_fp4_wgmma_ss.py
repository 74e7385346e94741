"""FP8 activations and an FP4 weight decoded to shared memory, by Hopper's warpgroup MMA, plain or grouped by rows:
``kernels/fp8_fp4_wgmma_ss``."""

from typing import Any, ClassVar

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8FP4Backend, plan_of_tile
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, has_random_rows, rows_of_expert
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp8_fp4_wgmma_ss
from torch_cute_ops.kernels.fp8_fp4_wgmma_ss import WIDE
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = {32: 730.0, 48: 815.0, 64: 900.0, 80: 1090.0, 96: 1150.0, 128: 1200.0, 256: 1080.0}
"""SM clocks per K block, by rows of ``a`` of a tile (measured on an H200; those of 80 and 96 on an H100, and of 48
between its neighbours): most of them to decode the weight, which hides transfers, and which the CTAs of a tile of 256
rows share."""
NARROW = {32: 0.73, 48: 0.66, 64: 0.6, 80: 0.55, 96: 0.55, 128: 0.57}
"""Share of these clocks that a tile of half of the rows of the weight takes (measured on an H100; that of 48 lies
between)."""
MANY_SHARED = 0.88
"""Share of these clocks that tiles of 128 rows take where two CTAs share them: for these ``MANY_SHARE_CLOCKS`` are
counted apart (measured on an H100)."""
SHARE_CLOCKS = 1500.0
SHARE_ROW_CLOCKS = 35.0
"""Clocks to add up the partial sums of a tile, per CTA that shares it but the first: fixed, and per row (measured on an
H100)."""
MANY_SHARE_CLOCKS = 7400.0
"""All that takes the same time whatever k is, of a tile of 128 rows that two CTAs share: until the first K block has
arrived, to exchange sums and to store them (measured on an H100)."""


class FP8FP4WgmmaSS(FP8FP4Backend):
    """A tactic is (rows of ``a`` in a tile, rows of the weight, CTAs that share it)."""

    name = "wgmma_ss"
    tiles: ClassVar = fp8_fp4_wgmma_ss.TILES
    block_clocks: ClassVar = BLOCK_CLOCKS
    kernel: ClassVar = fp8_fp4_wgmma_ss.KERNEL

    def plan(self, problem: GemmProblem, **given: Any) -> Any:
        """The configuration of the kernel."""
        return fp8_fp4_wgmma_ss.plan(fmt=fp4_format(problem), **given)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        rows = rows_of_expert(problem, m)
        sizes = sorted({tokens for tokens, _, _ in self.tiles})
        # By random routing most experts have less than twice as many rows as on average.
        most = 2 * rows if has_random_rows(problem) else rows
        widest = next((tokens for tokens in sizes if tokens >= most), sizes[-1])
        # Experts have tiles enough, and those with half of the rows of the weight are slower.
        return tuple(
            (tokens, columns, splits)
            for tokens, columns, splits in self.tiles
            if tokens <= widest
            and (splits == 1 or _may_share(problem, tokens, most))
            and (columns == WIDE or problem.grouping.rows.is_plain)
        )

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        tile = self.tile(tactic)
        row_bytes = problem.b.row_bytes(K_TILE)
        clocks = self.block_clocks[tile.tile_m] * (1.0 if tile.tile_n == WIDE else NARROW[tile.tile_m])
        share_clocks = SHARE_CLOCKS + SHARE_ROW_CLOCKS * tile.tile_m
        if tile.tile_m == MANY and tile.split_k > 1:
            clocks, share_clocks = MANY_SHARED * clocks, MANY_SHARE_CLOCKS
        return tile.seconds(problem, m, target, clocks, 0.0, row_bytes, share_clocks)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        given = plan_of_tile(problem, self.tile(tactic), arch)
        return (KernelSpec(self.kernel, self.plan(problem, layout=weight_scales(problem), **given)),)

    def tile(self, tactic: Tactic) -> Tile:
        tokens, columns, splits = map(int, tactic)
        return Tile(tokens, columns, splits, cluster_m=2 if tokens == fp8_fp4_wgmma_ss.PAIR else 1)


def _may_share(problem: GemmProblem, tokens: int, rows: int) -> bool:
    """Whether CTAs may share tiles of so many rows of ``a``, where there are ``rows``. Each tile of rows reads the
    weight again: shared tiles of 128 rows pay for two of them, smaller ones for one. Experts have tiles enough."""
    if tokens < MANY:
        return rows <= tokens
    return rows <= 2 * tokens and problem.grouping.rows.is_plain
