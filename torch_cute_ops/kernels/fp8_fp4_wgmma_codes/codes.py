"""Device code that converts MXFP4 codes to e4m3 numbers without scales, and MXFP4 scales to fp32 factors.

By definition (``reference.mm_fp8_fp4``), the numbers of a k tile are divided by its unit ``2^t`` and rounded to e4m3.
The largest scale of the k tile is ``2^(t + 6)``. The rounded numbers are multiples of ``2^(t - 9)``, which is ``2^t``
times e4m3's smallest subnormal number. In multiples of ``2^(t - 9)``, a block with the scale ``2^(t + 6 - d)`` consists
of the numbers ``code · 2^(15 - d)``. For ``d`` up to 14, these are integers, and nothing is rounded. For ``d`` of 15
and above, the numbers are rounded to 0, 1, 2, 3, 4 or 6, which e2m1 codes with the scale ``2^(t - 9)`` represent.
"""

import functools
from typing import Final

import cutlass
from cutlass import Boolean, Int32, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp4.codes import E4M3_EXPONENT

CODE_SCALE: Final = 2.0**E4M3_EXPONENT
"""Factor that converts codes in e4m3 (``e4m3_words``) to their values."""
_ONE: Final = 1 << 23
"""One step of the exponent field of fp32."""
_NAN_FIELD: Final = 0xFF << 23
"""Exponent field of fp32 that belongs to the scale byte NaN (0xFF)."""
_NAN: Final = 0x7FC00000
_LEAST: Final = 0x00400000
"""Bits of 2^-127, the value of the scale byte 0, in fp32."""
_EXACT: Final = 14
"""Largest ``d`` (see the module docstring) for which codes are not rounded."""
_ROUNDED: Final = ((0x04020000, 0x07060504), (0x02000000, 0x05040402), (0, 0x04020200), (0, 0x02000000))
"""Rounded codes of the eight magnitudes, one byte each, for ``d`` = 15, 16, 17 and 18."""


def block_factors(scales: Uint32) -> list:
    """Return the scales of a row's four blocks as bits of fp32.

    For the scale bytes 0 and NaN, the returned bits are wrong; ``hard_factors`` corrects them.
    """
    shifted = (scales << 23, scales << 15, scales << 7, scales >> 1)
    return [word & Uint32(_NAN_FIELD) for word in shifted]


def is_easy(factors: list) -> Boolean:
    """Return True if the results of ``block_factors`` are final: no scale byte is 0 or NaN, and no code is rounded."""
    fields = [Int32(factor) for factor in factors]
    most, least = functools.reduce(cutlass.max, fields), functools.reduce(cutlass.min, fields)
    return (least > 0) & (most < Int32(_NAN_FIELD)) & (most - least <= _EXACT * _ONE)


def hard_factors(factors: list) -> tuple[list, Uint32]:
    """For a row for which ``is_easy`` is False, return the blocks' factors, and each block's argument ``amount`` for
    ``rounded``.

    The amounts are the bytes of a word.
    """
    fields = [Int32(factor) for factor in factors]
    is_nan = [field == Int32(_NAN_FIELD) for field in fields]
    alive = [ptx.select(nan, Int32(0), field) for nan, field in zip(is_nan, fields, strict=True)]
    most = functools.reduce(cutlass.max, alive)
    found, amounts = [], Uint32(0)
    for i, (nan, field) in enumerate(zip(is_nan, fields, strict=True)):
        factor = cutlass.max(field, most - (_EXACT + 1) * _ONE)
        factor = ptx.select(factor == 0, Uint32(_LEAST), Uint32(factor))
        found.append(ptx.select(nan, Uint32(_NAN), factor))
        amount = cutlass.min(cutlass.max((most - field >> 23) - _EXACT, Int32(0)), Int32(len(_ROUNDED) + 1))
        amounts |= ptx.select(nan, Uint32(0), Uint32(amount)) << 8 * i
    return found, amounts


def rounded(codes: Uint32, amount: Uint32) -> Uint32:
    """Round eight codes of a block whose ``d`` (see the module docstring) is ``14 + amount``. An ``amount`` of 0 leaves
    the codes unchanged."""
    low, high = Uint32(0), Uint32(0)
    for i, table in enumerate(((0x03020100, 0x07060504), *_ROUNDED)):
        low, high = (
            ptx.select(amount == Uint32(i), Uint32(new), old) for new, old in zip(table, (low, high), strict=True)
        )
    magnitudes = codes & Uint32(0x77777777)
    halves = [ptx.prmt_by(low, high, magnitudes >> 16 * i) for i in range(2)]
    # Each code takes a byte. Pack two neighbouring codes into one byte.
    pairs = [half | half >> 4 for half in halves]
    return ptx.prmt(pairs[0], pairs[1], 0x6420) | codes & Uint32(0x88888888)
