"""Decoding of an FP4 weight to e4m3 by lookup tables, four codes at a time.

Before a weight row is stored in e4m3, its numbers are divided by a power of two, the *unit*. Each block scale gives a
table of eight e4m3 bytes: ``magnitude · scale / unit`` for the eight e2m1 magnitudes. One PRMT then looks up four
codes, with the codes as selectors. The signs are added afterwards.

By definition (``reference.mm_fp8_fp4``), each k tile of a row (128 elements) has its own unit ``2^t``, the smallest
unit with which no number exceeds 448. A larger unit gives the same values as long as no number is subnormal. Therefore,
usually all k tiles of a row share a unit. The whole table then follows from two e4m3 bytes: the scale, and 1.5 times
the scale. The other bytes are these two numbers times powers of two.

For NVFP4 scales, and for a k tile with its own unit, the numbers are computed in float16. This is exact, because a
product has at most 6 significant bits. The conversion to e4m3 rounds subnormal numbers, zeros and NaN correctly.
"""

import functools
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Uint32

from torch_cute_ops.formats import MXFP4, FP4Format
from torch_cute_ops.formats.prepared_scales import INDEX_NAN
from torch_cute_ops.kernels.common.core import ptx

# Two e2m1 magnitudes in each word, as float16
_MAGNITUDES = (0x38000000, 0x3E003C00, 0x42004000, 0x46004400)
_ONE_AND_A_HALF = 0x3E003E00
_LEAST_SCALE = 0x18001800  # 2^-9, the smallest positive e4m3 number, as float16 in both halves
_NAN = 0x7E00  # NaN, as float16
_SIGNS = 0x80808080
_HEADROOM = 3
"""Exponent by which a row's shared unit exceeds its first k tile's own unit. With this headroom, a scale in another k
tile may be 8 times as large as the first k tile's largest scale. It may also be as small as 1/160 of that scale,
because 0.5 · scale has to be normal."""
_MXFP4_UNITS = (-40, 7)
"""Smallest and largest exponent of the unit of an MXFP4 row. In this range, the difference between a scale's biased
exponent and the unit's exponent fits in a byte. Accumulators do not overflow unless scales are above 2^60: the results
of a k tile, divided by the unit, are below 2^103."""


class SharedUnit(NamedTuple):
    """Scales of one row in one k tile, divided by the row's shared unit.

    Attributes:
        ones, one_and_halves: e4m3 bytes of the scales, and of 1.5 times the scales. One word for each half of the k
            tile.
        fits: True if decoding tables can be computed from these bytes. Then no scale is negative or NaN, and no decoded
            number is subnormal or too large.
    """

    ones: list
    one_and_halves: list
    fits: Boolean


def own_exponent(words: list, fmt: FP4Format) -> Int32:
    """Return the exponent ``t`` of a k tile's own unit from the scale bytes of a row in this k tile. If all scales are
    zero or NaN, return an arbitrary exponent."""
    if fmt == MXFP4:
        bytes_ = [Int32((words[0] >> 8 * i) & Uint32(0xFF)) for i in range(4)]
        alive = [ptx.select(byte == Int32(0xFF), Int32(0), byte) for byte in bytes_]
        return functools.reduce(cutlass.max, alive) - 133
    pairs = _pairs(words)
    # ``max_abs_f16x2`` ignores NaN, as the definition of the row's power of two requires.
    largest = functools.reduce(ptx.max_abs_f16x2, pairs)
    largest = ptx.max_abs_f16x2(ptx.max_abs_f16x2(largest, ptx.prmt(largest, largest, 0x1032)), Uint32(_LEAST_SCALE))
    # Find the least t with 6 · scale ≤ 448 · 2^t. It is the exponent of the scale minus 6, plus 1 if the significand
    # exceeds 7/6. e4m3 significands that exceed 7/6 are at least 1.25.
    return Int32((largest & Uint32(0xFFFF)) + Uint32(0x0300) >> 10) - 21


def shared_exponent(words: list, fmt: FP4Format) -> Int32:
    """Return the exponent of a row's shared unit, from the scale bytes of the row's first k tile."""
    exponent = own_exponent(words, fmt) + _HEADROOM
    if fmt == MXFP4:
        least, most = _MXFP4_UNITS
        return ptx.select(Uint32(exponent - least) <= Uint32(most - least), exponent, Int32(0))
    # If all scales are zero, any unit will do.
    return ptx.select((words[0] | words[1]) == Uint32(0), Int32(_HEADROOM), exponent)


def over_shared_unit(words: list, exponent: Int32, fmt: FP4Format) -> SharedUnit:
    """Divide a row's scales in a k tile by the unit ``2^exponent``."""
    if fmt == MXFP4:
        # Each byte holds one exponent. Subtract modulo 256 in each byte, without borrows between bytes.
        word, bias = words[0], Uint32(exponent + 120) * Uint32(0x01010101)
        exponents = ((word | Uint32(_SIGNS)) - bias) ^ ((word ^ Uint32(0xFFFFFFFF)) & Uint32(_SIGNS))
        low = exponents & Uint32(0x7F7F7F7F)
        # The tables are exact for exponents from 2 (0.5 · scale is normal) to 13 (6 · scale = 6 · 2^(13 - 7) = 384).
        fits = _signs(low + Uint32(0x7E7E7E7E), exponents | low + Uint32(0x72727272)) == Uint32(_SIGNS)
        ones = exponents << 3
        one_and_halves = ones + Uint32(0x04040404)
        return SharedUnit([ones, ones >> 16], [one_and_halves, one_and_halves >> 16], fits)
    products = _products(words, exponent)
    more = [ptx.mul_16x2(product, Uint32(_ONE_AND_A_HALF), "f16") for product in products]
    ones = [ptx.e4m3x4_of_f16x2(products[i], products[i + 1]) for i in (0, 2)]
    one_and_halves = [ptx.e4m3x4_of_f16x2(more[i], more[i + 1]) for i in (0, 2)]
    # The tables are exact for bytes from 0x10 (0.5 · scale is normal) to 0x69 (6 · scale rounds to 448).
    fitting = [_signs(one + Uint32(0x70707070), one | one + Uint32(0x16161616)) for one in ones]
    return SharedUnit(ones, one_and_halves, (fitting[0] & fitting[1]) == Uint32(_SIGNS))


def tables_of_shared_unit(ones: Uint32, one_and_halves: Uint32, fmt: FP4Format) -> list:
    """Return the decoding tables for half a k tile of one row. The scales must fit the row's shared unit. A table is
    two words, smaller magnitudes first."""
    return [table_of_bytes(ones, one_and_halves, i) for i in range(64 // fmt.block_size)]


def table_of_bytes(ones: Uint32, one_and_halves: Uint32, i: int) -> list:
    """Return the decoding table of block ``i``, whose scale fits the row's shared unit, from byte ``i`` of both words
    (see ``SharedUnit``)."""
    # PRMT can replicate the sign bit of a byte. The sign of a positive byte is 0, which gives the table's entry for
    # zero.
    low = ptx.prmt(ones, one_and_halves, (4 + i) << 12 | i << 8 | i << 4 | 8 + i) - Uint32(0x00000800)
    high = ptx.prmt(ones, one_and_halves, (4 + i) << 12 | i << 8 | (4 + i) << 4 | i) + Uint32(0x10100808)
    return [low, high]


def tables_of_own_unit(word: Uint32, exponent: Int32, fmt: FP4Format) -> list:
    """Return the decoding tables for half a k tile of one row, for the k tile's own unit ``2^exponent``. ``word`` holds
    the scale bytes."""
    if fmt == MXFP4:
        numbers = [_number_of_byte(word, i, exponent) * Uint32(0x00010001) for i in range(2)]
    else:
        products = _products([word], exponent)
        numbers = [ptx.both_halves(product, half) for product in products for half in range(2)]
    return [table_of(number) for number in numbers]


def numbers_of_own_unit(words: list, exponent: Int32, fmt: FP4Format) -> list:
    """Return the scales of a row in a k tile, divided by the k tile's own unit ``2^exponent``: two float16 numbers per
    word, from which ``table_of`` computes tables. ``words`` holds the scale bytes."""
    if fmt == MXFP4:
        numbers = [_number_of_byte(words[0], i, exponent) for i in range(4)]
        return [numbers[i] | numbers[i + 1] << 16 for i in (0, 2)]
    return _products(words, exponent)


def tables_over_shared_unit(bytes_: list, exponent: Int32, fmt: FP4Format) -> tuple[list, list]:
    """Return the decoding tables of blocks for the unit ``2^exponent``, and flags that say which blocks fit the unit
    (see ``SharedUnit.fits``).

    A table is two words. There is one flag per MXFP4 block, or per two NVFP4 blocks.
    """
    if fmt == MXFP4:
        # All magnitudes except zero are powers of two, or 1.5 times a power of two.
        fields = [Int32(byte) - (exponent + 120) for byte in bytes_]
        tables = [
            [
                Uint32(field) * Uint32(0x08080800) + Uint32(0x03FFF800),
                Uint32(field) * Uint32(0x08080808) + Uint32(0x14100C08),
            ]
            for field in fields
        ]
        # ``over_shared_unit`` explains the limits 2 and 13.
        return tables, [Uint32(field - 2) <= Uint32(11) for field in fields]
    tables, fitting = [], []
    for first in range(0, len(bytes_), 2):
        pair = bytes_[first] | bytes_[first + 1] << 8
        product = ptx.mul_16x2(ptx.f16x2_of_e4m3x2(pair), _inverse(exponent), "f16")
        both = ptx.e4m3x4_of_f16x2(product, ptx.mul_16x2(product, Uint32(_ONE_AND_A_HALF), "f16"))
        tables += [table_of_bytes(both, both >> 16, i) for i in range(2)]
        ones = both & Uint32(0xFFFF)
        signs = _signs(ones + Uint32(0x7070), ones | ones + Uint32(0x1616))
        fitting.append(signs == Uint32(_SIGNS & 0xFFFF))
    return tables, fitting


def table_of_own_unit(byte: Uint32, exponent: Int32, fmt: FP4Format) -> list:
    """Return the two words of a block's decoding table, for its k tile's own unit ``2^exponent``. ``byte`` is the
    block's scale."""
    return tables_of_own_unit(byte * Uint32(0x0101), exponent, fmt)[0]


def table_of(number: Uint32) -> list:
    """Return the decoding table of a block. Each 16-bit half of ``number`` contains the same float16: the block's scale
    divided by the unit (see the module's docstring)."""
    products = [ptx.mul_16x2(number, Uint32(pair), "f16") for pair in _MAGNITUDES]
    return [ptx.e4m3x4_of_f16x2(products[i], products[i + 1]) for i in (0, 2)]


def table_of_index(index, fmt: FP4Format) -> list:
    """Return the decoding table of a block with prepared scales (``formats.prepared_scales``). ``index`` is the block's
    index."""
    return table_of(number_of_index(index, fmt) * Uint32(0x00010001))


def number_of_index(index, fmt: FP4Format) -> Uint32:
    """Return the scale of a block with prepared scales, divided by the row's unit, as float16 in the low half of a
    word."""
    # Indices are the exponent and the first bits of the mantissa of float16 numbers.
    number = Uint32(index + 1) << 10 if fmt == MXFP4 else Uint32(index + 15) << 7
    number = ptx.select(index == INDEX_NAN, Uint32(_NAN), number)
    return ptx.select(index == 0, Uint32(0), number & Uint32(0xFFFF))


def power_of_two(exponent: Int32) -> cutlass.Float32:
    """Return ``2^exponent``, or infinity for exponents of 128 and above. ``exponent`` must be at least -149."""
    normal, subnormal = Uint32(cutlass.min(exponent + 127, Int32(255))) << 23, Uint32(1) << Uint32(exponent + 149)
    return ptx.float_of(ptx.select(exponent > Int32(-127), normal, subnormal))


def _pairs(words: list) -> list:
    """Convert e4m3 bytes to pairs of float16."""
    return [ptx.f16x2_of_e4m3x2(part) for word in words for part in (word, word >> 16)]


def _number_of_byte(word: Uint32, i: int, exponent: Int32) -> Uint32:
    """Return the MXFP4 scale in byte ``i`` of a word, divided by ``2^exponent``, as float16 in the low half of a
    word."""
    byte = Int32((word >> 8 * i) & Uint32(0xFF))
    # A scale below 2^-14 is replaced by zero, because all magnitudes times this scale round to zero.
    half = Uint32(cutlass.max(byte - exponent - 112, Int32(0))) << 10
    return ptx.select(byte == Int32(0xFF), Uint32(_NAN), half)


def _products(words: list, exponent: Int32) -> list:
    """Return scales of NVFP4 divided by ``2^exponent``, as pairs of float16."""
    return [ptx.mul_16x2(pair, _inverse(exponent), "f16") for pair in _pairs(words)]


def _inverse(exponent: Int32) -> Uint32:
    """Return ``2^-exponent`` in float16, in both halves of a word."""
    return Uint32(15 - exponent) * Uint32(0x04000400)


def _signs(of: Uint32, but: Uint32) -> Uint32:
    """Return the highest bit of each byte of ``of``, but clear each bit that is set in ``but``."""
    return of & (but ^ Uint32(0xFFFFFFFF)) & Uint32(_SIGNS)


def look_up(table: list, codes: Uint32) -> list:
    """Look up eight codes in a decoding table. Return two words of e4m3."""
    selectors = codes & Uint32(0x77777777)
    # After a shift by one code, the signs of codes 0, 2, 4 and 6 are the highest bits of the four bytes.
    early = codes << 4
    decoded = []
    for chosen, order in ((selectors, 0x5140), (selectors >> 16, 0x7362)):
        decoded.append(ptx.xor_masked(ptx.prmt_by(*table, chosen), ptx.prmt(early, codes, order), 0x80808080))
    return decoded
