"""Cost model of FP8 GEMMs, with and without experts over rows: the number of tiles of a call, and their time."""

import math
from functools import cache
from typing import Final, NamedTuple

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH
from torch_cute_ops.runtime.arch import CLOCK_HZ

K_TILE: Final = 128
"""Number of elements along K in a step of the main loop. These elements share a scale."""


class Tile(NamedTuple):
    """Sizes of a tile of the result, and the CTAs that compute it.

    Attributes:
        tile_m, tile_n: numbers of rows of ``a`` and of the weight.
        split_k: number of CTAs of a cluster among which K of a tile is divided.
        ctas_per_sm: number of CTAs that share an SM.
        cluster_m: number of CTAs of a cluster among which the rows of a tile are divided equally.
    """

    tile_m: int
    tile_n: int
    split_k: int = 1
    ctas_per_sm: int = 1
    cluster_m: int = 1

    @property
    def cluster(self) -> int:
        """Number of CTAs of a cluster."""
        return self.split_k * self.cluster_m

    def clusters(self, sms: int) -> int:
        """Return the number of clusters that run at the same time on a GPU with ``sms`` SMs."""
        return cost.places(sms * self.ctas_per_sm, self.cluster) // self.cluster

    def tiles_of(self, problem: GemmProblem, m: int) -> float:
        """Return the number of tiles of a call.

        If only the sum of the experts' rows is known, return the expected number with random routing. Otherwise return
        the number for experts with equal numbers of rows.
        """
        if has_random_rows(problem):
            of_expert = expected_tiles(m / problem.experts, self.tile_m)
        else:
            of_expert = -(-rows_of_expert(problem, m) // self.tile_m)
        return problem.experts * of_expert * -(-problem.n // self.tile_n)

    def seconds(
        self,
        problem: GemmProblem,
        m: int,
        target: Target,
        k_tile_clocks: float,
        wait: float,
        row_bytes: float = K_TILE,
        share_clocks: float = 0.0,
        read_again: float = 0.0,
    ) -> float:
        """Estimate the time of a call from its operations, bytes and waves.

        Args:
            problem, m, target: problem, number of rows, and device of the call.
            k_tile_clocks: SM clocks that the MMAs of a k tile take after the operands arrive.
            wait: fraction of a k tile's transfer time that is added to ``k_tile_clocks``, because the MMAs wait for the
                operands.
            row_bytes: bytes of one weight row in a k tile.
            share_clocks: SM clocks to add the partial sums of one more CTA of the cluster to a tile.
            read_again: fraction of the weight that is read from memory a second time if several m tiles run at the same
                time.
        """
        # The weight is read from memory at least once. M tiles that run at the same time share one read of the weight.
        # All SMs that read share the bandwidth.
        tiles = self.tiles_of(problem, m)
        side_by_side = min(-(-rows_of_expert(problem, m) // self.tile_m), RASTER_WIDTH)
        readers = min(1.0, tiles * self.cluster / target.sms)
        bytes_per_clock = cost.bytes_per_second(target) / target.sms / CLOCK_HZ
        reads = 1.0 if side_by_side == 1 else 1.0 + read_again
        from_memory = readers * self.tile_n / self.cluster_m * row_bytes * reads / side_by_side / bytes_per_clock
        waves = math.ceil(tiles / self.clusters(target.sms))
        k_tile = max(from_memory, k_tile_clocks + wait * from_memory)
        clocks = waves * problem.k / K_TILE / self.split_k * k_tile + waves * share_clocks * (self.split_k - 1)
        return clocks / CLOCK_HZ


def rows_of_expert(problem: GemmProblem, m: int) -> int:
    """Return the number of rows that each expert is assumed to own: its part of a masked buffer, or an equal share of
    the rows."""
    return m if problem.grouping.rows.is_masked else -(-m // problem.experts)


def has_random_rows(problem: GemmProblem) -> bool:
    """Return True if only the sum of the experts' rows is known. Estimates then assume random routing."""
    layout = problem.grouping.rows
    return layout.has_offsets and not layout.has_counts


@cache
def expected_tiles(mean: float, tile_m: int) -> float:
    """Return the mean number of tiles of an expert whose number of rows is Poisson-distributed with mean ``mean``.

    The result is the sum over i of ``P(rows > i * tile_m)``. From the second term on, the probability is approximated
    by the normal distribution with continuity correction.
    """
    tiles = 1 - math.exp(-mean)
    for first in range(tile_m, math.ceil(mean + 6 * math.sqrt(mean)) + 1, tile_m):
        tiles += math.erfc((first + 0.5 - mean) / math.sqrt(2 * mean)) / 2
    return tiles
