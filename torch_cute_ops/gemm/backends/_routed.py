"""What the GEMMs share that compute only routed pairs of token and expert on Hopper."""

import functools
import math
from typing import Any

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.problem import GemmProblem, Tactic

DECODE_CLOCKS = 0.0275
TOKEN_CLOCKS = 0.0006
"""SM clocks to decode a weight, and for each token of a unit beyond eight (measured on an H200)."""
FIXED_SECONDS = 6e-6
"""Time of both kernels of a call with next to no work (measured on an H200)."""


class RoutedBackend(FP4KernelBackend):
    """A kernel that lists tokens, and one that multiplies."""

    name = "routed"

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.experts > MAX_EXPERTS:
            return f"there are {problem.experts} experts; routed takes at most {MAX_EXPERTS}"
        return None

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return True


def unit_clocks(group: Any) -> float:
    """SM clocks for a weight of a unit of ``group`` tokens."""
    return DECODE_CLOCKS + TOKEN_CLOCKS * (group - 8)


@functools.cache
def mean_units(tokens: int, share: float, group: int) -> float:
    """The mean number of units of ``group`` tokens of an expert, if each of ``tokens`` is routed to it with probability
    ``share``: the mean of ceil(X / group) for binomial X."""
    if share >= 1:
        return float(-(-tokens // group))
    odds = math.log(share) - math.log1p(-share)
    ways = [math.lgamma(tokens + 1) - math.lgamma(k + 1) - math.lgamma(tokens - k + 1) for k in range(tokens + 1)]
    chances = [math.exp(way + k * odds + tokens * math.log1p(-share)) for k, way in enumerate(ways)]
    return sum(chance * -(-k // group) for k, chance in enumerate(chances))
