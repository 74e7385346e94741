"""FP4 codes as operands of 16-bit tensor-core instructions: 14 to 23 instructions for 8 codes, scale included.

A code's bits become those of a 16-bit number by moving them, which divides it by a power of two; the block's scale, as
a 16-bit number too, brings that power back but for ``DECODED_SCALE``, which the sums are divided by. All of it is
exact: ``e2m1 · e4m3`` has at most 6 significant bits.

- float16, NVFP4: the bits (sign; two exponent, one mantissa) fit into the high byte of a float16: e2m1 · 2^-14. The
  scale times 2^6 gives the number times 2^-8, at least 2^-18: subnormals of float16 reach down to 2^-24.
- bfloat16, NVFP4: e2m1 · 2^-126; the scale times 2^118.
- bfloat16, MXFP4: e2m1 · 2^-126, times 2^126, then times the scale, which alone may be anything.

How eight codes of a word pair up follows from which bits a move can reach at once; activations are paired to match.
"""

from cutlass import BFloat16, Float32, Uint32

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format
from torch_cute_ops.kernels.common import ptx

DECODED_SCALE = {NVFP4: 2.0**-8, MXFP4: 1.0}
"""By how much decoded numbers, and so sums, are larger than they should be."""


def decode(words: list, scales: list, dtype, fmt: FP4Format) -> list:
    """For each word of eight codes, two steps of an mma: a pair of words (low, high k), as numbers times the scale."""
    per_scale = len(words) // len(scales)
    decoded = []
    for i, word in enumerate(words):
        pairs = _bfloat16_pairs(word) if dtype is BFloat16 else _float16_pairs(word)
        if fmt == MXFP4:
            pairs = [ptx.mul_16x2(pair, Uint32(0x7E807E80), "bf16") for pair in pairs]
        name = "bf16" if dtype is BFloat16 else "f16"
        pairs = [ptx.mul_16x2(pair, scales[i // per_scale], name) for pair in pairs]
        decoded.append([(pairs[0], pairs[1]), (pairs[2], pairs[3])])
    return decoded


def activation_pairs(words: list, dtype) -> list:
    """The eight activations of four words, paired as ``decode`` pairs codes: two steps, each (low, high k)."""
    a, b, c, d = words
    if dtype is BFloat16:
        pairs = (a, c), (b, d)
    else:
        pairs = (a, b), (c, d)
    return [(ptx.prmt(x, y, 0x5410), ptx.prmt(x, y, 0x7632)) for x, y in pairs]


def scale_pairs(bytes_: list, dtype, fmt: FP4Format) -> list:
    """For each scale byte, a word with the factor that ``decode`` wants, twice."""
    if fmt == MXFP4:
        # bfloat16's exponent field, but for 2^-127, which is subnormal, and NaN.
        halves = [ptx.select(byte == Uint32(0), Uint32(0x40), byte << 7) for byte in bytes_]
        halves = [
            ptx.select(byte == Uint32(0xFF), Uint32(0x7FC0), half) for byte, half in zip(bytes_, halves, strict=True)
        ]
        return [ptx.prmt(half, half, 0x1010) for half in halves]
    if dtype is BFloat16:
        values = [ptx.mul_rn(ptx.float_of_e4m3(byte), Float32(2.0**118)) for byte in bytes_]
        return [ptx.pack_16x2(value, value, "bf16") for value in values]
    words = [ptx.pack_16x2(value, value, "f16") for value in map(ptx.float_of_e4m3, bytes_)]
    return [ptx.mul_16x2(word, Uint32(0x54005400), "f16") for word in words]


def _float16_pairs(word) -> list:
    """Codes (0, 2), (1, 3), (4, 6), (5, 7) as e2m1 · 2^-14."""
    signs = word & Uint32(0x88888888)
    even = ptx.select_bits(Uint32(0x0E0E0E0E), word << 1, signs << 4)
    odd = ptx.select_bits(Uint32(0x0E0E0E0E), word >> 3, signs)
    return [ptx.prmt(x, Uint32(0), selector) for selector in (0x1404, 0x3424) for x in (even, odd)]


def _bfloat16_pairs(word) -> list:
    """Codes (0, 4), (1, 5), (2, 6), (3, 7) as e2m1 · 2^-126."""
    pairs = []
    for i in range(4):
        magnitude = word << (6 - 4 * i) if i < 2 else word >> (4 * i - 6)
        sign = word << (12 - 4 * i) if i < 3 else word
        pairs.append(ptx.select_bits(Uint32(0x80008000), sign, magnitude & Uint32(0x01C001C0)))
    return pairs
