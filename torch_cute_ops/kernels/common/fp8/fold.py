"""Folding of MXFP8: four blocks of 32 elements, each with a power-of-two scale, get one scale (``mxfp8_fold``)."""

from typing import Final

import cutlass
from cutlass import Uint32

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.core import ptx

MX_BLOCKS: Final = FP8_BLOCK128.block_size // MXFP8.block_size
"""Number of MXFP8 blocks that share a scale after folding."""
MOST_BELOW: Final = 20
"""Largest useful difference of exponents: times 2^-20, every e4m3 number is rounded to zero."""


def largest_byte(found: list) -> Uint32:
    """Return the largest of a group's scale bytes. It is NaN (255) if one of the bytes is NaN."""
    largest = found[0]
    for byte in found[1:]:
        largest = cutlass.max(largest, byte)
    return largest


def power_below(below) -> Uint32:
    """Return 2^-below as a pair of fp16 numbers. Differences above ``MOST_BELOW`` count as ``MOST_BELOW``."""
    power = ptx.float_of((Uint32(127) - cutlass.min(Uint32(below), Uint32(MOST_BELOW))) << 23)
    return ptx.pack_16x2(power, power, "f16")


def fold_words(words: list, power: Uint32) -> list:
    """Multiply e4m3 numbers, four per word, by a power of two and round them to e4m3.

    The products in fp16 are exact if the power is at least 2^-15. With smaller powers, an fp16 product may lose bits
    below 2^-24, but an e4m3 number has only four significant bits, so that no product is rounded across the middle of
    two e4m3 numbers, which are at least 2^-9 apart.
    """
    folded = []
    for word in words:
        pairs = [ptx.f16x2_of_e4m3x2(pair) for pair in (word & Uint32(0xFFFF), word >> 16)]
        folded.append(ptx.e4m3x4_of_f16x2(*(ptx.mul_16x2(pair, power, "f16") for pair in pairs)))
    return folded
