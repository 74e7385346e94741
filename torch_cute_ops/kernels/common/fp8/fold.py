"""Folding of MXFP8: four blocks of 32 elements, each with a power-of-two scale, get one scale (``mxfp8_fold``).

Elements are multiplied by 2^-below, where ``below`` is the difference between the exponents of the new and of the old
scale. Usually all products are normal e4m3 numbers. Then ``below`` is subtracted from the exponents of four elements at
once (``lowered``). Otherwise elements are converted to fp16, multiplied, and rounded (``rounded``), which takes several
times as long, because conversions are slow.
"""

from typing import Final

import cutlass
from cutlass import Boolean, Uint32

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.core import ptx

MX_BLOCKS: Final = FP8_BLOCK128.block_size // MXFP8.block_size
"""Number of MXFP8 blocks that share a scale after folding."""
MOST_BELOW: Final = 20
"""Largest useful difference of exponents: times 2^-20, every e4m3 number is rounded to zero."""
MOST_LOWERED: Final = 15
"""Least difference of exponents at which no product is normal."""


def largest_byte(found: list) -> Uint32:
    """Return the largest of a group's scale bytes. It is NaN (255) if one of the bytes is NaN."""
    largest = found[0]
    for byte in found[1:]:
        largest = cutlass.max(largest, byte)
    return largest


def lowered(words: list, below: Uint32) -> tuple[list, Boolean]:
    """Multiply e4m3 numbers, four per word, by 2^-below, by subtracting ``below`` from their exponents. Also return
    False if this is wrong for a number, because it is NaN or the product is not normal."""
    each = Uint32(0x01010101)
    shift = below * Uint32(8)
    # Bit 7 of a byte of ``magnitude + least`` is set if the magnitude is at least that of 2^-6 times 2^below.
    least, fits = (Uint32(0x78) - shift) * each, Uint32(0xFFFFFFFF)
    for word in words:
        magnitude = word & Uint32(0x7F7F7F7F)
        fits = fits & (magnitude + least) & ~(magnitude + each)  # the second sum has bit 7 set if the number is NaN
    all_fit = ((fits & Uint32(0x80808080)) == Uint32(0x80808080)) & (below < Uint32(MOST_LOWERED))
    return [word - shift * each for word in words], all_fit


def rounded(words: list, below: Uint32) -> list:
    """Multiply e4m3 numbers, four per word, by 2^-below and round them to e4m3. ``below`` is at most ``MOST_BELOW``.

    The products in fp16 are exact if the power is at least 2^-15. With smaller powers, an fp16 product may lose bits
    below 2^-24, but an e4m3 number has only four significant bits, so that no product is rounded across the middle of
    two e4m3 numbers, which are at least 2^-9 apart.
    """
    power = ptx.float_of((Uint32(127) - below) << 23)
    power = ptx.pack_16x2(power, power, "f16")
    folded = []
    for word in words:
        pairs = [ptx.f16x2_of_e4m3x2(pair) for pair in (word & Uint32(0xFFFF), word >> 16)]
        folded.append(ptx.e4m3x4_of_f16x2(*(ptx.mul_16x2(pair, power, "f16") for pair in pairs)))
    return folded
