"""An FP4 weight as e4m3 operands, four codes at a time.

For each row and K block of 128 elements there is a power of two, ``2^t``, and for each block scale a table of eight
bytes: what the magnitudes of e2m1 stand for, ``magnitude · scale · 2^-t``, rounded to e4m3. ``t`` is the least with
which none exceeds 448. Four codes are then looked up by one PRMT, whose selectors they are, and get their signs.

Tables are computed in float16, exactly: a product has at most 6 significant bits. So subnormal numbers of e4m3, zeros
and NaN need nothing special: the conversion rounds them. The lanes of a quad share a row, and each makes tables of a
quarter of its blocks.
"""

import cutlass.cute as cute
from cutlass import Uint32

from torch_cute_ops.formats import MXFP4, FP4Format
from torch_cute_ops.kernels.common import ptx

# Two magnitudes of e2m1 each, in float16
MAGNITUDES = (0x38000000, 0x3E003C00, 0x42004000, 0x46004400)
_LEAST_SCALE = 0x18001800  # 2^-9 twice, e4m3's least number, in float16


def tables(bytes_: list, fmt: FP4Format) -> tuple[list, list]:
    """The tables of a lane's blocks in two rows, and 2^t of these.

    Args:
        bytes_: the scales, of each row a word: two of NVFP4, or one of MXFP4, in the low half.
        fmt: format of the weight.

    Returns:
        For each row its tables, two words each, the lesser magnitudes first; and 2^t of each row.
    """
    numbers, powers = (_mxfp4_numbers if fmt == MXFP4 else _nvfp4_numbers)(bytes_)
    return [[_table(number) for number in row] for row in numbers], powers


def _nvfp4_numbers(bytes_: list) -> tuple[list, list]:
    """For each row its scales times 2^-t, each twice in a word, in float16; and 2^t."""
    pairs = [ptx.f16x2_of_e4m3x2(word) for word in bytes_]
    # The larger one of each row; NaN is left out. With zeros alone, any t will do.
    largest = ptx.max_abs_f16x2(ptx.prmt(*pairs, 0x5410), ptx.prmt(*pairs, 0x7632))
    largest = ptx.max_abs_f16x2(_of_quad(largest), Uint32(_LEAST_SCALE))
    # 6 · scale ≤ 448 · 2^t: the scale's exponent less 6, and one more if its significand is above 7/6, so at least 1.25.
    exponents = (largest + Uint32(0x03000300)) & Uint32(0xFC00FC00)  # (t + 21) · 2^10
    inverse = Uint32(0x90009000) - exponents
    numbers = [ptx.mul_16x2(pair, ptx.both_halves(inverse, row), "f16") for row, pair in enumerate(pairs)]
    low, high = (exponents & Uint32(0xFFFF)) << 13, (exponents >> 16) << 13
    powers = [ptx.float_of(half + Uint32(106 << 23)) for half in (low, high)]
    return [[ptx.both_halves(number, half) for half in range(2)] for number in numbers], powers


def _mxfp4_numbers(bytes_: list) -> tuple[list, list]:
    """The same. As bits of float16 the bytes are subnormal numbers, in the same order."""
    is_nan = [word == Uint32(0xFF) for word in bytes_]
    alive = [ptx.select(nan, Uint32(0), word) for nan, word in zip(is_nan, bytes_, strict=True)]
    both = _of_quad(alive[0] | (alive[1] << 16))
    numbers, powers = [], []
    for nan, word, largest in zip(is_nan, bytes_, (both & Uint32(0xFFFF), both >> 16), strict=True):
        # t = largest - 133; the scale times 2^-t is 2^(byte - largest + 6), which below 2^-14 rounds to zero.
        field = word + Uint32(21)
        half = ptx.select(field > largest, (field - largest) << 10, Uint32(0))
        half = ptx.select(nan, Uint32(0x7E00), half)
        numbers.append([half * Uint32(0x00010001)])
        normal, subnormal = (largest - Uint32(6)) << 23, Uint32(1) << (largest + Uint32(16))
        powers.append(ptx.float_of(ptx.select(largest > Uint32(6), normal, subnormal)))
    return numbers, powers


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

