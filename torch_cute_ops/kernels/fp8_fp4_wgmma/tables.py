"""An FP4 weight as e4m3 operands, four codes at a time.

For each row and K block of 128 elements there is a power of two, ``2^t``, and for each block scale a table of eight
bytes: what the magnitudes of e2m1 stand for, ``magnitude · scale · 2^-t``, rounded to e4m3. ``t`` is the least with
which none exceeds 448. Four codes are then looked up by one PRMT, whose selectors they are, and get their signs.

Tables are computed in float16, exactly: a product has at most 6 significant bits. So subnormal numbers of e4m3, zeros
and NaN need nothing special: the conversion rounds them. The lanes of a quad share a row, and each makes tables of a
quarter of its blocks.
"""

import functools
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from torch_cute_ops.formats import MXFP4, FP4Format
from torch_cute_ops.kernels.common import ptx

_ONE = 133  # the exponent 0 of MXFP4
_NVFP4_ONE = 21 << 10  # and of NVFP4
_NEAR = 40  # the largest exponent of units
# Two magnitudes of e2m1 each, in float16
MAGNITUDES = (0x38000000, 0x3E003C00, 0x42004000, 0x46004400)
_LEAST_SCALE = 0x18001800  # 2^-9 twice, e4m3's least number, in float16


class Units(NamedTuple):
    """Exponents of two rows in a K block, packed as ``exponents`` has them.

    Attributes:
        before, now: the units that the totals are in before the block, and from it on.
        exact: the exponents ``t`` of the block.
        differ: whether in some row of the warp the unit changes, or the block's numbers are not in it.
    """

    before: Uint32
    now: Uint32
    exact: Uint32
    differ: Boolean


class Blocks:
    """A lane's blocks in two rows of a K block: their scales, and how the tables of these are made.

    Args:
        bytes_: the scales, of each row a word: two of NVFP4, or one of MXFP4, in the low half.
        fmt: format of the weight.

    Attributes:
        exponents: ``t`` of both rows, packed: of NVFP4 ``(t + 21) · 2^10``, of MXFP4 ``t + 133``.
    """

    def __init__(self, bytes_: list, fmt: FP4Format):
        self.is_mxfp4, self.bytes_ = fmt == MXFP4, bytes_
        if self.is_mxfp4:
            # As bits of float16 the bytes are subnormal numbers, in the same order.
            self.is_nan = [word == Uint32(0xFF) for word in bytes_]
            alive = [ptx.select(nan, Uint32(0), word) for nan, word in zip(self.is_nan, bytes_, strict=True)]
            self.exponents = _of_quad(alive[0] | (alive[1] << 16))
            return
        self.pairs = [ptx.f16x2_of_e4m3x2(word) for word in bytes_]
        # The larger one of each row; NaN is left out. With zeros alone, any t will do.
        largest = ptx.max_abs_f16x2(ptx.prmt(*self.pairs, 0x5410), ptx.prmt(*self.pairs, 0x7632))
        largest = ptx.max_abs_f16x2(_of_quad(largest), Uint32(_LEAST_SCALE))
        # 6 · scale ≤ 448 · 2^t: the scale's exponent less 6, and one more if its significand is above 7/6, so 1.25.
        self.exponents = (largest + Uint32(0x03000300)) & Uint32(0xFC00FC00)

    def numbers(self, exponents: Uint32) -> list:
        """For each row its scales over 2 to these exponents, each twice in a word, in float16."""
        if not self.is_mxfp4:
            inverse = Uint32(0x90009000) - exponents
            products = [ptx.mul_16x2(pair, ptx.both_halves(inverse, row), "f16") for row, pair in enumerate(self.pairs)]
            return [[ptx.both_halves(product, half) for half in range(2)] for product in products]
        found = []
        for nan, word, exponent in zip(self.is_nan, self.bytes_, _halves(exponents), strict=True):
            # Below 2^-14, all is rounded to zero.
            field = word + Uint32(21)
            half = ptx.select(field > exponent, (field - exponent) << 10, Uint32(0))
            found.append([ptx.select(nan, Uint32(0x7E00), half) * Uint32(0x00010001)])
        return found

    def tables(self, exponents: Uint32) -> list:
        """For each row the tables of its blocks, two words each, the lesser magnitudes first."""
        return [[_table(number) for number in row] for row in self.numbers(exponents)]

    def first_units(self) -> Uint32:
        """Units for totals of which this is the first K block: twice the least, so that they hardly ever change."""
        if not self.is_mxfp4:
            return self.exponents + Uint32(0x04000400)
        low, high = (ptx.select(_is_near(e), e + Uint32(1), Uint32(_ONE)) for e in _halves(self.exponents))
        return low | (high << 16)

    def units(self, before: Uint32) -> Units:
        """Units from this K block on: the old ones, unless the block needs greater ones."""
        now = ptx.max_abs_f16x2(before, self.exponents)
        changes = now != before
        if self.is_mxfp4:
            nears = [_is_near(e) for e in _halves(self.exponents)]
            low, high = (ptx.select(near, e, Uint32(_ONE)) for near, e in zip(nears, _halves(now), strict=True))
            now = low | (high << 16)
            changes = (now != before) | ptx.select(nears[0] & nears[1], Boolean(False), Boolean(True))
        # Numbers in these units are exact if the least, half of a scale, is a normal number of e4m3.
        rows = self.numbers(now)
        least = functools.reduce(ptx.min_abs_of_f16x2, [number for row in rows for number in row])
        is_less = ((least - Uint32(0x28002800)) & Uint32(0x80008000)) != Uint32(0)
        differ = cute.arch.vote_any_sync(changes | is_less)
        return Units(before, now, self.exponents, differ)


class Exponents:
    """Powers of two of packed exponents of a format (``Blocks.exponents``)."""

    def __init__(self, fmt: FP4Format):
        self.is_mxfp4 = fmt == MXFP4

    def ratios(self, exponents: Uint32, over: Uint32) -> list:
        """2 to the differences of these exponents, for both rows."""
        pairs = zip(_halves(exponents), _halves(over), strict=True)
        return [self._power(Int32(one) - Int32(other)) for one, other in pairs]

    def powers(self, exponents: Uint32) -> list:
        """2 to these exponents, for both rows."""
        one = _ONE if self.is_mxfp4 else _NVFP4_ONE
        return [self._power(Int32(exponent) - one) for exponent in _halves(exponents)]

    def _power(self, exponent: Int32) -> Float32:
        if not self.is_mxfp4:
            return ptx.float_of(Uint32((exponent << 13) + (127 << 23)))
        normal, subnormal = Uint32(exponent + 127) << 23, Uint32(1) << Uint32(exponent + 149)
        return ptx.float_of(ptx.select(exponent > -127, normal, subnormal))


def _halves(word: Uint32) -> list:
    return [word & Uint32(0xFFFF), word >> 16]


def _is_near(exponent: Uint32) -> Boolean:
    """Whether totals may be in such units (MXFP4): not where they could overflow."""
    return (exponent - Uint32(_ONE - _NEAR)) <= Uint32(2 * _NEAR)


def _of_quad(value: Uint32) -> Uint32:
    """The largest of both halves among the lanes of a quad."""
    for offset in (1, 2):
        value = ptx.max_abs_f16x2(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def _table(number: Uint32) -> list:
    """What the magnitudes stand for in a block whose scale, times 2^-t, both halves of ``number`` hold."""
    products = [ptx.mul_16x2(number, Uint32(pair), "f16") for pair in MAGNITUDES]
    return [ptx.e4m3x4_of_f16x2(products[i], products[i + 1]) for i in (0, 2)]


def look_up(table: list, codes: Uint32) -> Uint32:
    """Four codes, in the low half of a word, as four bytes of e4m3."""
    magnitudes = ptx.prmt_by(*table, codes & Uint32(0x7777))
    # The signs of codes 0 and 2 are the highest bits of bytes one code further on.
    signs = ptx.prmt(codes << 4, codes, 0x5140)
    return ptx.xor_masked(magnitudes, signs, 0x80808080)

