"""Block scales that are powers of two (ue8m0), computed from the largest magnitude of a block."""

import math

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32

from torch_cute_ops.kernels.common.core import ptx

_INFINITY = 0x7F800000
_NAN = 0xFF
_BITS_OF_NAN = 0x7FC00000
_BITS_OF_SMALLEST = 0x00400000  # 2^-127, which is subnormal in fp32


def ue8m0_scale(amax: Float32, largest: float) -> tuple[Uint32, Float32]:
    """Return the ue8m0 byte of a block's scale, and the inverse of the scale. The block's values are multiplied by the
    inverse before they are rounded.

    The scale ``2^ceil(log2(amax / largest))``, at least 2^-127, is computed from the bits of ``amax``. With ``largest =
    f · 2^e`` and 1 ≤ f < 2, the scale's exponent is the exponent of amax minus e, plus 1 if the significand of amax
    exceeds f. The byte is NaN if ``amax`` is NaN or infinite.

    Args:
        amax: largest magnitude of the block.
        largest: largest number of the element format. The significand of this number has few bits.
    """
    fraction, exponent_of_largest = math.frexp(largest)
    carry = int((2 - 2 * fraction) * 2**23) - 1
    bits = ptx.bits_of(amax)
    exponent = Int32((bits + Uint32(carry)) >> 23) - (exponent_of_largest - 1)
    byte = Uint32(cutlass.max(exponent, Int32(0)))
    factor = ptx.float_of((Uint32(254) - byte) << 23)
    return ptx.select(bits < Uint32(_INFINITY), byte, Uint32(_NAN)), factor


def is_live(amax: Float32) -> Boolean:
    """Return True if a block with this amax contains neither NaN nor infinity, and is not all zeros."""
    return (ptx.bits_of(amax) - Uint32(1)) < Uint32(_INFINITY - 1)


def float_of_ue8m0(byte: Uint32) -> Float32:
    """Return the value of a ue8m0 byte."""
    bits = ptx.select(byte == Uint32(0), Uint32(_BITS_OF_SMALLEST), byte << 23)
    return ptx.float_of(ptx.select(byte == Uint32(_NAN), Uint32(_BITS_OF_NAN), bits))
