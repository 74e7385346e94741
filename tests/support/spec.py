"""Second implementation of numerics and layouts, in NumPy and exact rational numbers, based only on the text of the
specification.

This module does not import the package, so that expected results do not depend on the code under test. Functions whose
names end in ``_exact`` search a list of values with ``fractions.Fraction``; ``test_formats.py`` checks the vectorised
functions against them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDARIES = tuple((a + b) / 2 for a, b in itertools.pairwise(E2M1))
FLT_MAX = float(np.finfo(np.float32).max)


# Functions of a single number


def nearest_even_exact(value: Fraction, codes: tuple[Fraction, ...]) -> int:
    """Return the index of the entry of ``codes`` that is nearest to ``value``; in a tie, return the even index. The
    entries of ``codes`` are in ascending order."""
    return min(range(len(codes)), key=lambda i: (abs(codes[i] - value), i % 2))


_E2M1_EXACT = tuple(map(Fraction, E2M1))


def e2m1_exact(value: float) -> int:
    """Return the 4-bit code of a finite number: rounded to nearest even, saturating, with a signed zero."""
    sign = 8 if math.copysign(1.0, value) < 0 else 0
    return sign | nearest_even_exact(Fraction(abs(value)), _E2M1_EXACT)


def e4m3_value(byte: int) -> float:
    """Return the value of an OCP FP8 e4m3 byte: bias 7, 3 mantissa bits, no infinity; 0x7F and 0xFF are NaN."""
    sign, exponent, significand = -1.0 if byte >> 7 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * significand * 2.0**-9
    return sign * (8 + significand) * 2.0 ** (exponent - 10)


E4M3_POSITIVE = np.array([e4m3_value(byte) for byte in range(0x7F)])
_E4M3_EXACT = tuple(map(Fraction, E4M3_POSITIVE.tolist()))


def e4m3_exact(value: float) -> int:
    """Return the e4m3 byte of a number: rounded to nearest even, saturating at 448; 0x7F for NaN."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    return sign | nearest_even_exact(Fraction(min(abs(value), 448.0)), _E4M3_EXACT)


def ue8m0_of_amax_exact(amax: float, largest: int = 6) -> int:
    """Return the byte of ``2^ceil(log2(amax / largest))``, clamped to [2^-127, 2^127]; 255 if ``amax`` is not finite.
    ``largest`` is 6 for e2m1 and 448 for e4m3."""
    if not math.isfinite(amax):
        return 255
    wanted = Fraction(amax) / largest
    return next(byte for byte in range(255) if byte == 254 or Fraction(2) ** (byte - 127) >= wanted)


def ue8m0_value(byte: int) -> float:
    return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)


# Functions of arrays


def _round(magnitude: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Round non-negative numbers to the nearest entries of ``values``, and return the indices of these entries. In a
    tie, the even index is chosen."""
    boundaries = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(boundaries, magnitude, side="left")
    tie = (code < len(boundaries)) & (boundaries[np.minimum(code, len(boundaries) - 1)] == magnitude)
    return (code + (tie & (code % 2 == 1))).astype(np.uint8)


def e2m1(value: np.ndarray) -> np.ndarray:
    """Return the e2m1 codes, 0 to 15, of numbers without NaN."""
    value = np.asarray(value, np.float64)
    return _round(np.abs(value), np.array(E2M1)) | (np.signbit(value).astype(np.uint8) << 3)


def e2m1_value(code: np.ndarray) -> np.ndarray:
    return np.array([*E2M1, *(-v for v in E2M1)], np.float32)[code]


def e4m3(value: np.ndarray) -> np.ndarray:
    """Return e4m3 bytes of numbers; 0x7F for NaN."""
    value = np.asarray(value, np.float64)
    byte = _round(np.nan_to_num(np.abs(value), posinf=1e9), E4M3_POSITIVE) | (np.signbit(value).astype(np.uint8) << 7)
    return np.where(np.isnan(value), 0x7F, byte).astype(np.uint8)


def near_e4m3_boundary(value: np.ndarray, relative: float = 2.0**-18) -> np.ndarray:
    """Return a mask of the numbers within this relative distance of a rounding boundary of e4m3."""
    return _near_boundary(value, E4M3_POSITIVE, relative)


def near_e2m1_boundary(value: np.ndarray, relative: float = 2.0**-18) -> np.ndarray:
    """Return a mask of the numbers within this relative distance of a rounding boundary of e2m1."""
    return _near_boundary(value, np.array(E2M1), relative)


def _near_boundary(value: np.ndarray, values: np.ndarray, relative: float) -> np.ndarray:
    magnitude = np.nan_to_num(np.abs(np.asarray(value, np.float64)), posinf=1e9)
    boundaries = np.append((values[1:] + values[:-1]) / 2, np.inf)
    above = np.searchsorted(boundaries, magnitude)
    distance = np.minimum(boundaries[above] - magnitude, magnitude - boundaries[np.maximum(above - 1, 0)])
    return np.abs(distance) <= relative * magnitude


def ue8m0_of_amax(amax: np.ndarray, largest: int = 6) -> np.ndarray:
    """Compute ``ue8m0_of_amax_exact`` for arrays. With amax/largest = f·2^e and f in [1/2, 1), the scale is 2^e, or
    2^(e-1) if f = 1/2.

    The division rounds, but the quotient has more than twice as many bits as amax, so that rounding never reaches a
    power of two.
    """
    fraction, exponent = np.frexp(np.nan_to_num(np.asarray(amax, np.float64), posinf=1.0) / largest)
    power = np.where(fraction == 0.5, exponent - 1, exponent)
    power = np.where(fraction == 0, -127, np.clip(power, -127, 127))
    return np.where(np.isfinite(amax), power + 127, 255).astype(np.uint8)


@cache
def _scale_values(scale_format: str) -> np.ndarray:
    decode = e4m3_value if scale_format == "e4m3" else ue8m0_value
    return np.array([decode(byte) for byte in range(256)], np.float32)


def scale_value(byte: np.ndarray, scale_format: str) -> np.ndarray:
    return _scale_values(scale_format)[byte]


# Layouts


def layout_shape(layout: str, rows: int, blocks: int) -> tuple[int, ...]:
    """Return the shape, in this layout, of the scales of ``rows`` rows with ``blocks`` blocks each."""
    if layout == "linear":
        return rows, blocks
    rows_of_tile, *inner = {"128x4": (128, 32, 4, 4), "8x4": (8, 8, 4)}[layout]
    return math.ceil(rows / rows_of_tile), math.ceil(blocks / 4), *inner


def layout_named(name: str | None, scale: Any) -> str:
    """Return the layout that a call names. If the call names no layout, derive it from the shape of a GEMM operand's
    scales."""
    if name is not None:
        return name
    shape = tuple(scale.shape)
    return "128x4" if shape[2:] == (32, 4, 4) else "8x4" if shape[2:] == (8, 4) else "linear"


def layout_offset(layout: str, m: int | np.ndarray, k: int | np.ndarray, blocks: int) -> int | np.ndarray:
    """Return the position, in this layout, of the scale of row ``m`` and block ``k``, counted in scales."""
    kt = math.ceil(blocks / 4)
    if layout == "linear":
        return m * blocks + k
    if layout == "128x4":
        return (m // 128 * kt + k // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4
    return (m // 8 * kt + k // 4) * 32 + (m % 8) * 4 + k % 4


def _offsets(layout: str, rows: int, blocks: int) -> np.ndarray:
    return np.asarray(layout_offset(layout, np.arange(rows)[:, None], np.arange(blocks)[None, :], blocks))


def arrange(scale: np.ndarray, layout: str) -> np.ndarray:
    """Convert a (rows, blocks) matrix of scale bytes to ``layout``, with zeros as padding."""
    shape = layout_shape(layout, *scale.shape)
    flat = np.zeros(math.prod(shape), np.uint8)
    flat[_offsets(layout, *scale.shape)] = scale
    return flat.reshape(shape)


def collect(scale: np.ndarray, layout: str, rows: int, blocks: int) -> np.ndarray:
    """Convert scale bytes in ``layout`` back to a (rows, blocks) matrix."""
    return scale.reshape(-1)[_offsets(layout, rows, blocks)]


# FP4 blocks


@dataclass(frozen=True)
class Quantised:
    """Quantised matrix: codes (rows, K) and scale bytes (rows, blocks)."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def packed(self) -> np.ndarray:
        """Codes packed into bytes, element 0 in the low nibble."""
        return self.codes[:, 0::2] + 16 * self.codes[:, 1::2]


def quantise(value: np.ndarray, block_size: int, global_scale: float | np.ndarray | None = None) -> Quantised:
    """Quantise fp32 rows (M, K) step by step, as the specification says; each operation rounds to fp32."""
    assert value.dtype == np.float32 and value.ndim == 2
    rows, width = value.shape
    blocks = value.reshape(rows, width // block_size, block_size)
    bad = ~np.isfinite(blocks).all(-1)
    amax = np.abs(np.where(bad[..., None], np.float32(0), blocks)).max(-1)
    with np.errstate(all="ignore"):
        if block_size == 32:
            scales = ue8m0_of_amax(amax)
            quotient = blocks.astype(np.float64) / scale_value(scales, "ue8m0")[..., None].astype(np.float64)
            dead = bad | (amax == 0)
        else:
            g = np.float32(1 if global_scale is None else global_scale)
            scales = e4m3((amax * g) * np.float32(1 / 6))
            s = scale_value(scales, "e4m3")
            dead = bad | (s == 0)
            inverse = np.where(s == 0, np.float32(0), g / np.where(s == 0, np.float32(1), s)).astype(np.float32)
            quotient = blocks * inverse[..., None]
    codes = e2m1(np.where(dead[..., None], 0.0, quotient))
    scales = np.where(bad, {16: 0x7F, 32: 0xFF}[block_size], scales).astype(np.uint8)
    return Quantised(codes.reshape(rows, width), scales)


def quantise_four_over_six(value: np.ndarray, global_scale: float | None = None) -> Quantised:
    """Quantise fp32 rows (M, K) to NVFP4, each block with the scale of two that has the smaller sum of squared errors;
    each operation rounds to fp32."""
    g = np.float32(1 if global_scale is None else global_scale)
    blocks = value.reshape(len(value), value.shape[1] // 16, 16)
    bad = ~np.isfinite(blocks).all(-1)
    blocks = np.where(bad[..., None], np.float32(0), blocks)
    best = codes = scales = None
    with np.errstate(all="ignore"):
        sixth = (np.abs(blocks).max(-1) * g) * np.float32(1 / 6)
        for wanted in (sixth, sixth * np.float32(1.5)):
            byte = e4m3(wanted)
            s = scale_value(byte, "e4m3")
            inverse = np.where(s == 0, np.float32(0), g / np.where(s == 0, np.float32(1), s)).astype(np.float32)
            code = e2m1(np.where((s == 0)[..., None], 0.0, blocks * inverse[..., None]))
            squares = np.square(e2m1_value(code) * s[..., None] - blocks * g)
            while squares.shape[-1] > 1:
                squares = squares[..., ::2] + squares[..., 1::2]
            error = squares[..., 0]
            assert error.dtype == np.float32
            if best is None:
                best, codes, scales = error, code, byte
            else:
                better = error < best
                codes, scales = np.where(better[..., None], code, codes), np.where(better, byte, scales)
    scales = np.where(bad, 0x7F, scales).astype(np.uint8)
    return Quantised(np.where(bad[..., None], 0, codes).reshape(value.shape).astype(np.uint8), scales)


def quantise_per_token(value: np.ndarray) -> tuple[Quantised, np.ndarray]:
    """Quantise fp32 rows (M, K) to NVFP4 with a scale per row, and return these row scales, (M,) fp32.

    Each operation rounds to the 24 significant bits of fp32, but exponents are not limited.
    """
    assert value.dtype == np.float32 and value.ndim == 2
    exact = value.astype(np.float64)
    bad = ~np.isfinite(exact).all(-1)
    exact = np.where(bad[:, None], 0.0, exact)
    blocks = exact.reshape(len(value), value.shape[1] // 16, 16)
    amax = np.abs(exact).max(-1)
    dead = amax < 2688 * 2.0**-126
    row_scale = np.where(dead, 0.0, to_24_bits(amax / 2688))
    g = to_24_bits(1 / np.where(dead, 1.0, row_scale))[:, None]
    product = np.where(dead[:, None], 0.0, to_24_bits(np.abs(blocks).max(-1) * g))
    scales = e4m3(to_24_bits(product * float(np.float32(1 / 6))))
    s = scale_value(scales, "e4m3").astype(np.float64)
    inverse = np.where(s == 0, 0.0, to_24_bits(g / np.where(s == 0, 1.0, s)))
    codes = e2m1(np.where((s == 0)[..., None], 0.0, to_24_bits(blocks * inverse[..., None])))
    scales = np.where(bad[:, None], 0x7F, scales).astype(np.uint8)
    return Quantised(codes.reshape(value.shape), scales), np.where(bad, np.nan, row_scale).astype(np.float32)


def to_24_bits(value: np.ndarray) -> np.ndarray:
    """Round float64 numbers to 24 significant bits: to nearest, ties to even. Exponents are not limited."""
    fraction, exponent = np.frexp(value)
    return np.ldexp(np.rint(np.ldexp(fraction, 24)), exponent - 24)


def dequantise(codes: np.ndarray, scales: np.ndarray, global_scale: float | np.ndarray | None = None) -> np.ndarray:
    """Decode codes (M, K) with scale bytes (M, blocks) to fp32: one product, then one quotient, each rounded to
    fp32."""
    rows, blocks = scales.shape
    block_size = codes.shape[1] // blocks
    with np.errstate(all="ignore"):
        decoded = scale_value(scales, {16: "e4m3", 32: "ue8m0"}[block_size])
        value = e2m1_value(codes).reshape(rows, blocks, block_size) * decoded[..., None]
        if global_scale is not None:
            value = value / np.float32(global_scale)
    return value.reshape(codes.shape)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Unpack bytes (M, K/2) to codes (M, K)."""
    return np.stack((packed % 16, packed // 16), -1).reshape(packed.shape[0], 2 * packed.shape[1])


# FP8


def quantise_fp8(
    value: np.ndarray, granularity: str, scale: float | None = None, scale_format: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise fp32 rows to e4m3 bytes (M, K) and scales: (1,) fp32 if the scale is given, otherwise (M, scales per
    row). These are uint8 bytes with 32 elements per scale, and fp32 otherwise.

    With 128 elements per scale, the last block of a row may contain 64 elements. With 32 elements per scale, or if
    ``scale_format`` is "ue8m0", scales are powers of two.
    """
    assert value.dtype == np.float32 and value.ndim == 2
    with np.errstate(all="ignore"):
        if granularity == "tensor":
            return e4m3(value / np.float32(scale)), np.array([scale], np.float32)
        codes, scales = [], []
        for block in fp8_blocks(value, granularity):
            assert block.shape[1] % 64 == 0 or granularity == "token" or block.shape[1] == 32
            bad = ~np.isfinite(block).all(-1)
            amax = np.abs(np.where(bad[:, None], np.float32(0), block)).max(-1)
            if granularity == "block32" or scale_format == "ue8m0":
                byte = np.where(bad, 255, ue8m0_of_amax(amax, 448)).astype(np.uint8)
                power = scale_value(byte, "ue8m0")
                code = e4m3(np.where(bad[:, None], 0, block).astype(np.float64) / np.where(bad, 1, power)[:, None])
                codes.append(np.where((bad | (amax == 0))[:, None], 0, code).astype(np.uint8))
                scales.append(byte if granularity == "block32" else power)
                continue
            quotient = amax / np.float32(448)
            dead = bad | (quotient == 0)
            code = e4m3(block / np.where(dead, np.float32(1), quotient)[:, None])
            codes.append(np.where(dead[:, None], 0, code).astype(np.uint8))
            scales.append(np.where(bad, np.float32(np.nan), quotient))
    return np.concatenate(codes, 1), np.stack(scales, 1)


def fp8_blocks(value: np.ndarray, granularity: str) -> list[np.ndarray]:
    """Split rows (M, K) into column ranges whose elements share a scale within each row."""
    step = {"token": value.shape[1], "block128": 128, "block32": 32}[granularity]
    return [value[:, begin : begin + step] for begin in range(0, value.shape[1], step)]


# Steps before quantisation

FLOATS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}
"""Bits of the significand, and exponent of the smallest normal number. The largest number follows from them as in IEEE
754."""


def round_to(value: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 numbers once to ``dtype``: to nearest, ties to even."""
    bits, lowest = FLOATS[dtype]
    largest = (2 - 2.0 ** (1 - bits)) * 2.0 ** (1 - lowest)
    _, exponent = np.frexp(value)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, lowest) - (bits - 1))
    with np.errstate(all="ignore"):
        rounded = np.rint(value / quantum) * quantum
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, value), rounded)


def add(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Add numbers of ``dtype`` in float64, and round the sum once to ``dtype``. An intermediate rounding to fp32 would
    give the same result."""
    with np.errstate(all="ignore"):
        return round_to(a.astype(np.float64) + b.astype(np.float64), dtype)


def silu_mul(value: np.ndarray) -> np.ndarray:
    """Return ``a / (1 + exp(-a)) · b`` for the halves a and b of rows (M, 2I), rounded to fp32 after each of the two
    products. If exp(-a) exceeds fp32, it is infinite."""
    gate, up = np.split(value.astype(np.float32), 2, axis=-1)
    with np.errstate(all="ignore"):
        return _gated(gate, gate) * up


def swiglu(value: np.ndarray, alpha: float, beta: float, limit: float | None) -> np.ndarray:
    """Return ``g · sigmoid(alpha · g) · (u + beta)`` for the halves g and u of rows (M, 2I). Both halves are clamped to
    ``limit``, g only from above.

    Each of ``alpha · g``, ``g · sigmoid``, the sum and the last product is rounded to fp32; the sigmoid is computed as
    in ``silu_mul``.
    """
    gate, up = np.split(value.astype(np.float32), 2, axis=-1)
    with np.errstate(over="ignore"):
        limit = np.float32(np.inf if limit is None else limit)
    gate = np.where(gate > limit, limit, gate)
    up = np.where(np.abs(up) > limit, np.copysign(limit, up), up)
    with np.errstate(all="ignore"):
        return _gated(gate, gate * np.float32(alpha)) * (up + np.float32(beta))


def gelu_mul(value: np.ndarray, gate: str) -> np.ndarray:
    """Return ``gelu(a) · b`` for the halves a and b of rows (M, 2I), rounded to fp32 after each of the two products.

    With ``gate="gelu_tanh"``, tanh is written as a sigmoid, whose argument is computed in fp32 steps.
    """
    first, up = np.split(value.astype(np.float32), 2, axis=-1)
    with np.errstate(all="ignore"):
        if gate == "gelu_tanh":
            slope = np.float32(math.sqrt(8 / math.pi))
            cubic = np.float32(math.sqrt(8 / math.pi) * 0.044715)
            return _gated(first, first * (first * first * cubic + slope)) * up
        phi = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2, otypes=[np.float64])(first.astype(np.float64))
        return (first.astype(np.float64) * phi.astype(np.float32)).astype(np.float32) * up


def relu2_mul(value: np.ndarray) -> np.ndarray:
    """Return ``max(a, 0)² · b`` for the halves a and b of rows (M, 2I), rounded to fp32 after each product."""
    first, up = np.split(value.astype(np.float32), 2, axis=-1)
    with np.errstate(all="ignore"):
        positive = np.where(first < 0, np.float32(0), first)
        return positive * positive * up


def _gated(value: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """Return ``value · sigmoid(gate)``, computed in float64 and rounded to fp32. The sigmoid is 0 if exp(-gate) exceeds
    fp32."""
    exponential = np.exp(-gate.astype(np.float64))
    return (value.astype(np.float64) / (1 + np.where(exponential > FLT_MAX, np.inf, exponential))).astype(np.float32)


# Norms


def rms_norm(
    value: np.ndarray, weight: np.ndarray, eps: float, bias: np.ndarray | None = None, subtracts_mean: bool = False
) -> np.ndarray:
    """Return ``v / sqrt(mean(v²) + eps) · w + bias`` for rows v (M, H), in float64. Results are infinite if an fp32
    step would overflow. With ``subtracts_mean``, the row's mean is first subtracted from v."""
    with np.errstate(all="ignore"):
        if subtracts_mean:
            total = value.astype(np.float64).sum(-1, keepdims=True)
            total = np.where(np.abs(total) > FLT_MAX, np.copysign(np.inf, total), total)
            value = value.astype(np.float64) - total / value.shape[-1]
        squares = (value.astype(np.float32) * value.astype(np.float32)).astype(np.float64)
        total = squares.sum(-1, keepdims=True)
        total = np.where(total > FLT_MAX, np.inf, total)
        rstd = 1 / np.sqrt(total / value.shape[-1] + eps)
        norm = value.astype(np.float64) * rstd * weight.astype(np.float64)
        return norm if bias is None else norm + bias.astype(np.float64)
