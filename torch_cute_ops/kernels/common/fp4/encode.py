"""FP4 on the device: block scales, and eight fp32 values to eight e2m1 nibbles.

Encoding rounds to nearest even, saturates, and keeps the sign of zero.

``sm_100`` and later have ``cvt.rn.satfinite.e2m1x2.f32``. ``sm_90`` has nothing for e2m1, so there the rounding is
built from the e2m1 boundaries, 0.25 0.75 1.25 1.75 2.5 3.5 5. A tie goes to the even code: down at 0.25, 1.25, 2.5 and
5, up at 0.75, 1.75 and 3.5. The significand distinguishes the two kinds: 1.0 or 1.25 for "down", 1.5 or 1.75 for "up".
Hence:

1. ``v + v·δ`` with δ = 0.35 ulp moves a value up by one ulp just where its significand is above 1/0.7 ≈ 1.43, and the
   product with ``1 - 2^-24`` moves every value down by one ulp. After both, values with a low significand are one ulp
   lower and those with a high one are unchanged: "value above (or at) its boundary" has become "at or above", for all
   seven, and cutting off low bits no longer changes an answer.
2. The same product scales by 2^-14, so that 1.0 falls on the smallest normal fp16 and fp16's own subnormals give e2m1's
   even spacing below 1. Two values are truncated into one register: from here on, one instruction serves two elements.
3. ``min(|p|, 6)`` saturates; adding half a code step rounds; the code is then bits 11..9 of each half, the sign bit 15.
4. Byte permutes and masks gather the nibbles.

That is 3 floating-point and 2.4 integer instructions an element, exact for every finite fp32 input; tests compare it
with the definition over all bf16 and fp16 values and the fp32 neighbours of each boundary.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from torch_cute_ops.formats import NVFP4, FP4Format
from torch_cute_ops.kernels.common.core import ptx

# 0.35 ulp relative to the significand's 2^-23: below half an ulp at significand 1.25, above it at 1.5.
_TIE_SHIFT = 0.35 * 2.0**-23
_ONE_ULP_DOWN_AND_SCALE = (1.0 - 2.0**-24) * 2.0**-14
_INFINITY = 0x7F800000
_SIX_F16X2 = 0x0E000E00  # 6.0 · 2^-14 in both halves
_HALF_STEP = 0x01010101  # half a code step, in the high byte of each fp16


def encode_e2m1x8(values, has_e2m1_cvt: bool) -> Uint32:
    """The eight e2m1 nibbles of ``values`` (eight ``Float32``, finite), element 0 in the lowest nibble."""
    if const_expr(has_e2m1_cvt):
        return ptx.e2m1x8_of(tuple(values))
    shifted = [_shift_ties(v) for v in values]
    even_signs, even_codes = _codes_in_bytes(shifted[0::2])
    odd_signs, odd_codes = _codes_in_bytes(shifted[1::2])
    codes = (odd_codes * Uint32(16) + even_codes) >> 1
    signs = ptx.select_bits(Uint32(0x80808080), odd_signs, even_signs >> 4)
    return ptx.select_bits(Uint32(0x88888888), signs, codes)


def _shift_ties(value: Float32) -> Float32:
    return ptx.mul_rn(ptx.fma_rn(value, Float32(_TIE_SHIFT), value), Float32(_ONE_ULP_DOWN_AND_SCALE))


def _codes_in_bytes(values) -> tuple[Uint32, Uint32]:
    """Split four shifted values: bytes with the sign in bit 7; bytes with the code in bits 3..1 and no higher bit
    set."""
    pairs = [ptx.f16x2_toward_zero(values[0], values[1]), ptx.f16x2_toward_zero(values[2], values[3])]
    high_bytes = 0x7531
    clamped = [ptx.min_abs_f16x2(p, _SIX_F16X2) for p in pairs]
    codes = ptx.prmt(clamped[0], clamped[1], high_bytes) + Uint32(_HALF_STEP)
    return ptx.prmt(pairs[0], pairs[1], high_bytes), codes


def nvfp4_scale(amax: Float32, global_scale: Float32 | None) -> tuple[Uint32, Float32]:
    """The e4m3 scale byte of a block and the factor that brings its values into e2m1's range.

    ``byte = e4m3_satfinite(amax · g · fp32(1/6))``, NaN for a block that holds NaN or infinity; ``factor = g / scale``.
    For a byte of zero or NaN the factor means nothing: see ``is_live_nvfp4``.
    """
    scaled = amax if global_scale is None else ptx.mul_rn(amax, global_scale)
    # 0 · amax turns infinity, which would saturate, into NaN and changes nothing else.
    byte = ptx.e4m3_of(ptx.fma_rn(amax, Float32(0.0), ptx.mul_rn(scaled, Float32(1 / 6))))
    scale = ptx.float_of_e4m3(byte)
    # Division without div.rn's branch (Markstein 1990): one Newton step rounds 1 / scale correctly, because a scale has
    # four significant bits; one residual step rounds g / scale correctly, for g between 2^-100 and 2^100.
    inverse = ptx.rcp_approx(scale)
    inverse = ptx.fma_rn(inverse, ptx.fma_rn(-scale, inverse, Float32(1.0)), inverse)
    if global_scale is None:
        return byte, inverse
    quotient = ptx.mul_rn(global_scale, inverse)
    return byte, ptx.fma_rn(inverse, ptx.fma_rn(-scale, quotient, global_scale), quotient)


def is_live_nvfp4(byte: Uint32) -> Boolean:
    """Whether a positive e4m3 byte is neither zero nor NaN."""
    return (byte - Uint32(1)) < Uint32(0x7E)


def mxfp4_scale(amax: Float32) -> tuple[Uint32, Float32]:
    """The ue8m0 scale byte of a block and the factor that brings its values into e2m1's range.

    ``2^ceil(log2(amax / 6))`` from the bits of ``amax``: 6 = 1.5 · 2^2, so the exponent is amax's less 2, and one more
    where the significand exceeds 1.5. NaN for a block that holds NaN or infinity.
    """
    bits = ptx.bits_of(amax)
    exponent = Int32((bits + Uint32(0x3FFFFF)) >> 23) - 2
    byte = Uint32(cutlass.max(exponent, Int32(0)))
    factor = ptx.float_of((Uint32(254) - byte) << 23)
    return ptx.select(bits < Uint32(_INFINITY), byte, Uint32(0xFF)), factor


def is_live_mxfp4(amax: Float32) -> Boolean:
    """Whether a block with this amax holds numbers only, and not only zeros."""
    return (ptx.bits_of(amax) - Uint32(1)) < Uint32(_INFINITY - 1)


def fp4_block(
    values, amax: Float32, global_scale: Float32 | None, fmt: FP4Format, has_e2m1_cvt: bool, after=None, part=None
) -> tuple[list, Uint32]:
    """The words of codes and the scale byte of a block.

    ``after`` is a factor of the values that they, and ``amax``, do not have yet; ``None``: there is none. ``part``: how
    many of the block's values are given, a multiple of 8; ``None``: all.
    """
    if after is not None:
        amax = ptx.mul_rn(amax, after)
    if fmt == NVFP4:
        byte, factor = nvfp4_scale(amax, global_scale)
        live = is_live_nvfp4(byte)
    else:
        byte, factor = mxfp4_scale(amax)
        live = is_live_mxfp4(amax)
    if after is not None:
        factor = ptx.mul_rn(factor, after)
    scaled = [ptx.mul_rn(values[i], factor) for i in range(part or fmt.block_size)]
    words = [encode_e2m1x8(scaled[i : i + 8], has_e2m1_cvt) for i in range(0, len(scaled), 8)]
    return [ptx.select(live, word, Uint32(0)) for word in words], byte
