"""FP4 codes as operands of 16-bit MMAs: 14 to 21 instructions for 8 codes, their scale included. (And, without one, of
FP8 MMAs: ``e4m3_words``.)

The bits of a code are moved to those of a 16-bit number, which is the code's value times a power of two. Multiplying by
the block's scale, as a 16-bit number too, takes that power back but for ``DECODED_SCALE``, by which sums are divided in
the end. All of it is exact: ``e2m1 · e4m3`` has at most 6 significant bits.

- float16, NVFP4: the bits (sign; two exponent, one mantissa) fit into the high byte of a float16: e2m1 · 2^-14. The
  scale times 2^6 gives the number times 2^-8, at least 2^-18: subnormals of float16 reach down to 2^-24.
- bfloat16, NVFP4: e2m1 · 2^-126; the scale times 2^118.
- bfloat16, MXFP4: e2m1 · 2^-126, times 2^126, then times the scale, which needs the whole range of exponents itself.

Which of the eight codes of a word share a pair follows from what a shift and a mask can move at once; the activations
are paired alike.
"""

from typing import Final

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint8, Uint32

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.runtime.argspec import Dim, TensorArg

E4M3_EXPONENT: Final = 6
"""A field of e2m1's exponent is one of e4m3's, whose bias is greater by 6."""
DECODED_SCALE = {NVFP4: 2.0**-8, MXFP4: 1.0}
"""A decoded number, and so a sum of them, over the true one."""


def acc_scale(fmt: FP4Format, decodes_both: bool = False) -> float:
    """The factor from sums of decoded numbers to true sums; ``decodes_both``: whether activations are decoded too."""
    return 1.0 / DECODED_SCALE[fmt] ** (2 if decodes_both else 1)


def scale_argument(fmt: FP4Format, rows: Dim, columns: Dim, align: int = 16) -> TensorArg:
    """A matrix of scales in the format's dtype."""
    return TensorArg(DSL_DTYPES[fmt.scale_dtype].__name__, (rows, columns), (columns, 1), align)


def rows_of_bytes(b: cute.Tensor, scale: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """A weight (K/2, N) with contiguous columns as (N, K/2), and its scales as bytes."""
    b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))
    return b, cute.make_tensor(cute.recast_ptr(scale.iterator, dtype=Uint8), scale.layout)


def decode(words: list, scales: list, dtype, fmt: FP4Format) -> list:
    """Decode words of eight codes and multiply by their scales.

    Each word gives the operands of two k16 steps: a pair of words each, with low and high k.
    """
    per_scale = len(words) // len(scales)
    decoded = []
    for i, word in enumerate(words):
        pairs = _bfloat16_pairs(word) if dtype is BFloat16 else float16_pairs(word)
        if fmt == MXFP4:
            pairs = [ptx.mul_16x2(pair, Uint32(0x7E807E80), "bf16") for pair in pairs]
        name = "bf16" if dtype is BFloat16 else "f16"
        pairs = [ptx.mul_16x2(pair, scales[i // per_scale], name) for pair in pairs]
        decoded.append([(pairs[0], pairs[1]), (pairs[2], pairs[3])])
    return decoded


def pair_activations(words: list, dtype) -> list:
    """Four words with eight activations in the order in which ``decode`` pairs codes: two words for each k16 step."""
    a, b, c, d = words
    pairs = ((a, c), (b, d)) if dtype is BFloat16 else ((a, b), (c, d))
    return [ptx.prmt(x, y, selector) for x, y in pairs for selector in (0x5410, 0x7632)]


def scale_factors(scales, dtype, fmt: FP4Format) -> list:
    """The factors for ``decode``, each in both halves of a word, from the scale bytes in the low half of a word: two of
    NVFP4, or one of MXFP4."""
    if fmt == MXFP4:
        # The byte is bfloat16's exponent field, except for 2^-127, which is subnormal, and NaN.
        half = ptx.select(scales == Uint32(0), Uint32(0x40), scales << 7)
        half = ptx.select(scales == Uint32(0xFF), Uint32(0x7FC0), half)
        return [ptx.prmt(half, half, 0x1010)]
    both = ptx.f16x2_of_e4m3x2(scales)
    if dtype is BFloat16:
        values = [ptx.mul_rn(ptx.unpack_f16(both, half), Float32(2.0**118)) for half in range(2)]
        return [ptx.pack_16x2(value, value, "bf16") for value in values]
    both = ptx.mul_16x2(both, Uint32(0x54005400), "f16")
    return [ptx.both_halves(both, half) for half in range(2)]


def float16_pairs(word) -> list:
    """Codes (0, 2), (1, 3), (4, 6), (5, 7) as e2m1 · 2^-14."""
    signs = word & Uint32(0x88888888)
    even = ptx.select_bits(Uint32(0x0E0E0E0E), word << 1, ptx.shift_left(signs, 4))
    odd = ptx.select_bits(Uint32(0x0E0E0E0E), word >> 3, signs)
    return [ptx.prmt(x, Uint32(0), selector) for selector in (0x1404, 0x3424) for x in (even, odd)]


def e4m3_words(word) -> tuple:
    """Codes (0, 2, 4, 6) and (1, 3, 5, 7) as e4m3, e2m1 · 2^-``E4M3_EXPONENT``: six instructions."""
    signs = word & Uint32(0x88888888)
    even = ptx.select_bits(Uint32(0x1C1C1C1C), word << 2, ptx.shift_left(signs, 4))
    return even, ptx.select_bits(Uint32(0x1C1C1C1C), word >> 2, signs)


def _bfloat16_pairs(word) -> list:
    """Codes (0, 4), (1, 5), (2, 6), (3, 7) as e2m1 · 2^-126.

    One integer multiplication copies, in both halves, a nibble's sign to bit 15 and its other bits to 8..6. It replaces
    two shifts and runs in another pipe than logic instructions, whose rate is half that of most others.
    """
    pairs = []
    for bits in (word, word >> 8):
        for mask, copies in ((0x000F000F, 0x1040), (0x00F000F0, 0x0104)):
            pairs.append(((bits & Uint32(mask)) * Uint32(copies)) & Uint32(0x81C081C0))
    return pairs
