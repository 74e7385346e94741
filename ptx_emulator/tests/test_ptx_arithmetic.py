"""Test single arithmetic instructions against independent computations."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from formats import e2m1_value, e4m3, scale_value
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import AT, HALVES, entry, launch, zeros

from ptx_emulator.arithmetic import PURE, Op
from ptx_emulator.values import TYPES


def compute(opcode: str, *operands: Any) -> np.ndarray:
    """Execute one instruction on ``operands``, which are arrays of the instruction's types."""
    parts = opcode.split(".")
    name = next(".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in PURE)
    rest = parts[name.count(".") + 1 :]
    types = tuple(TYPES[part] for part in rest if part in TYPES)
    op = Op(opcode, frozenset(part for part in rest if part not in TYPES), types)
    assert op.mods <= PURE[name].mods
    with np.errstate(all="ignore"):
        return PURE[name].function(op, *(np.atleast_1d(operand) for operand in operands))


def f32(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def rounded(
    exact: Fraction, significand: int, min_exponent: int, max_exponent: int, toward_zero: bool = False
) -> float:
    """Round to the nearest value of a format with ties to even, or if ``toward_zero``, toward zero."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, min_exponent) - significand + 1)
    steps = magnitude // step if toward_zero else round(magnitude / step)
    largest = Fraction(2) ** (max_exponent + 1) - Fraction(2) ** (max_exponent - significand + 1)
    result = steps * step
    if result > largest:
        result = largest if toward_zero else float("inf")
    return float(result) if exact > 0 else -float(result)


floats = st.integers(0, 2**32 - 1).map(f32).filter(np.isfinite)
near = st.builds(lambda bits, exponent: f32(bits | (exponent << 23)), st.integers(0, 2**23 - 1), st.integers(100, 154))
signed = st.builds(lambda value, sign: value * np.float32(sign), near, st.sampled_from([1, -1]))


@given(st.lists(st.tuples(floats | signed, floats | signed, floats | signed), min_size=20, max_size=60))
@example([(f32(0x3F800001), f32(0x3F800001), f32(0xBF800002)), (f32(0x3F7FFFFF), f32(0x3F7FFFFF), f32(0x33800000))])
@example([(f32(0x00800000), f32(0x3F000001), f32(0x80000001)), (f32(0x3F800001), f32(0x33800001), f32(0x4B800001))])
@settings(max_examples=30, deadline=None)
def test_fma_rounds_once(rows: list) -> None:
    a, b, c = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    got = compute("fma.rn.f32", a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert float(result) == rounded(exact, 24, -126, 127), (x, y, z)


@given(st.lists(floats | signed, min_size=50, max_size=100))
@settings(max_examples=20, deadline=None)
def test_conversion_to_halves(values: list) -> None:
    x = np.array(values, np.float32)
    high = np.roll(x, 1)
    for opcode, formats, toward_zero in (
        ("cvt.rn.f16x2.f32", (11, -14, 15), False),
        ("cvt.rz.f16x2.f32", (11, -14, 15), True),
        ("cvt.rn.bf16x2.f32", (8, -126, 127), False),
        ("cvt.rz.bf16x2.f32", (8, -126, 127), True),
    ):
        got = compute(opcode, high, x)
        low = (got & np.uint32(0xFFFF)).astype(np.uint16)
        assert ((got >> np.uint32(16)).astype(np.uint16) == np.roll(low, 1)).all()
        values = (low.astype(np.uint32) << np.uint32(16)).view(np.float32) if "bf16" in opcode else low.view(np.float16)
        want = [rounded(Fraction(float(value)), *formats, toward_zero) for value in x]
        assert values.astype(np.float64).tolist() == want
        assert (np.signbit(values) == np.signbit(x)).all()


@pytest.mark.parametrize("name", HALVES)
def test_packed_halves(name: str) -> None:
    """Check that sums and products are rounded as in torch, and that ``fma`` rounds once. Operands are random bits and
    all pairs of special values."""
    dtype, form, special = HALVES[name]
    some = np.array([*special, *(bits | 0x8000 for bits in special)], np.uint16)
    random = np.random.default_rng(0).integers(1 << 16, size=(3, 1 << 16), dtype=np.uint16)
    # Also test operands of similar magnitude, whose sum or difference cancels.
    random[1, ::2] = random[0, ::2] ^ (random[2, ::2] & 0x83FF)
    a, b = np.concatenate([np.stack(np.meshgrid(some, some)).reshape(2, -1), random[:2]], 1)
    a, b, c = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b, np.roll(a, 3) ^ 0x0101))

    def values(words: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(words.view(np.int16)).view(dtype)

    one, minus_zero = np.uint32(special[4] * 0x10001), np.uint32(0x80008000)
    for want, forms in (
        (values(a) + values(b), {"add.rn": (a, b), "add": (a, b), "fma.rn": (a, one, b)}),
        (values(a) * values(b), {"mul.rn": (a, b), "mul": (a, b), "fma.rn": (a, b, minus_zero)}),
        (values(a) - values(b), {"sub.rn": (a, b)}),
    ):
        bits = np.where(want.isnan().numpy(), 0x7FFF, want.view(torch.int16).numpy()).astype(np.uint16)
        for opcode, operands in forms.items():
            assert (compute(f"{opcode}.{name}x2", *operands).view(np.uint16) == bits).all(), opcode
    body = f"{AT} ld.global.b32 %r1, [%rd9]; add.rn.{name}x2 %r1, %r1, %r1; st.global.b32 [%rd9], %r1;"
    assert (launch(entry(body, params=1), a[:64], block=64)[0] == compute(f"add.{name}x2", a[:64], a[:64])).all()

    fma = compute(f"fma.rn.{name}x2", a, b, c)
    for x, y, z, got in zip(*(values(words)[::16].tolist() for words in (a, b, c, fma)), strict=True):
        if np.isfinite([x, y, z]).all():
            assert got == rounded(Fraction(x) * Fraction(y) + Fraction(z), *form), (x, y, z)


def test_conversion_to_e4m3() -> None:
    x = np.concatenate([np.float32(scale_value(np.arange(127), "e4m3")), [1e9, np.nan, np.inf, 1e-9]])
    middle = (x[:126].astype(np.float64) + x[1:127]) / 2
    x = np.concatenate([x, middle, np.nextafter(middle.astype(np.float32), np.float32(np.inf))]).astype(np.float32)
    got = compute("cvt.rn.satfinite.e4m3x2.f32", np.zeros_like(x), x)
    assert (got == e4m3(x)).all()
    nonzero = ~np.isnan(x)
    negative = compute("cvt.rn.satfinite.e4m3x2.f32", -x, np.zeros_like(x))
    assert (negative[nonzero] == (e4m3(x)[nonzero].astype(np.uint16) | 0x80) << 8).all()


def test_e4m3_to_halves() -> None:
    byte = np.arange(256, dtype=np.uint16)
    got = compute("cvt.rn.f16x2.e4m3x2", byte | (np.uint16(0x3C) << np.uint16(8)))
    values = (got & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
    want = scale_value(byte & 0x7F, "e4m3") * np.where(byte & 0x80, -1, 1)
    assert np.array_equal(values, want.astype(np.float32), equal_nan=True)
    assert (np.signbit(values) == (byte >= 128))[(byte & 0x7F) != 0x7F].all()


def test_e2m1_to_halves() -> None:
    """Convert each byte of a word to two halves, as kernels that decode weights do."""
    body = f"""
    .reg .b8 %b<4>; {AT} ld.global.b32 %r1, [%rd9];
    mov.b32 {{%b0, %b1, %b2, %b3}}, %r1;
    cvt.rn.f16x2.e2m1x2 %r2, %b0; cvt.rn.f16x2.e2m1x2 %r3, %b1; mul.rn.f16x2 %r3, %r3, %r2;
    mul.wide.u32 %rd8, %r0, 8; add.s64 %rd9, %rd1, %rd8; st.global.v2.b32 [%rd9], {{%r2, %r3}};
    """
    bytes_ = np.arange(256, dtype=np.uint32)
    (_, out) = launch(entry(body), bytes_ | 0x2200, zeros(512), block=256)
    nibbles = np.stack([bytes_ & 15, bytes_ >> 4], 1)
    want = e2m1_value(nibbles).astype(np.float16)
    # Both codes of the second byte are 1, so its halves are the same for every input.
    assert np.array_equal(out.reshape(-1, 2).view(np.float16).reshape(-1, 2, 2), np.stack([want, want], 1))
    assert (np.signbit(out.view(np.float16).reshape(-1, 2, 2)[:, 0]) == (nibbles >= 8)).all()


def test_conversion_to_e2m1() -> None:
    x = np.array(
        [0, 0.25, 0.2500001, 0.75, 1.25, 1.75, 2.5, 3.5, 3.5000002, 5, 5.1, 6, 100, np.inf, np.nan], np.float32
    )
    want = [0, 0, 1, 2, 2, 4, 4, 6, 6, 6, 7, 7, 7, 7, 7]
    assert compute("cvt.rn.satfinite.e2m1x2.f32", np.zeros_like(x), x).tolist() == want
    got = compute("cvt.rn.satfinite.e2m1x2.f32", -x[:-1], np.zeros_like(x[:-1]))
    assert got.tolist() == [(w | 8) << 4 for w in want[:-1]]


def test_conversion_to_ue8m0() -> None:
    x = np.array([1, 1.5, 2, 2.0**-127, 0, np.inf, np.nan, 2.0**-126 * 1.25], np.float32)
    got = compute("cvt.rp.satfinite.ue8m0x2.f32", np.ones_like(x), x)
    assert (got & 0xFF).tolist() == [127, 128, 128, 0, 0, 254, 255, 2]
    assert (got >> 8 == 127).all()


def test_conversion_to_integers() -> None:
    x = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf], np.float32)
    assert compute("cvt.rni.s32.f32", x).tolist() == [2, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    assert compute("cvt.rzi.u32.f32", x).tolist() == [1, 2, 0, 3_000_000_000, 0, 0, 2**32 - 1]
    assert compute("cvt.rn.f32.s32", np.array([16777217, -(2**31)], np.int32)).tolist() == [16777216.0, -(2.0**31)]
    assert compute("cvt.s64.s32", np.array([-5], np.int32)).tolist() == [-5]
    assert compute("cvt.u16.u32", np.array([0x12345], np.uint32)).tolist() == [0x2345]


def test_extremes() -> None:
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    a, b = np.array([1, nan, nan, -0.0, 0.0, -inf], np.float32), np.array([2, 3, nan, 0.0, -0.0, 5], np.float32)
    assert np.array_equal(compute("max.f32", a, b), np.float32([2, 3, nan, 0, 0, 5]), equal_nan=True)
    assert np.array_equal(compute("max.NaN.f32", a, b), np.float32([2, nan, nan, 0, 0, 5]), equal_nan=True)
    assert not np.signbit(compute("max.f32", a, b)[3:5]).any()
    assert np.signbit(compute("min.f32", a, b)[3:5]).all()
    half = np.uint32([0x7E00_C000, 0x3C00_0000]), np.uint32([0x4000_4400, 0x7FFF_8000])
    assert compute("min.f16x2", *half).tolist() == [0x4000_C000, 0x3C00_8000]
    assert compute("abs.f16x2", half[0]).tolist() == [0x7E00_4000, 0x3C00_0000]


def test_every_nan_is_canonical() -> None:
    inf = np.float32([np.inf])
    for result in (compute("add.f32", inf, -inf), compute("mul.rn.f32", inf, np.float32([0]))):
        assert result.view(np.uint32).tolist() == [0x7FFFFFFF]
    assert compute("cvt.rn.bf16x2.f32", np.float32([np.nan]), inf).tolist() == [0x7FFF7F80]


def test_subnormals() -> None:
    tiny = np.array([1, 0x80000001, 0x00800000], np.uint32).view(np.float32)
    assert compute("add.f32", tiny, tiny).view(np.uint32).tolist() == [2, 0x80000002, 0x01000000]
    assert compute("add.ftz.f32", tiny, tiny).view(np.uint32).tolist() == [0, 0x80000000, 0x01000000]
    assert compute("mul.rn.f32", tiny[2:], np.float32([0.5])).view(np.uint32).tolist() == [0x00400000]
    assert compute("div.rn.f32", tiny[2:], np.float32([3])).view(np.uint32).tolist() == [0x002AAAAB]


@pytest.mark.parametrize("table", [0x00, 0x3A, 0x6A, 0x96, 0xCA, 0xE8, 0xEA, 0xF8, 0xFF])
def test_lop3(table: int) -> None:
    """Check that ``lop3`` returns the corresponding bit of its table for each combination of three input bits."""
    given = f"{AT} ld.global.b32 %r1, [%rd9];"
    body = f"{given} lop3.b32 %r2, %r1, 0xCCCCCCCC, 0xAAAAAAAA, {table}; st.global.b32 [%rd9], %r2;"
    (out,) = launch(entry(body, params=1), np.uint32([0xF0F0F0F0, 0x0F0F0F0F]), block=2)
    assert out.view(np.uint8).tolist() == [table] * 4 + [(table << 4 | table >> 4) & 0xFF] * 4


words = st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).map(lambda v: np.array(v, np.uint32))


@given(words, words, st.integers(0, 0x7777))
@settings(max_examples=50, deadline=None)
def test_bytes_and_bits(a: np.ndarray, b: np.ndarray, selector: int) -> None:
    selector &= 0x7777
    bytes_ = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
    chosen = bytes_[:, [selector >> 4 * i & 7 for i in range(4)]]
    assert (compute("prmt.b32", a, b, np.uint32(selector)) == np.ascontiguousarray(chosen).view(np.uint32)[:, 0]).all()
    assert (compute("lop3.b32", a, b, a >> 3, np.uint32(0xCA)) == (a & b | ~a & a >> 3)).all()
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        start, length = y & 31, y >> 8 & 31
        assert compute("bfe.u32", a, b & 31, b >> 8 & 31)[i] == x >> start & ((1 << length) - 1)
        assert compute("shf.l.wrap.b32", a, b, np.uint32(5))[i] == (y << 5 | x >> 27) & 0xFFFFFFFF
        assert compute("mul.hi.u32", a, b)[i] == x * y >> 32
        assert compute("mul.wide.s32", a.view(np.int32), b.view(np.int32))[i] == int(
            np.int32(x - (x >> 31 << 32))
        ) * int(np.int32(y - (y >> 31 << 32)))
        assert compute("popc.b32", a)[i] == x.bit_count()
        assert compute("clz.b32", a)[i] == 32 - x.bit_length()
        assert compute("brev.b32", a)[i] == int(f"{x:032b}"[::-1], 2)


@pytest.mark.parametrize("types", ["s32.s32", "u32.s32", "s32.u32", "u32.u32"])
def test_dp4a(types: str) -> None:
    random = np.random.default_rng(0)
    a, b, c = random.integers(-(2**31), 2**31, (3, 100)).astype(np.int32)
    left, right = (
        x.view(np.int8 if one == "s32" else np.uint8).reshape(-1, 4).astype(int)
        for x, one in zip((a, b), types.split("."), strict=True)
    )
    with np.errstate(over="ignore"):
        want = (c + (left * right).sum(1)).astype(np.int32)
    operands = [
        x.view(np.int32 if one == "s32" else np.uint32) for x, one in zip((a, b), types.split("."), strict=True)
    ]
    assert np.array_equal(compute(f"dp4a.{types}", *operands, c).view(np.int32), want)


def test_dp4a_of_unsigned_bytes_is_unsigned() -> None:
    text = entry(f"{AT} mov.b32 %r1, 0xFF; dp4a.u32.u32 %r2, %r1, %r1, 0; st.global.u32 [%rd9], %r2;", params=1)
    (out,) = launch(text, zeros(32))
    assert (out == 255 * 255).all()


def test_prmt_replicates_signs() -> None:
    assert compute("prmt.b32", np.uint32(0x7F80), np.uint32(0), np.uint32(0x89)).tolist() == [0x8080FF00]


def test_integers() -> None:
    a, b = np.array([7, -7, 7, -7, -(2**31), 5], np.int32), np.array([2, 2, -2, -2, -1, 0], np.int32)
    assert compute("div.s32", a, b).tolist() == [3, -3, -3, 3, -(2**31), -1]
    assert compute("rem.s32", a, b).tolist()[:5] == [1, -1, 1, -1, 0]
    assert compute("div.u64", np.uint64(2**64 - 1), np.uint64(10)).tolist() == [(2**64 - 1) // 10]
    assert compute("shl.b32", np.uint32(1), np.uint32([31, 32, 99])).tolist() == [2**31, 0, 0]
    assert compute("shr.s32", np.int32(-8), np.uint32([1, 40])).tolist() == [-4, -1]
    assert compute("shr.u32", np.uint32(8), np.uint32([1, 32])).tolist() == [4, 0]


def test_comparisons_of_nan() -> None:
    a, b = np.float32([1, np.nan]), np.float32([1, 1])
    for name, want in {"eq": [1, 0], "ne": [0, 0], "neu": [0, 1], "gtu": [0, 1], "ge": [1, 0], "nan": [0, 1]}.items():
        assert compute(f"setp.{name}.f32", a, b).tolist() == [bool(w) for w in want], name


def test_integers_above_zero() -> None:
    """Check that the modifier ``relu`` clamps minima and maxima of integers at zero."""
    a, b = np.int32([-5, 3, 7]), np.int32([2, 4, -9])
    assert compute("min.relu.s32", a, b).tolist() == [0, 3, 0]
    assert compute("max.relu.s32", a, b).tolist() == [2, 4, 7]


PAIRS = """
    mul.wide.u32 %rd8, %r0, 24; add.s64 %rd9, %rd1, %rd8; mul.wide.u32 %rd8, %r0, 8; add.s64 %rd13, %rd0, %rd8;
    ld.global.b64 %rd10, [%rd9]; ld.global.b64 %rd11, [%rd9+8]; ld.global.b64 %rd12, [%rd9+16];
    {OP} %rd14, {OPERANDS};
    st.global.b64 [%rd13], %rd14;
"""


@pytest.mark.parametrize("name", ["add.rn.f32x2", "sub.f32x2", "mul.rn.ftz.f32x2", "fma.rn.f32x2"])
def test_pairs_of_floats(name: str) -> None:
    """Check that both halves of a pair equal the results of the scalar instruction."""
    count = 3 if name.startswith("fma") else 2
    operands = np.random.default_rng(0).standard_normal((32, 3, 2)).astype(np.float32)
    operands[:4] *= np.float32(2.0**-100)  # products underflow
    operands[4, 0] = np.inf, np.nan
    text = entry(PAIRS.format(OP=name, OPERANDS=", ".join(f"%rd{10 + i}" for i in range(count))))
    out, _ = launch(text, zeros(64), operands.reshape(-1))
    want = compute(name.replace(".f32x2", ".f32"), *(operands[:, i].reshape(-1) for i in range(count)))
    assert np.array_equal(out, want.view(np.uint32))
