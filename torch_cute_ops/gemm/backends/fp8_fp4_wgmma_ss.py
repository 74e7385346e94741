"""GEMMs of FP8 activations and an FP4 weight, by Hopper's wgmma: ``kernels/fp8_fp4_wgmma_ss``.

The weight is decoded to shared memory. The GEMM may be plain or have experts over rows."""

import itertools
from typing import Any, ClassVar

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8FP4Backend, FP8Tactic, plan_of_tile
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, has_random_rows, rows_of_expert
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_wgmma_ss
from torch_cute_ops.kernels.fp8_fp4_wgmma_ss import WIDE
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

BLOCK_CLOCKS = {32: 730.0, 48: 815.0, 64: 900.0, 80: 1090.0, 96: 1150.0, 128: 1200.0, 256: 1080.0}
"""SM clocks per k tile, keyed by ``tile_m``. They were measured on an H200, or for 80 and 96 rows on an H100. The value
for 48 rows is interpolated.

Decoding the weight takes most of the clocks and hides transfers. The two CTAs of a tile of 256 rows share this work."""
NARROW = {32: 0.73, 48: 0.66, 64: 0.6, 80: 0.55, 96: 0.55, 128: 0.57}
"""Factor on ``BLOCK_CLOCKS`` for tiles with half of the columns, keyed by ``tile_m`` (measured on an H100; 48 is
interpolated)."""
MANY_SHARED = 0.88
"""Factor on ``BLOCK_CLOCKS`` for tiles of 128 rows that two CTAs share. ``MANY_SHARE_CLOCKS`` are added (measured on an
H100)."""
SHARE_CLOCKS = 1500.0
SHARE_ROW_CLOCKS = 35.0
"""SM clocks to add the partial sums of a tile, for each CTA of the cluster after the first: fixed clocks, and clocks
per row (measured on an H100)."""
MANY_SHARE_CLOCKS = 7400.0
"""SM clocks of a tile of 128 rows that two CTAs share, apart from the k tiles: until the first k tile arrives, to
exchange partial sums, and to store (measured on an H100)."""


class FP8FP4WgmmaSS(FP8FP4Backend):
    """Backend whose kernel decodes the weight to FP8 in shared memory."""

    name = "wgmma_ss"
    tiles: ClassVar = fp8_fp4_wgmma_ss.TILES
    block_clocks: ClassVar = BLOCK_CLOCKS
    kernel: ClassVar = fp8_fp4_wgmma_ss.KERNEL

    def plan(self, problem: GemmProblem, **given: Any) -> Any:
        """Return the configuration of the kernel for these tile sizes, or None if the kernel does not fit on an SM."""
        return fp8_fp4_wgmma_ss.plan(fmt=fp4_format(problem), **given)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8Tactic, ...]:
        rows = rows_of_expert(problem, m)
        sizes = sorted({tile_m for tile_m, _, _ in self.tiles})
        # With random routing, most experts own less than twice the mean number of rows.
        most = 2 * rows if has_random_rows(problem) else rows
        widest = next((tile_m for tile_m in sizes if tile_m >= most), sizes[-1])
        # With experts, the tiles keep all SMs busy. So the slower tiles with half of the columns are not needed.
        return tuple(
            tactic
            for tactic in itertools.starmap(FP8Tactic, self.tiles)
            if tactic.tile_m <= widest
            and (tactic.split_k == 1 or _may_split(problem, tactic.tile_m, most))
            and (tactic.tile_n == WIDE or problem.grouping.rows.is_plain)
        )

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8Tactic, target: Target) -> float:
        tile = self.tile(tactic)
        row_bytes = problem.b.row_bytes(K_TILE)
        clocks = self.block_clocks[tile.tile_m] * (1.0 if tile.tile_n == WIDE else NARROW[tile.tile_m])
        share_clocks = SHARE_CLOCKS + SHARE_ROW_CLOCKS * tile.tile_m
        if tile.tile_m == MANY and tile.split_k > 1:
            clocks, share_clocks = MANY_SHARED * clocks, MANY_SHARE_CLOCKS
        return tile.seconds(problem, m, target, clocks, 0.0, row_bytes, share_clocks)

    def kernels(self, problem: GemmProblem, tactic: FP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        given = plan_of_tile(problem, self.tile(tactic), arch)
        return (KernelSpec(self.kernel, self.plan(problem, layout=weight_scales(problem), **given)),)

    def tile(self, tactic: FP8Tactic) -> Tile:
        return Tile(*tactic, cluster_m=2 if tactic.tile_m == fp8_fp4_wgmma_ss.PAIR else 1)


def _may_split(problem: GemmProblem, tile_m: int, rows: int) -> bool:
    """Return True if CTAs may split the K of tiles of ``tile_m`` rows.

    Each m tile reads the weight again. Splitting K makes a GEMM faster for up to two m tiles of 128 rows, or one
    smaller m tile. GEMMs with experts have enough tiles for all SMs without splitting K.
    """
    if tile_m < MANY:
        return rows <= tile_m
    return rows <= 2 * tile_m and problem.grouping.rows.is_plain
