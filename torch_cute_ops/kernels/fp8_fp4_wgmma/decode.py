"""A row of an FP4 weight in a K block of 128 elements as e4m3 numbers, four codes at a time.

There is a power of two for the row, ``2^t``, and for each block scale a table of eight bytes: what the magnitudes of
e2m1 stand for, ``magnitude · scale · 2^-t``, rounded to e4m3. ``t`` is the least with which none exceeds 448. Four
codes are then looked up by one PRMT, whose selectors they are, and get their signs.

Tables are computed in float16, exactly: a product has at most 6 significant bits. So subnormal numbers of e4m3, zeros
and NaN need nothing special: the conversion rounds them.

With a greater power than ``2^t`` the numbers are the same but for that power, if none is subnormal. So the K blocks of
a row can share one, mostly, as the unit of its totals.
"""

import functools

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32

from torch_cute_ops.formats import MXFP4, FP4Format
from torch_cute_ops.kernels.common import ptx

# Two magnitudes of e2m1 each, in float16
_MAGNITUDES = (0x38000000, 0x3E003C00, 0x42004000, 0x46004400)
_LEAST_SCALE = 0x18001800  # 2^-9 twice, e4m3's least number, in float16
_LEAST_FIELD = 10  # float16's exponent field of 2^-5, half of which is e4m3's least normal number
_NEAR = 40


class RowScales:
    """The scales of a row in a K block.

    Args:
        words: their bytes.
        fmt: format of the weight.

    Attributes:
        exponent: ``t``; where all scales are zero or NaN, it may be any.
    """

    exponent: Int32

    def numbers(self, exponent: Int32) -> list:
        """The scales over ``2^exponent``, which is ``2^t`` or more, each twice in a word, in float16."""
        raise NotImplementedError

    def fits(self, exponent: Int32) -> Boolean:
        """Whether all numbers over ``2^exponent`` are normal in e4m3."""
        raise NotImplementedError

    @property
    def is_near(self) -> Boolean | bool:
        """Whether totals may be in units of ``2^t``, without overflow."""
        return True


class _NVFP4Scales(RowScales):
    def __init__(self, words: list):
        self.pairs = [ptx.f16x2_of_e4m3x2(part) for word in words for part in (word, word >> 16)]
        # NaN is left out.
        largest = functools.reduce(ptx.max_abs_f16x2, self.pairs)
        largest = ptx.max_abs_f16x2(ptx.max_abs_f16x2(largest, _swapped(largest)), Uint32(_LEAST_SCALE))
        # 6 · scale ≤ 448 · 2^t: the scale's exponent less 6, and one more if its significand is above 7/6, so 1.25.
        self.exponent = Int32((largest & Uint32(0xFFFF)) + Uint32(0x0300) >> 10) - 21

    def numbers(self, exponent: Int32) -> list:
        products = [ptx.mul_16x2(pair, _inverse(exponent), "f16") for pair in self.pairs]
        return [ptx.both_halves(product, half) for product in products for half in range(2)]

    def fits(self, exponent: Int32) -> Boolean:
        least = functools.reduce(ptx.min_abs_of_f16x2, self.pairs)
        least = ptx.mul_16x2(ptx.min_abs_of_f16x2(least, _swapped(least)), _inverse(exponent), "f16")
        return (least & Uint32(0xFFFF)) >= Uint32(_LEAST_FIELD << 10)


class _MXFP4Scales(RowScales):
    def __init__(self, words: list):
        self.bytes_ = [Int32((words[0] >> 8 * i) & Uint32(0xFF)) for i in range(4)]
        self.is_nan = [byte == Int32(0xFF) for byte in self.bytes_]
        alive = [ptx.select(nan, Int32(0), byte) for nan, byte in zip(self.is_nan, self.bytes_, strict=True)]
        self.exponent = functools.reduce(cutlass.max, alive) - 133

    def numbers(self, exponent: Int32) -> list:
        found = []
        for nan, byte in zip(self.is_nan, self.bytes_, strict=True):
            # Below 2^-14 all magnitudes are rounded to zero.
            half = Uint32(cutlass.max(byte - exponent - 112, Int32(0))) << 10
            found.append(ptx.select(nan, Uint32(0x7E00), half) * Uint32(0x00010001))
        return found

    def fits(self, exponent: Int32) -> Boolean:
        return functools.reduce(cutlass.min, self.bytes_) - exponent - 112 >= Int32(_LEAST_FIELD)

    @property
    def is_near(self) -> Boolean:
        return Uint32(self.exponent + _NEAR) <= Uint32(2 * _NEAR)


def row_scales(words: list, fmt: FP4Format) -> RowScales:
    """The scales of a row in a K block, from their bytes."""
    return (_MXFP4Scales if fmt == MXFP4 else _NVFP4Scales)(words)


def power_of_two(exponent: Int32) -> Float32:
    """2 to an exponent from -149 to 127."""
    normal, subnormal = Uint32(exponent + 127) << 23, Uint32(1) << Uint32(exponent + 149)
    return ptx.float_of(ptx.select(exponent > Int32(-127), normal, subnormal))


def _swapped(word: Uint32) -> Uint32:
    return ptx.prmt(word, word, 0x1032)


def _inverse(exponent: Int32) -> Uint32:
    """2^-exponent twice, in float16."""
    return Uint32(15 - exponent) * Uint32(0x04000400)


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
