"""A row of an FP4 weight in a K block of 128 elements as e4m3 numbers, four codes at a time.

There is a power of two for the row, ``2^t``, and for each block scale a table of eight bytes: what the magnitudes of
e2m1 stand for, ``magnitude · scale · 2^-t``, rounded to e4m3. ``t`` is the least with which none exceeds 448. Four codes
are then looked up by one PRMT, whose selectors they are, and get their signs.

Tables are computed in float16, exactly: a product has at most 6 significant bits. So subnormal numbers of e4m3, zeros
and NaN need nothing special: the conversion rounds them.
"""

import functools

import cutlass
from cutlass import Float32, Int32, Uint32

from torch_cute_ops.formats import MXFP4, FP4Format
from torch_cute_ops.kernels.common import ptx

# Two magnitudes of e2m1 each, in float16
_MAGNITUDES = (0x38000000, 0x3E003C00, 0x42004000, 0x46004400)
_LEAST_SCALE = 0x18001800  # 2^-9 twice, e4m3's least number, in float16


def scaled(words: list, fmt: FP4Format) -> tuple[list, Float32]:
    """The scales of a row, each times 2^-t and twice in a word, in float16; and 2^t.

    ``words`` are the bytes of the scales.
    """
    return (_scaled_mxfp4 if fmt == MXFP4 else _scaled_nvfp4)(words)


def _scaled_nvfp4(words: list) -> tuple[list, Float32]:
    pairs = [ptx.f16x2_of_e4m3x2(part) for word in words for part in (word, word >> 16)]
    # NaN is left out. With zeros alone, any t will do.
    largest = functools.reduce(ptx.max_abs_f16x2, pairs)
    largest = ptx.max_abs_f16x2(ptx.max_abs_f16x2(largest, ptx.prmt(largest, largest, 0x1032)), Uint32(_LEAST_SCALE))
    # 6 · scale ≤ 448 · 2^t: the scale's exponent less 6, and one more if its significand is above 7/6, so at least 1.25.
    exponents = (largest + Uint32(0x03000300)) & Uint32(0xFC00FC00)  # (t + 21) · 2^10, twice
    numbers = [ptx.mul_16x2(pair, Uint32(0x90009000) - exponents, "f16") for pair in pairs]
    power = ptx.float_of(((exponents & Uint32(0xFFFF)) << 13) + Uint32((127 - 21) << 23))
    return [ptx.both_halves(number, half) for number in numbers for half in range(2)], power


def _scaled_mxfp4(words: list) -> tuple[list, Float32]:
    bytes_ = [Int32((words[0] >> 8 * i) & Uint32(0xFF)) for i in range(4)]
    is_nan = [byte == Int32(0xFF) for byte in bytes_]
    alive = [ptx.select(nan, Int32(0), byte) for nan, byte in zip(is_nan, bytes_, strict=True)]
    largest = functools.reduce(cutlass.max, alive)  # t + 133
    numbers = []
    for nan, byte in zip(is_nan, bytes_, strict=True):
        # The scale times 2^-t is 2^(byte - largest + 6). Below 2^-14 all magnitudes are rounded to zero.
        half = Uint32(cutlass.max(byte - largest + 21, Int32(0))) << 10
        numbers.append(ptx.select(nan, Uint32(0x7E00), half) * Uint32(0x00010001))
    normal, subnormal = Uint32(largest - 6) << 23, Uint32(1) << Uint32(largest + 16)
    return numbers, ptx.float_of(ptx.select(largest > Int32(6), normal, subnormal))


def table_of(number: Uint32) -> list:
    """What the magnitudes stand for in a block whose scale, times 2^-t, both halves of ``number`` hold: two words, the
    lesser magnitudes first."""
    products = [ptx.mul_16x2(number, Uint32(pair), "f16") for pair in _MAGNITUDES]
    return [ptx.e4m3x4_of_f16x2(products[i], products[i + 1]) for i in (0, 2)]


def look_up(table: list, codes: Uint32) -> list:
    """Eight codes as two words of e4m3."""
    selectors = codes & Uint32(0x77777777)
    # The signs of codes 0, 2, 4 and 6 are the highest bits of bytes if these begin one code earlier.
    early = codes << 4
    decoded = []
    for chosen, order in ((selectors, 0x5140), (selectors >> 16, 0x7362)):
        decoded.append(ptx.xor_masked(ptx.prmt_by(*table, chosen), ptx.prmt(early, codes, order), 0x80808080))
    return decoded
