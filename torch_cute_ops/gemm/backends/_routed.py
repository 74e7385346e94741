"""Code that the two Hopper backends for routed (token, expert) pairs share."""

import functools
import math

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.problem import GemmProblem, Tactic

DECODE_CLOCKS = 0.0275
TOKEN_CLOCKS = 0.0006
"""SM clocks to decode one weight element, and additional clocks per weight element for each row of an m tile beyond
eight (measured on an H200)."""
FIXED_SECONDS = 6e-6
"""Time in seconds of a call's two kernels with almost no work (measured on an H200)."""


class RoutedBackend(FP4KernelBackend):
    """Base class of backends with two kernels: the first lists the tokens of each expert, the second multiplies."""

    name = "routed"

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.experts > MAX_EXPERTS:
            return f"there are {problem.experts} experts; routed takes at most {MAX_EXPERTS}"
        return None

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return True


def clocks_per_weight(tile_m: int) -> float:
    """Return the SM clocks to decode one weight element and multiply it with an m tile of ``tile_m`` rows."""
    return DECODE_CLOCKS + TOKEN_CLOCKS * (tile_m - 8)


@functools.cache
def mean_m_tiles(tokens: int, probability: float, tile_m: int) -> float:
    """Return the mean number of m tiles of an expert to which each token is routed with this probability.

    The result is the mean of ceil(X / tile_m) for a binomial random variable X.
    """
    if probability >= 1:
        return float(-(-tokens // tile_m))
    odds = math.log(probability) - math.log1p(-probability)
    ways = [math.lgamma(tokens + 1) - math.lgamma(k + 1) - math.lgamma(tokens - k + 1) for k in range(tokens + 1)]
    chances = [math.exp(way + k * odds + tokens * math.log1p(-probability)) for k, way in enumerate(ways)]
    return sum(chance * -(-k // tile_m) for k, chance in enumerate(chances))
