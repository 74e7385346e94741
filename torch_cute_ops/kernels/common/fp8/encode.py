"""Quantisation to FP8 on the device: computes fp32 scales, divides fp32 values by a scale with IEEE rounding, and
converts the quotients to e4m3.

A division costs three instructions per element (Markstein 1990): the product of a value and the correctly rounded
inverse of the scale is off by at most one ulp, and one residual step rounds the quotient correctly. If a scale is
beyond 2^±80, the scale and its values are first multiplied by a power of two, so that no step over- or underflows.
"""

from typing import NamedTuple

from cutlass import Boolean, Float32, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT

E4M3_MAX = 448.0
_BEYOND_E4M3 = 1024.0
_INFINITY = float("inf")


class Divisor(NamedTuple):
    """A scale that values are divided by.

    Attributes:
        factor: row factor times the power of two. Values are multiplied by this factor before the division.
        scale: scale times the power of two.
        inverse: inverse of ``scale``.
        live: True if a computed scale is neither zero nor NaN; None for a given scale.
    """

    factor: Float32
    scale: Float32
    inverse: Float32
    live: Boolean | None


def dynamic_scale(amax: Float32) -> Float32:
    """Return ``amax / 448``; NaN if amax is NaN or infinite."""
    return ptx.fma_rn(amax, Float32(0.0), ptx.div_rn(amax, Float32(E4M3_MAX)))


def scale_divisor(scale: Float32, rstd: Float32 | None, is_dynamic: bool) -> Divisor:
    """Return the divisor of values that are first multiplied by the row factor ``rstd``, unless that is None."""
    magnitude = ptx.max_abs_nan(Float32(0.0), scale)
    power = ptx.select(magnitude < Float32(2.0**-80), Float32(2.0**64), Float32(1.0))
    power = ptx.select(magnitude > Float32(2.0**80), Float32(2.0**-64), power)
    near_one = ptx.mul_rn(scale, power)
    inverse = ptx.div_rn(Float32(1.0), near_one)
    factor = power if rstd is None else ptx.mul_rn(rstd, power)
    if is_dynamic:
        return Divisor(factor, near_one, inverse, scale > Float32(0.0))
    # A finite value divided by an infinite scale is zero, so skip the residual step.
    return Divisor(factor, ptx.select(magnitude < Float32(_INFINITY), near_one, Float32(0.0)), inverse, None)


def divide_e4m3(values, divisor: Divisor) -> list:
    """Divide 16 values by the scale. Returns words of e4m3 bytes, first value lowest: rounded to nearest even,
    saturated; NaN is 0x7F."""
    return [_divide_four([values[i + k] for k in range(4)], divisor) for i in range(0, FP8_UNIT, 4)]


def _divide_four(values: list, divisor: Divisor) -> Uint32:
    quotients = []
    for raw in values:
        value = ptx.mul_rn(raw, divisor.factor)
        guess = ptx.mul_rn(value, divisor.inverse)
        # With the operands' signs chosen in this way, a zero keeps its sign.
        excess = ptx.fma_rn(divisor.scale, guess, -value)
        quotient = ptx.fma_rn(-excess, divisor.inverse, guess)
        if divisor.live is None:
            # If a given scale is zero or far too small, ``guess`` (infinite, NaN or large) is the result.
            quotient = ptx.select(ptx.max_abs_nan(Float32(0.0), guess) <= Float32(_BEYOND_E4M3), quotient, guess)
        quotients.append(quotient)
    word = ptx.e4m3x4_of(tuple(quotients))
    return word if divisor.live is None else ptx.select(divisor.live, word, Uint32(0))
