"""PTX types, their values as arrays with one element per thread, and rounding."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32_NAN = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class Type:
    """A PTX type. ``dtype`` is the NumPy dtype of arrays of this type."""

    name: str
    bits: int
    dtype: Any

    @cached_property
    def is_float(self) -> bool:
        return self.name[0] == "f" or self.name.startswith(("bf", "e"))

    @cached_property
    def is_signed(self) -> bool:
        return self.name[0] == "s"


TYPES = {
    f"{kind}{bits}": Type(f"{kind}{bits}", bits, np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}"))
    for kind in "bus"
    for bits in (8, 16, 32, 64)
}
TYPES |= {
    t.name: t
    for t in (
        Type("pred", 1, np.dtype(bool)),
        Type("f16", 16, np.dtype(np.float16)),
        Type("f32", 32, np.dtype(np.float32)),
        Type("f64", 64, np.dtype(np.float64)),
        Type("bf16", 16, np.dtype(np.uint16)),
        Type("f16x2", 32, np.dtype(np.uint32)),
        Type("bf16x2", 32, np.dtype(np.uint32)),
        Type("e4m3x2", 16, np.dtype(np.uint16)),
        Type("e5m2x2", 16, np.dtype(np.uint16)),
        Type("e2m1x2", 8, np.dtype(np.uint8)),
        Type("ue8m0x2", 16, np.dtype(np.uint16)),
    )
}
UNSIGNED = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


def of_each(value: Array | int, threads: Array) -> Array:
    """Return ``value``, which is an array with one value per thread, or a single value to repeat for each thread."""
    if isinstance(value, np.ndarray) and value.shape == threads.shape:
        return value
    return np.broadcast_to(value, threads.shape)


def positions(mask: Array) -> Array:
    """Return the indices of the true elements of a mask. (``np.flatnonzero`` takes three times as long for a hundred
    threads.)"""
    return mask.nonzero()[0]


def any_true(mask: Array) -> bool:
    """Return True if a mask contains a true value. (``mask.any()`` takes three times as long for a hundred threads.)"""
    return np.count_nonzero(mask) > 0


def distinct(values: Array) -> list[Any]:
    """Return the distinct values in ascending order. (``np.unique`` takes three times as long for a hundred values.)"""
    return sorted(set(values.tolist()))


# Rounding and special values of floating-point numbers


def canonical(value: Array) -> Array:
    """Replace every NaN in fp32 results by the NaN that hardware returns."""
    nan = np.isnan(value)
    if any_true(nan):
        bits = np.where(nan, F32_NAN, value.astype(np.float32).view(np.uint32))
        return bits.view(np.float32)
    return value


def flush(value: Array) -> Array:
    """Apply ``.ftz``: replace subnormals by zeros of the same sign."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)


def round_to_odd_sum(a: Array, b: Array) -> Array:
    """Return ``a + b`` of float64 arrays, rounded to odd.

    A further rounding to at most 51 bits then gives the same result as rounding the exact sum (Boldo and Melquiond,
    2008).
    """
    total = a + b
    # Compute the rounding error by TwoSum (Knuth): total + error is the exact sum.
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    inexact = (error != 0) & np.isfinite(total)
    if not any_true(inexact):
        return total
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, odd, total)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """Return ``a * b + c`` of float32 arrays with one rounding. The product is exact in float64."""
    wide = np.float64
    return round_to_odd_sum(a.astype(wide) * b.astype(wide), c.astype(wide)).astype(np.float32)


_ROUNDING = {"rn": np.rint, "rz": np.trunc, "rp": np.ceil, "rm": np.floor}


def round_to(value: Array, significand: int, min_exponent: int, mode: str) -> Array:
    """Round float64 values to ``significand`` bits. Below ``2^min_exponent``, the results are equally spaced.

    ``mode`` is rn, rz, rp (up) or rm (down). Infinities and NaN are not changed. float64 represents the results
    exactly.
    """
    _, exponent = np.frexp(value)
    step = np.ldexp(1.0, np.maximum(exponent - 1, min_exponent) - (significand - 1))
    rounded = _ROUNDING[mode](value / step) * step
    return np.where(np.isfinite(value), np.copysign(rounded, value), value)


def to_f16(value: Array, mode: str = "rn") -> Array:
    """Convert float64 or float32 numbers to the bits of fp16."""
    if mode == "rn":
        half = value.astype(np.float16)
    else:
        cut = round_to(value.astype(np.float64), 11, -14, mode)
        half = np.where(np.isfinite(value), np.clip(cut, -65504.0, 65504.0), value).astype(np.float16)
    return np.where(np.isnan(half), np.uint16(0x7FFF), half.view(np.uint16))


_BELOW_BF16, _BELOW_HALF_OF_BF16 = np.uint64((1 << 45) - 1), np.uint64((1 << 44) - 1)
"""Two masks of the float64 bits that bf16 drops: of all dropped bits, and of all dropped bits except the highest."""


def to_bf16(value: Array, mode: str = "rn") -> Array:
    """Convert float64 or float32 numbers to the bits of bf16."""
    wide = value.astype(np.float64)
    if mode == "rn" and not any_true((np.abs(wide) < 2.0**-126) & (wide != 0)):
        # bf16 drops the low 45 bits of a float64's significand. To round, add half a unit of the lowest remaining bit.
        # If this bit is 0, add slightly less, so that ties go to even.
        bits = wide.view(np.uint64)
        carried = bits + (_BELOW_HALF_OF_BF16 + (bits >> np.uint64(45) & np.uint64(1)))
        cut = (carried & ~_BELOW_BF16).view(np.float64)
        cut = np.where(np.isnan(wide), wide, cut)
    else:
        cut = round_to(wide, 8, -126, mode)
    if mode == "rz":
        largest = float(np.uint32(0x7F7F0000).view(np.float32))
        cut = np.where(np.isfinite(value), np.clip(cut, -largest, largest), cut)
    bits = (cut.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(cut), np.uint16(0x7FFF), bits)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _tiny_values(exponent_bits: int, significand_bits: int, count: int) -> Array:
    """Return the values of the codes 0 to ``count - 1`` of a small unsigned format."""
    codes = np.arange(count)
    exponent, fraction = codes >> significand_bits, codes & ((1 << significand_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + fraction / (1 << significand_bits)) * np.exp2((exponent - bias).astype(float))
    subnormal = fraction / (1 << significand_bits) * 2.0 ** (1 - bias)
    return np.where(exponent > 0, normal, subnormal)


@dataclass(frozen=True)
class Tiny:
    """A format of at most 8 bits. ``values`` are its finite non-negative values, in the order of their codes."""

    significand: int
    values: Array
    sign: int
    nan: int

    @cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return round(math.log2(self.values[1])) + self.significand - 1

    def encode(self, value: Array) -> Array:
        """Encode values: round to nearest even, and saturate."""
        wide = value.astype(np.float64)
        cut = np.minimum(np.abs(round_to(wide, self.significand, self.min_exponent, "rn")), self.values[-1])
        codes = self.values.searchsorted(cut)
        codes = codes | np.where(np.signbit(value), self.sign, 0)
        return np.where(np.isnan(wide), self.nan, codes).astype(np.uint16)

    def decode(self, codes: Array) -> Array:
        """Decode codes to fp16, which represents all values of the format."""
        return self._halves[codes & (2 * self.sign - 1)]

    @cached_property
    def _halves(self) -> Array:
        """Return the fp16 value of each code."""
        magnitude = np.concatenate([self.values, np.full(self.sign - len(self.values), np.nan)])
        return np.concatenate([magnitude, -magnitude]).astype(np.float16)


TINY = {
    "e4m3x2": Tiny(4, _tiny_values(4, 3, 0x7F), 0x80, 0x7F),
    "e5m2x2": Tiny(3, _tiny_values(5, 2, 0x7C), 0x80, 0x7F),
    "e2m1x2": Tiny(2, _tiny_values(2, 1, 8), 0x8, 0x7),
}


def product(left: Array, right: Array) -> Array:
    """Return ``left @ right``, computed a few rows at a time.

    Such small products need no BLAS threads: on busy cores, products with several threads took ten times as long.
    """
    rows = max((1 << 18) // right.size, 1)
    return np.concatenate([left[i : i + rows] @ right for i in range(0, len(left), rows)])


E2M1 = np.concatenate([TINY["e2m1x2"].values, -TINY["e2m1x2"].values])
"""Value of each FP4 code, indexed by the code."""


def _bytes_values(tiny: Tiny, *beyond: float) -> Array:
    """Return the value of each code of an 8-bit format. ``beyond`` are the values of the codes that are not finite."""
    values = np.append(tiny.values, beyond)
    return np.concatenate([values, -values])


E4M3 = _bytes_values(TINY["e4m3x2"], np.nan)
E5M2 = _bytes_values(TINY["e5m2x2"], np.inf, np.nan, np.nan, np.nan)
"""Value of each FP8 code, indexed by the code."""
SCALES = {
    # PTX ignores the sign bit of a ue4m3 code, so the table contains each value twice.
    "ue4m3": np.tile(np.append(TINY["e4m3x2"].values, np.nan), 2),
    "ue8m0": np.append(np.exp2(np.arange(255.0) - 127), np.nan),
}
"""Value of each scale code, keyed by the format."""


def halves(word: Array) -> tuple[Array, Array]:
    return (word & np.uint32(0xFFFF)).astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)


def join(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
