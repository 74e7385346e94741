"""Tiles of FP8 GEMMs, whose rows may belong to experts: how many a call has, and how long they take."""

import math
from functools import cache
from typing import Final, NamedTuple

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH
from torch_cute_ops.runtime.arch import CLOCK_HZ

BLOCK: Final = 128
"""Elements of k that share a scale."""


class Tile(NamedTuple):
    """A tile of the result.

    Attributes:
        tokens, columns: rows of ``a`` and of the weight.
        splits: CTAs of a cluster that share it, each with a part of k.
        ctas_per_sm: CTAs that share an SM.
        row_ctas: CTAs of a cluster, each of which has a part of the rows.
    """

    tokens: int
    columns: int
    splits: int = 1
    ctas_per_sm: int = 1
    row_ctas: int = 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.splits * self.row_ctas

    def clusters(self, sms: int) -> int:
        """Clusters that run at once."""
        return cost.places(sms * self.ctas_per_sm, self.cluster) // self.cluster

    def tiles_of(self, problem: GemmProblem, m: int) -> float:
        """Tiles of a call. Where nothing is known of the rows of each expert but their sum, the expectation under
        random routing; elsewhere as many as equally many rows for each expert take."""
        if has_random_rows(problem):
            of_expert = expected_tiles(m / problem.experts, self.tokens)
        else:
            of_expert = -(-rows_of_expert(problem, m) // self.tokens)
        return problem.experts * of_expert * -(-problem.n // self.columns)

    def seconds(
        self,
        problem: GemmProblem,
        m: int,
        target: Target,
        block_clocks: float,
        wait: float,
        row_bytes: float = BLOCK,
        share_clocks: float = 0.0,
        read_again: float = 0.0,
    ) -> float:
        """Time of a call, by a model of operations, bytes and waves.

        Args:
            problem, m, target: the call.
            block_clocks: SM clocks of a K block whose operands have arrived.
            wait: share of a K block's transfer time that the MMAs wait for it.
            row_bytes: bytes of a row of the weight in a K block.
            share_clocks: to add up the partial sums of a tile, per CTA that shares it but the first.
            read_again: share of the weight that is read from memory once more where row tiles run side by side.
        """
        # The weight is read from memory at least once. Row tiles that run side by side share it, and the SMs that read
        # share the bandwidth.
        tiles = self.tiles_of(problem, m)
        beside = min(-(-rows_of_expert(problem, m) // self.tokens), RASTER_WIDTH)
        readers = min(1.0, tiles * self.cluster / target.sms)
        bytes_per_clock = cost.bytes_per_second(target) / target.sms / CLOCK_HZ
        reads = 1.0 if beside == 1 else 1.0 + read_again
        from_memory = readers * self.columns / self.row_ctas * row_bytes * reads / beside / bytes_per_clock
        waves = math.ceil(tiles / self.clusters(target.sms))
        block = max(from_memory, block_clocks + wait * from_memory)
        clocks = waves * problem.k / BLOCK / self.splits * block + waves * share_clocks * (self.splits - 1)
        return clocks / CLOCK_HZ


def rows_of_expert(problem: GemmProblem, m: int) -> int:
    """Rows that an expert is assumed to have: all that it has room for, or an equal share."""
    return m if problem.grouping.rows.is_masked else -(-m // problem.experts)


def has_random_rows(problem: GemmProblem) -> bool:
    """Whether nothing is known of the rows of each expert but their sum, so that random routing is assumed."""
    layout = problem.grouping.rows
    return layout.has_offsets and not layout.has_counts


@cache
def expected_tiles(mean: float, tokens: int) -> float:
    """Tiles of ``tokens`` rows that an expert with a Poisson-distributed number of rows takes on average: the sum over
    i of ``P(rows > i · tokens)``, behind the first by the normal distribution with continuity correction."""
    tiles = 1 - math.exp(-mean)
    for first in range(tokens, math.ceil(mean + 6 * math.sqrt(mean)) + 1, tokens):
        tiles += math.erfc((first + 0.5 - mean) / math.sqrt(2 * mean)) / 2
    return tiles
