"""FP4 codes on the device: decoding to operands of MMAs, and encoding from fp32.

**Decoding** 8 codes for 16-bit MMAs takes 14 to 21 instructions, including the multiplication by the scale. The bits of
a code are moved into a 16-bit float, whose value is then the code's value times a power of two. This number is
multiplied by the block's scale, also a 16-bit float. The product is the true value times ``DECODED_SCALE``. At the end,
the accumulators are divided by ``DECODED_SCALE``. Decoding is exact: ``e2m1 · e4m3`` needs at most 6 significant bits.

- float16, NVFP4: the bits of a code (one sign, two exponent, one mantissa bit) fit into the high byte of a float16. Its
  value is then e2m1 · 2^-14. The scale is multiplied by 2^6, so the product is the true value times 2^-8, at least
  2^-18. Subnormals of float16 reach down to 2^-24.
- bfloat16, NVFP4: the moved bits have the value e2m1 · 2^-126, and the scale is multiplied by 2^118.
- bfloat16, MXFP4: the moved bits have the value e2m1 · 2^-126. These values are multiplied by 2^126, and then by the
  scale. Two multiplications are needed because a ue8m0 scale covers bfloat16's whole range of exponents.

One shift and one mask move two codes of a word at once. These two codes form a pair. Activations are paired in the same
way. ``e4m3_words`` decodes to FP8 and does not apply scales.

**Encoding** rounds to nearest even, saturates, and preserves the sign of zero. ``sm_100`` and later offer
``cvt.rn.satfinite.e2m1x2.f32``. ``sm_90`` lacks an instruction for e2m1, so this module computes the rounding. The
boundaries between e2m1 values are 0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and 5. A tie goes to the even code: down at 0.25,
1.25, 2.5 and 5, up at 0.75, 1.75 and 3.5. The significand of the boundary distinguishes the two cases: 1.0 or 1.25 for
"down", 1.5 or 1.75 for "up". The code is computed in four steps:
1. ``v + v·δ`` with δ = 0.35 ulp moves a value up by one ulp exactly if its significand is above 1/0.7 ≈ 1.43. The
   product with ``1 - 2^-24`` then moves every value down by one ulp. In total, values with a low significand are one
   ulp lower, and values with a high significand are unchanged. Now a value must round up exactly if it is at or above
   the boundary, at all seven boundaries, so truncating low bits no longer changes a result.
2. The same product multiplies by 2^-14, so that 1.0 becomes the smallest normal fp16. Subnormals of fp16 then have
   e2m1's even spacing below 1. Two values are truncated to fp16 and packed into one register, so that each later
   instruction handles two elements.
3. ``min(|p|, 6)`` saturates, and adding half a code step rounds. The code is then in bits 11..9 of each half, and the
   sign in bit 15.
4. Byte permutes and masks gather the codes into nibbles.

This takes 3 floating-point and 2.4 integer instructions per element, and is exact for every finite fp32 input. Tests
compare the encoder with the definition over all bf16 and fp16 values and the fp32 neighbours of each boundary.
"""

import math
from typing import Final

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Uint8, Uint32, const_expr

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.formats.fp4 import (
    E2M1_MAX,
    EXTREME_ROW_POWER,
    EXTREME_ROW_SCALE,
    FOUR_OVER_SIX,
    NVFP4_MAX,
    SMALLEST_ROW_SCALE,
)
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.core.ue8m0 import is_live, ue8m0_scale
from torch_cute_ops.kernels.common.fp4.layouts import FP4Operands
from torch_cute_ops.runtime.argspec import Dim, TensorArg

E4M3_EXPONENT: Final = 6
"""Difference of the exponent biases of e4m3 and e2m1. The bits of an e2m1 code, read as e4m3, have the value e2m1 ·
2^-6."""
DECODED_SCALE = {NVFP4: 2.0**-8, MXFP4: 1.0}
"""Factor by which decoded numbers, and therefore accumulators, differ from the true numbers."""
# δ = 0.35 · 2^-23 is 0.35 ulp of a value at significand 1.0. ``v + v·δ`` rounds down at significand 1.25 and up at 1.5.
_TIE_SHIFT = 0.35 * 2.0**-23
_ONE_ULP_DOWN_AND_SCALE = (1.0 - 2.0**-24) * 2.0**-14
_INFINITY = 0x7F800000
_SIX_F16X2 = 0x0E000E00  # 6.0 · 2^-14 in both halves
_HALF_STEP = 0x01010101  # four bytes, each the high byte of an fp16 number: half a step between neighbouring codes


def acc_scale(fmt: FP4Format, decodes_both: bool = False) -> float:
    """Return the factor that undoes the scaling of decoded numbers (``DECODED_SCALE``) in accumulators.

    ``decodes_both`` is True if the activations are decoded too.
    """
    return 1.0 / DECODED_SCALE[fmt] ** (2 if decodes_both else 1)


def operands_acc_scale(operands: FP4Operands) -> float:
    """Return the factor that undoes the scaling of decoded numbers in accumulators of a GEMM with these operands."""
    return 1.0 if operands.by_codes else acc_scale(operands.fmt, operands.decodes_both)


def scale_argument(
    fmt: FP4Format | FP8Format,
    layout: ScaleLayout,
    rows: Dim,
    blocks: Dim | int,
    align: int = 16,
    name: str = "",
) -> TensorArg:
    """Return the description of an argument for a matrix's block scales, in the format's dtype and the layout's shape.

    Args:
        fmt, layout: format and scale layout.
        rows: number of rows of linear scales. The shape of tiled scales does not use it.
        blocks: number of blocks of a row. In tiled layouts, the number is a multiple of a tile's blocks.
        align: alignment of the first scale in bytes.
        name: prefix for the names of the extents of tiled scales.
    """
    dtype = DSL_DTYPES[fmt.scale_dtype].__name__
    if layout.is_linear:
        return TensorArg(dtype, (rows, blocks), (blocks, 1), align)
    tile = math.prod(layout.tile)
    # The rows of tiles must be contiguous, but TVM-FFI can only check that an extent equals a stride.
    # ``ctas_unless_overlapping`` checks the stride between rows of tiles (the pitch) when the kernel is launched.
    pitch: Dim | int = Dim(f"{name}tile_pitch", divisibility=tile)
    columns: Dim | int = Dim(f"{name}tile_columns")
    if isinstance(blocks, int):
        columns = -(-blocks // TILE_BLOCKS)
        pitch = columns * tile
    shape = Dim(f"{name}tile_rows"), columns, *layout.tile
    strides = pitch, *(math.prod(layout.tile[i:]) for i in range(len(layout.tile) + 1))
    return TensorArg(dtype, shape, strides, align)


def scale_matrix(scale: cute.Tensor, layout: ScaleLayout | None) -> cute.Tensor:
    """Return tiled scales as a matrix of the same bytes: (padded rows, padded blocks). Row i of this matrix does not
    hold the scales of row i. Return linear scales unchanged."""
    if layout is None or layout.is_linear:
        return scale
    rows = cute.assume(scale.shape[0] * layout.tile_rows, divby=layout.tile_rows)
    columns = cute.assume(scale.shape[1] * TILE_BLOCKS, divby=TILE_BLOCKS)
    return cute.make_tensor(scale.iterator, cute.make_layout((rows, columns), stride=(columns, 1)))


def rows_of_bytes(b: cute.Tensor, scale: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Return a weight (K/2, N) with contiguous columns as its transpose (N, K/2), and the weight's scales as bytes."""
    b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))
    return b, cute.make_tensor(cute.recast_ptr(scale.iterator, dtype=Uint8), scale.layout)


def decode(words: list, scales: list, dtype, fmt: FP4Format) -> list:
    """Decode words of eight codes each, and multiply by their scales.

    The result holds, for each word, the operands of two MMAs with K = 16. Each operand is a pair of words, with low and
    high k.
    """
    per_scale = len(words) // len(scales)
    decoded = []
    for i, word in enumerate(words):
        pairs = _bfloat16_pairs(word) if dtype is BFloat16 else float16_pairs(word)
        pairs = _scaled(pairs, scales[i // per_scale], dtype, fmt)
        decoded.append([(pairs[0], pairs[1]), (pairs[2], pairs[3])])
    return decoded


def _scaled(pairs: list, scale, dtype, fmt: FP4Format) -> list:
    """Multiply pairs of codes, whose bits were moved into 16-bit floats, by their scale."""
    if fmt == MXFP4:
        pairs = [ptx.mul_16x2(pair, Uint32(0x7E807E80), "bf16") for pair in pairs]
    return [ptx.mul_16x2(pair, scale, "bf16" if dtype is BFloat16 else "f16") for pair in pairs]


def decode_in_order(words: list, scales: list, dtype, fmt: FP4Format) -> list:
    """Decode words of eight codes each, and multiply by their scales. Return four words of two numbers for each word,
    in the order of k."""
    per_scale = len(words) // len(scales)
    neighbours = _bfloat16_neighbours if dtype is BFloat16 else _float16_neighbours
    of_each = [_scaled(neighbours(word), scales[i // per_scale], dtype, fmt) for i, word in enumerate(words)]
    return [pair for pairs in of_each for pair in pairs]


def pair_activations(words: list, dtype) -> list:
    """Reorder eight activations, in four words, so that they are paired like the codes that ``decode`` returns: two
    words per MMA with K = 16."""
    a, b, c, d = words
    pairs = ((a, c), (b, d)) if dtype is BFloat16 else ((a, b), (c, d))
    return [ptx.prmt(x, y, selector) for x, y in pairs for selector in (0x5410, 0x7632)]


def scale_factors(scales, dtype, fmt: FP4Format) -> list:
    """Return the scales as factors for ``decode``: 16-bit floats, each in both halves of a word.

    ``scales`` contains scale bytes in the low half of a word: two bytes for NVFP4, one byte for MXFP4.
    """
    if fmt == MXFP4:
        # A ue8m0 byte is the exponent field of the same bfloat16 number, except for two values: 2^-127 is subnormal,
        # and 0xFF is NaN.
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
    """Return codes (0, 2), (1, 3), (4, 6), (5, 7) of a word as pairs of float16, with the values e2m1 · 2^-14."""
    even, odd = _float16_bytes(word)
    return [ptx.prmt(x, Uint32(0), selector) for selector in (0x1404, 0x3424) for x in (even, odd)]


def _float16_neighbours(word) -> list:
    """Return codes (0, 1), (2, 3), (4, 5), (6, 7) of a word as pairs of float16, with the values e2m1 · 2^-14."""
    bytes_ = _float16_bytes(word)
    in_order = [ptx.prmt(*bytes_, selector) for selector in (0x5140, 0x7362)]
    return [ptx.prmt(x, Uint32(0), selector) for x in in_order for selector in (0x1404, 0x3424)]


def _float16_bytes(word) -> tuple:
    """Return codes (0, 2, 4, 6) and (1, 3, 5, 7) of a word as two words of high bytes of float16."""
    signs = word & Uint32(0x88888888)
    even = ptx.select_bits(Uint32(0x0E0E0E0E), word << 1, ptx.shift_left(signs, 4))
    return even, ptx.select_bits(Uint32(0x0E0E0E0E), word >> 3, signs)


def e4m3_words(word) -> tuple:
    """Return codes (0, 2, 4, 6) and (1, 3, 5, 7) of a word as two words of e4m3, with the values e2m1 ·
    2^-``E4M3_EXPONENT``.

    The conversion takes six instructions.
    """
    signs = word & Uint32(0x88888888)
    even = ptx.select_bits(Uint32(0x1C1C1C1C), word << 2, ptx.shift_left(signs, 4))
    return even, ptx.select_bits(Uint32(0x1C1C1C1C), word >> 2, signs)


def _bfloat16_pairs(word) -> list:
    """Return codes (0, 4), (1, 5), (2, 6), (3, 7) of a word as pairs of bfloat16, with the values e2m1 · 2^-126.

    In both halves of the word, one integer multiplication moves a nibble's sign to bit 15 and its other bits to bits
    8..6. The multiplication replaces two shifts. It runs in another execution pipe than the logic instructions, whose
    pipe runs at only half the usual throughput.
    """
    pairs = []
    for bits in (word, word >> 8):
        for mask, copies in ((0x000F000F, 0x1040), (0x00F000F0, 0x0104)):
            pairs.append(((bits & Uint32(mask)) * Uint32(copies)) & Uint32(0x81C081C0))
    return pairs


def _bfloat16_neighbours(word) -> list:
    """Return codes (0, 1), (2, 3), (4, 5), (6, 7) of a word as pairs of bfloat16, with the values e2m1 · 2^-126.

    The conversion takes two logic or permute instructions less than ``_bfloat16_pairs``, whose result has to be
    permuted.
    """
    even, odd = word & Uint32(0x0F0F0F0F), (word >> 4) & Uint32(0x0F0F0F0F)
    pairs = []
    for i in range(4):
        # Selectors of 8 and above replicate a byte's sign bit, which is 0 here, so they select zero bytes.
        halves = ptx.prmt(even, odd, 0xC480 + i * 0x1111)
        pairs.append((halves * Uint32(0x1040)) & Uint32(0x81C081C0))
    return pairs


def encode_e2m1x8(values, has_e2m1_cvt: bool) -> Uint32:
    """Encode eight finite ``Float32`` values to e2m1 nibbles, element 0 in the lowest nibble."""
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
    """Convert four values, prepared by ``_shift_ties``, to two words of four bytes. The bytes of the first word hold
    the signs in bit 7, and the bytes of the second word hold the codes in bits 3..1."""
    pairs = [ptx.f16x2_toward_zero(values[0], values[1]), ptx.f16x2_toward_zero(values[2], values[3])]
    high_bytes = 0x7531
    clamped = [ptx.min_abs_f16x2(p, _SIX_F16X2) for p in pairs]
    codes = ptx.prmt(clamped[0], clamped[1], high_bytes) + Uint32(_HALF_STEP)
    return ptx.prmt(pairs[0], pairs[1], high_bytes), codes


def nvfp4_scale(amax: Float32, global_scale: Float32 | None) -> tuple[Uint32, Float32]:
    """Return the e4m3 scale byte of a block, and the factor by which the block's values are multiplied before they are
    rounded to e2m1.

    ``byte = e4m3_satfinite(amax · g · fp32(1/6))``, or NaN if the block contains NaN or infinity. ``factor = g /
    scale``, where ``scale`` is the value of the byte. If the byte is zero or NaN, the factor is meaningless: see
    ``is_live_nvfp4``.
    """
    scaled = amax if global_scale is None else ptx.mul_rn(amax, global_scale)
    # Adding 0 · amax turns an infinite amax into NaN, instead of saturating it. It changes no other value.
    byte = ptx.e4m3_of(ptx.fma_rn(amax, Float32(0.0), ptx.mul_rn(scaled, Float32(1 / 6))))
    return byte, _factor(ptx.float_of_e4m3(byte), global_scale)


def _factor(scale: Float32, global_scale: Float32 | None) -> Float32:
    """Return ``global_scale / scale`` for the value of an e4m3 number that is neither zero nor NaN."""
    # Divide without the branch of div.rn (Markstein 1990). One Newton step rounds 1 / scale correctly, because a scale
    # has only four significant bits. One residual step rounds g / scale correctly, for g between 2^-100 and 2^100.
    inverse = ptx.rcp_approx(scale)
    inverse = ptx.fma_rn(inverse, ptx.fma_rn(-scale, inverse, Float32(1.0)), inverse)
    if global_scale is None:
        return inverse
    quotient = ptx.mul_rn(global_scale, inverse)
    return ptx.fma_rn(inverse, ptx.fma_rn(-scale, quotient, global_scale), quotient)


def nvfp4_row_scale(amax: Float32) -> tuple[Float32, Float32, Float32]:
    """Return the scale of a row with this amax, the row's global scale, and a power of two by which the row is
    multiplied before it is quantised with this global scale.

    The row scale is ``amax / 2688``. If the row contains NaN or infinity, the row scale is NaN, and if it would be
    below 2^-126, it is 0. The global scale is the inverse of ``row_scale · power``. If the row scale is zero or NaN,
    the global scale is the row scale itself. The power is 1 unless the row scale is outside of 2^-60 to 2^60, where
    ``nvfp4_scale`` would overflow or underflow.
    """
    # Adding 0 · amax turns an infinite amax into NaN. It changes no other value.
    scale = ptx.fma_rn(amax, Float32(0.0), ptx.div_rn(amax, Float32(NVFP4_MAX)))
    scale = ptx.select(amax < Float32(NVFP4_MAX * SMALLEST_ROW_SCALE), Float32(0.0), scale)
    power = ptx.select(scale < Float32(1 / EXTREME_ROW_SCALE), Float32(EXTREME_ROW_POWER), Float32(1.0))
    power = ptx.select(scale > Float32(EXTREME_ROW_SCALE), Float32(1 / EXTREME_ROW_POWER), power)
    inverse = ptx.div_rn(Float32(1.0), ptx.mul_rn(scale, power))
    return scale, ptx.select(scale > Float32(0.0), inverse, scale), power


def is_live_nvfp4(byte: Uint32) -> Boolean:
    """Return True if a scale byte, a positive e4m3 number, is neither zero nor NaN."""
    return (byte - Uint32(1)) < Uint32(0x7E)


def fp4_block(
    values, amax: Float32, global_scale: Float32 | None, fmt: FP4Format, has_e2m1_cvt: bool, after=None, part=None
) -> tuple[list, Uint32]:
    """Quantise a block to FP4. Return the words of its codes, and its scale byte.

    Args:
        values: values of the block, ``Float32``.
        amax: largest magnitude of the block.
        global_scale: global scale of the matrix, or None.
        fmt: format of the block.
        has_e2m1_cvt: True if the GPU has an instruction that converts to e2m1.
        after: factor by which ``values`` and ``amax`` must still be multiplied, or None.
        part: number of ``values``, a multiple of 8, if they are only a part of the block, or None if they are the whole
            block.
    """
    if after is not None:
        amax = ptx.mul_rn(amax, after)
    if fmt == NVFP4:
        byte, factor = nvfp4_scale(amax, global_scale)
        live = is_live_nvfp4(byte)
    else:
        byte, factor = ue8m0_scale(amax, E2M1_MAX)
        live = is_live(amax)
    if after is not None:
        factor = ptx.mul_rn(factor, after)
    scaled = [ptx.mul_rn(values[i], factor) for i in range(part or fmt.block_size)]
    words = [encode_e2m1x8(scaled[i : i + 8], has_e2m1_cvt) for i in range(0, len(scaled), 8)]
    return [ptx.select(live, word, Uint32(0)) for word in words], byte


def nvfp4_block_four_over_six(
    values, amax: Float32, global_scale: Float32 | None, has_e2m1_cvt: bool
) -> tuple[list, Uint32]:
    """Quantise a block of 16 ``Float32`` values to NVFP4 with the better of two scales, and return the words of its
    codes, and its scale byte.

    The scales map ``amax``, the largest magnitude of the block, to 6 and to 4. The scale with the smaller sum of
    squared errors is better. If both errors are equal, or NaN, the scale for 6 is taken.
    """
    scaled = [values[i] if global_scale is None else ptx.mul_rn(values[i], global_scale) for i in range(16)]
    largest = amax if global_scale is None else ptx.mul_rn(amax, global_scale)
    # Adding 0 · amax turns an infinite amax into NaN, as in ``nvfp4_scale``.
    sixth = ptx.fma_rn(amax, Float32(0.0), ptx.mul_rn(largest, Float32(1 / 6)))
    candidates = []
    for wanted in (sixth, ptx.mul_rn(sixth, Float32(FOUR_OVER_SIX))):
        byte = ptx.e4m3_of(wanted)
        scale = ptx.float_of_e4m3(byte)
        factor = _factor(scale, global_scale)
        encoded = [ptx.mul_rn(values[i], factor) for i in range(16)]
        words = [encode_e2m1x8(encoded[i : i + 8], has_e2m1_cvt) for i in (0, 8)]
        # If the scale is zero, the codes are meaningless, but they are decoded to zero anyway.
        error = _squared_error(words, ptx.mul_rn(scale, Float32(2.0**14)), scaled)
        live = is_live_nvfp4(byte)
        candidates.append((error, byte, [ptx.select(live, word, Uint32(0)) for word in words]))
    (error, byte, words), (larger_error, larger_byte, larger_words) = candidates
    takes_larger = larger_error < error
    chosen = zip(larger_words, words, strict=True)
    return [ptx.select(takes_larger, a, b) for a, b in chosen], ptx.select(takes_larger, larger_byte, byte)


def _squared_error(words: list, scale: Float32, values: list) -> Float32:
    """Return the sum of the squared differences between ``values`` and the decoded codes of two words times ``scale``,
    whose decoded values are e2m1 · 2^-14. Neighbouring squares are added first, then neighbouring sums, and so on."""
    errors: dict = {}
    for w, word in enumerate(words):
        for pair, (low, high) in zip(float16_pairs(word), ((0, 2), (1, 3), (4, 6), (5, 7)), strict=True):
            for half, k in enumerate((low, high)):
                # The product is exact, so this rounds only the difference.
                error = ptx.fma_rn(ptx.unpack_f16(pair, half), scale, -values[8 * w + k])
                errors[8 * w + k] = ptx.mul_rn(error, error)
    sums = [errors[i] for i in range(len(errors))]
    while len(sums) > 1:
        sums = [ptx.add_rn(a, b) for a, b in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0]
