"""Quantisation to FP8 on the device: compute fp32 scales, divide fp32 values by a scale with IEEE rounding, and convert
the quotients to e4m3.

A division costs three instructions per element (Markstein 1990). The product of a value and the correctly rounded
inverse of the scale is off by at most one ulp, and one residual step rounds the quotient correctly. If a scale is
outside of 2^-80 to 2^80, the scale and its values are first multiplied by a power of two, so that no step over- or
underflows. If scales are powers of two, values are multiplied by the inverse scale instead, which is exact.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Uint32
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT

E4M3_MAX = 448.0
_BEYOND_E4M3 = 1024.0
_INFINITY = float("inf")


class Divisor(NamedTuple):
    """A scale to divide by, prepared for ``divide_e4m3``.

    Attributes:
        factor: product of the row factor and a power of two. Values are multiplied by this product before the division.
        scale: product of the scale and the same power of two.
        inverse: correctly rounded inverse of ``scale``.
        live: True if a scale that was computed from values is neither zero nor NaN; None if the caller passed the
            scale.
    """

    factor: Float32
    scale: Float32
    inverse: Float32
    live: Boolean | None


@cute.jit
def warp_amaxes(amax: Float32, tid, warps: Constexpr[int]) -> cute.Tensor:
    """Return (warps,) fp32 in shared memory: the largest ``amax`` of each warp, or NaN if any thread's ``amax`` is NaN.
    All threads of the CTA must call this function, which synchronises them."""
    amax = cute.arch.warp_reduction(amax, ptx.max_abs_nan, threads_in_group=32)
    slots = cute.recast_ptr(SmemAllocator().allocate(4 * warps, 16), dtype=Float32)
    of_warps = cute.make_tensor(slots, cute.make_layout(warps))
    if tid % 32 == 0:
        of_warps[tid // 32] = amax
    cute.arch.sync_threads()
    return of_warps


def dynamic_scale(amax: Float32) -> Float32:
    """Return the scale ``amax / 448``, or NaN if amax is NaN or infinite."""
    return ptx.fma_rn(amax, Float32(0.0), ptx.div_rn(amax, Float32(E4M3_MAX)))


def multiply_e4m3(values, factor: Float32, live: Boolean) -> list:
    """Multiply values, a multiple of four, by the inverse of a power-of-two scale. Return words of e4m3 bytes, the
    first value in the lowest byte; or zeros unless ``live``."""
    scaled = [ptx.mul_rn(value, factor) for value in values]
    words = [ptx.e4m3x4_of(tuple(scaled[i : i + 4])) for i in range(0, len(scaled), 4)]
    return [ptx.select(live, word, Uint32(0)) for word in words]


def scale_divisor(scale: Float32, rstd: Float32 | None, is_dynamic: bool) -> Divisor:
    """Prepare a scale for ``divide_e4m3``. Values are first multiplied by the row factor ``rstd``, unless it is
    None."""
    magnitude = ptx.max_abs_nan(Float32(0.0), scale)
    power = ptx.select(magnitude < Float32(2.0**-80), Float32(2.0**64), Float32(1.0))
    power = ptx.select(magnitude > Float32(2.0**80), Float32(2.0**-64), power)
    near_one = ptx.mul_rn(scale, power)
    inverse = ptx.div_rn(Float32(1.0), near_one)
    factor = power if rstd is None else ptx.mul_rn(rstd, power)
    if is_dynamic:
        return Divisor(factor, near_one, inverse, scale > Float32(0.0))
    # A finite value divided by an infinite scale is zero. The residual step would give NaN, so disable it.
    return Divisor(factor, ptx.select(magnitude < Float32(_INFINITY), near_one, Float32(0.0)), inverse, None)


def divide_e4m3(values, divisor: Divisor) -> list:
    """Divide 16 values by the scale. Return words of e4m3 bytes, the first value in the lowest byte.

    Quotients are rounded to nearest even and saturated. NaN becomes 0x7F.
    """
    return [_divide_four([values[i + k] for k in range(4)], divisor) for i in range(0, FP8_UNIT, 4)]


def _divide_four(values: list, divisor: Divisor) -> Uint32:
    quotients = []
    for raw in values:
        value = ptx.mul_rn(raw, divisor.factor)
        guess = ptx.mul_rn(value, divisor.inverse)
        # The signs of the operands are chosen so that a quotient of zero has the sign of the value.
        excess = ptx.fma_rn(divisor.scale, guess, -value)
        quotient = ptx.fma_rn(-excess, divisor.inverse, guess)
        if divisor.live is None:
            # If the caller's scale is zero or far too small, the residual step is invalid. ``guess`` (infinite, NaN or
            # large) is then the result.
            quotient = ptx.select(ptx.max_abs_nan(Float32(0.0), guess) <= Float32(_BEYOND_E4M3), quotient, guess)
        quotients.append(quotient)
    word = ptx.e4m3x4_of(tuple(quotients))
    return word if divisor.live is None else ptx.select(divisor.live, word, Uint32(0))
