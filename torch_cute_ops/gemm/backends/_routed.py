"""Code that the two backends for routed (token, expert) pairs share.

On Hopper the estimates use measurements. The kernels were never run on other GPUs. For these GPUs, the estimates use
data sheets, and Hopper's measurements for everything that data sheets do not give.
"""

import functools
import math

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.cost import TENSOR_CORE_EFFICIENCY, overlapped
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch

DECODE_CLOCKS = 0.0275
TOKEN_CLOCKS = 0.0006
"""SM clocks to decode one weight element, and additional clocks per weight element for each row of an m tile after the
eighth row (measured on an H200)."""
WARP_MMA_FLOPS_PER_CLOCK = 2048.0
"""Highest assumed rate of mma.sync with 16-bit operands, FLOP per SM and clock: the rate of an A100, by its data sheet.
The data sheets of data-center Blackwell give only the rate of tcgen05."""
SMEM_BYTES_PER_CLOCK = 128.0
"""Bandwidth of an SM's shared memory, bytes per clock (CUDA C++ Programming Guide, "Shared Memory": 32 banks of 4
bytes)."""
CODE_BYTES = 0.5625
"""Bytes that a warp reads from shared memory for each FP4 element that it multiplies undecoded: half a byte of codes,
and one scale byte for 16 elements."""
HALF_K_TILE_SLOWDOWN = 1.2
"""Factor by which a call takes longer if k tiles have half the width (measured on an H200 with the second GEMM)."""
FIXED_SECONDS = 6e-6
"""Time in seconds of a call's two kernels with almost no work (measured on an H200)."""


class RoutedBackend(FP4KernelBackend):
    """Base class of backends with two kernels: the first lists the tokens of each expert, the second multiplies."""

    name = "routed"
    has_wgmma = False

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.experts > MAX_EXPERTS:
            return f"there are {problem.experts} experts; routed takes at most {MAX_EXPERTS}"
        return None

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return True


def clocks_per_weight(tile_m: int, arch: Arch, *, by_codes: bool = False) -> float:
    """Return the SM clocks to decode one weight element and multiply it with an m tile of ``tile_m`` rows.

    If ``by_codes``, the MMAs multiply the FP4 codes of both operands, and nothing is decoded.
    """
    if arch.has_wgmma:
        return DECODE_CLOCKS + TOKEN_CLOCKS * (tile_m - 8)
    if by_codes:
        # A warp reads its 16 rows of the weight once, and the activations of all tokens once for every 16 rows.
        read = CODE_BYTES * (1 + tile_m / 16) / SMEM_BYTES_PER_CLOCK
        multiplied = 2 * tile_m / (TENSOR_CORE_EFFICIENCY * arch.fp4_flops_per_clock)
        return overlapped(multiplied, read, order=2)
    rate = TENSOR_CORE_EFFICIENCY * min(arch.flops_per_clock, WARP_MMA_FLOPS_PER_CLOCK)
    # A warp reads the activations of all tokens from shared memory, two bytes each, for every 16 rows of the weight.
    return overlapped(DECODE_CLOCKS, 2 * tile_m / rate, 2 * tile_m / 16 / SMEM_BYTES_PER_CLOCK, order=2)


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
