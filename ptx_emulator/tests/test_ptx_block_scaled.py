"""Test block-scaled ``mma.sync`` and ``stmatrix`` in small programs."""

import numpy as np
import pytest
import torch
from formats import e2m1_value, scale_value
from programs import AT, entry, launch, zeros

from ptx_emulator import EmulationError, Uninitialised

KINDS = {
    "mxf4nvf4.block_scale.scale_vec::4X": ("ue4m3", "e4m3", 4),
    "mxf4nvf4.block_scale.scale_vec::2X": ("ue8m0", "e8m0", 2),
    "mxf4.block_scale.scale_vec::2X": ("ue8m0", "e8m0", 2),
}


def product(kind: str, a: tuple[int, int] = (0, 0), b: tuple[int, int] = (0, 0)) -> str:
    """Return a program that multiplies operands. Each lane loads its twelve operand words from ``p1``.

    ``a`` and ``b`` are the byte and thread selectors of the scales of A and B.
    """
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd11+{4 * i}];" for i in range(12))
    stores = "".join(f"st.global.b32 [%rd13+{4 * i}], %r{30 + i};" for i in range(4))
    body = f"""
    mul.wide.u32 %rd10, %r0, 48; add.s64 %rd11, %rd1, %rd10; mul.wide.u32 %rd12, %r0, 16; add.s64 %rd13, %rd0, %rd12;
    {loads}
    mma.sync.aligned.kind::{kind}.m16n8k64.row.col.f32.e2m1.e2m1.f32.{KINDS[kind][0]}
        {{%r30, %r31, %r32, %r33}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}},
        {{%r20}}, {{{a[0]}, {a[1]}}}, {{%r21}}, {{{b[0]}, {b[1]}}};
    {stores}
    """
    return entry(body)


def word(codes: np.ndarray) -> np.uint32:
    """Pack eight FP4 codes, the first in the lowest bits."""
    return np.uint32(sum(int(code) << 4 * i for i, code in enumerate(codes)))


def lanes(kind: str, a_at: tuple[int, int], b_at: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return random operands as the words that each lane holds, and their product as a matrix."""
    _, name, count = KINDS[kind]
    random = np.random.default_rng(1)
    a, b = random.integers(0, 16, (16, 64)), random.integers(0, 16, (8, 64))
    some = (0x28, 0x30, 0x38, 0x40) if name == "e4m3" else range(125, 130)
    a_scale, b_scale = (random.choice(some, (rows, count)).astype(np.uint8) for rows in (16, 8))
    c = random.integers(-9, 9, (16, 8)).astype(np.float32)
    left = e2m1_value(a) * np.repeat(scale_value(a_scale, name), 64 // count, 1)
    right = e2m1_value(b) * np.repeat(scale_value(b_scale, name), 64 // count, 1)
    words = np.zeros((32, 12), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        near, far = slice(8 * t, 8 * t + 8), slice(32 + 8 * t, 40 + 8 * t)
        words[lane, :6] = [
            word(one) for one in (a[g, near], a[g + 8, near], a[g, far], a[g + 8, far], b[g, near], b[g, far])
        ]
        words[lane, 6:10] = c[[g, g, g + 8, g + 8], [2 * t, 2 * t + 1] * 2].view(np.uint32)
        # Lanes that are not selected hold different scales, so that a wrong selection changes the result.
        scales = np.full((2, 4), 0x7F, np.uint8)
        if t // 2 == a_at[1]:
            scales[0, a_at[0] : a_at[0] + count] = a_scale[g + 8 * (t % 2)]
        if t == b_at[1]:
            scales[1, b_at[0] : b_at[0] + count] = b_scale[g]
        words[lane, 10:] = scales.view(np.uint32)[:, 0]
    return words, left.astype(np.float64) @ right.T + c


def of_lanes(out: np.ndarray) -> np.ndarray:
    result = np.zeros((16, 8), np.float32)
    for lane, four in enumerate(out.view(np.float32).reshape(32, 4)):
        g, t = divmod(lane, 4)
        result[[g, g, g + 8, g + 8], [2 * t, 2 * t + 1] * 2] = four
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [(0, 0), (1, 3), (0, 2)])
def test_block_scaled_products(kind: str, threads: tuple[int, int]) -> None:
    for byte in (0, 2) if KINDS[kind][2] == 2 else (0,):
        a_at, b_at = (byte, threads[0]), (2 - byte if KINDS[kind][2] == 2 else 0, threads[1])
        words, expected = lanes(kind, a_at, b_at)
        out, _ = launch(product(kind, a_at, b_at), zeros(128), words.reshape(-1))
        assert np.array_equal(of_lanes(out), expected)


BYTES = "mxf8f6f4.block_scale.scale_vec::1X"


def product_of_bytes(a: str, b: str, selectors: str = "{0, 0}, {0, 0}") -> str:
    """Return a program that multiplies operands of ``kind::mxf8f6f4`` with the formats ``a`` and ``b``."""
    a_at, b_at = selectors.split(", {")
    text = product(next(iter(KINDS))).replace(next(iter(KINDS)), BYTES).replace("m16n8k64", "m16n8k32")
    text = text.replace("e2m1.e2m1.f32.ue4m3", f"{a}.{b}.f32.ue8m0")
    return text.replace("{%r20}, {0, 0}", f"{{%r20}}, {a_at}").replace("{%r21}, {0, 0}", f"{{%r21}}, {{{b_at}")


def lanes_of_bytes(
    formats: tuple[str, str], a_at: tuple[int, int], b_at: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return random operands of ``kind::mxf8f6f4`` as the words that each lane holds, and their product."""
    random = np.random.default_rng(2)
    codes, values = [], []
    for fmt, rows in zip(formats, (16, 8), strict=True):
        some = random.integers(0, 16, (rows, 32)).astype(np.uint8)
        if fmt == "e2m1":
            codes.append(some << 2)
            values.append(e2m1_value(some).astype(np.float64))
        else:
            numbers = torch.from_numpy(some.astype(np.float32) - 8).to(getattr(torch, FP8[fmt]))
            codes.append(numbers.view(torch.uint8).numpy())
            values.append(numbers.double().numpy())
    scales = [random.integers(125, 130, rows).astype(np.uint8) for rows in (16, 8)]
    c = random.integers(-9, 9, (16, 8)).astype(np.float32)
    words = np.zeros((32, 12), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        near, far = slice(4 * t, 4 * t + 4), slice(16 + 4 * t, 20 + 4 * t)
        a, b = codes
        fours = (a[g, near], a[g + 8, near], a[g, far], a[g + 8, far], b[g, near], b[g, far])
        words[lane, :6] = [np.ascontiguousarray(one).view(np.uint32)[0] for one in fours]
        words[lane, 6:10] = c[[g, g, g + 8, g + 8], [2 * t, 2 * t + 1] * 2].view(np.uint32)
        some = np.full((2, 4), 0x70, np.uint8)
        if t // 2 == a_at[1]:
            some[0, a_at[0]] = scales[0][g + 8 * (t % 2)]
        if t == b_at[1]:
            some[1, b_at[0]] = scales[1][g]
        words[lane, 10:] = some.view(np.uint32)[:, 0]
    left, right = (v * scale_value(s, "ue8m0")[:, None] for v, s in zip(values, scales, strict=True))
    return words, left @ right.T + c


FP8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e4m3"), ("e4m3", "e2m1")])
@pytest.mark.parametrize(("a_at", "b_at"), [((0, 0), (0, 0)), ((3, 1), (1, 3)), ((2, 0), (3, 2))])
def test_products_of_bytes(formats: tuple[str, str], a_at: tuple[int, int], b_at: tuple[int, int]) -> None:
    words, expected = lanes_of_bytes(formats, a_at, b_at)
    selectors = f"{{{a_at[0]}, {a_at[1]}}}, {{{b_at[0]}, {b_at[1]}}}"
    for text in (
        product_of_bytes(*formats, selectors),
        product_of_bytes(*formats, selectors).replace(".scale_vec::1X", ""),
    ):
        out, _ = launch(text, zeros(128), words.reshape(-1))
        assert np.array_equal(of_lanes(out), expected)


def test_padding_of_codes_in_bytes_is_zero() -> None:
    words, _ = lanes_of_bytes(("e2m1", "e4m3"), (0, 0), (0, 0))
    for bit in (0, 1, 6, 7):
        changed = words.copy()
        changed[5, 2] ^= 1 << 8 + bit
        with pytest.raises(EmulationError, match="bits 0, 1, 6 and 7"):
            launch(product_of_bytes("e2m1", "e4m3"), zeros(128), changed.reshape(-1))


def test_other_forms_of_products_of_bytes() -> None:
    text = product_of_bytes("e4m3", "e4m3")
    for before, after in (
        ("ue8m0", "ue4m3"),
        ("m16n8k32", "m16n8k64"),
        ("scale_vec::1X", "scale_vec::2X"),
        ("e4m3.e4m3", "e3m2.e4m3"),
        ("block_scale.scale_vec::1X.", ""),
    ):
        assert before in text
        with pytest.raises(NotImplementedError):
            launch(text.replace(before, after), zeros(128), zeros(384))
    with pytest.raises(EmulationError, match="selectors 4, 0, 0, 0"):
        launch(product_of_bytes("e4m3", "e4m3", "{4, 0}, {0, 0}"), zeros(128), zeros(384))


def test_wrong_selectors() -> None:
    (four, two, _) = KINDS
    for kind, a, b in ((four, (2, 0), (0, 0)), (two, (1, 0), (0, 0)), (two, (0, 2), (0, 0)), (four, (0, 0), (0, 4))):
        with pytest.raises(EmulationError, match="selectors"):
            launch(product(kind, a, b), zeros(128), zeros(384))


def test_other_kinds_are_not_known() -> None:
    (four, *_) = KINDS
    for before, after in (
        ("4X", "1X"),
        ("ue4m3", "ue8m0"),
        ("kind::mxf4nvf4", "kind::mxf4"),
        ("e2m1.e2m1", "e3m2.e2m1"),
    ):
        with pytest.raises(NotImplementedError):
            launch(product(four).replace(before, after), zeros(128), zeros(384))


STORED = """
    {AT} shl.b32 %r8, %r0, 4; mov.u32 %r9, buf; add.s32 %r9, %r9, %r8;
    mul.lo.u32 %r10, %r0, 2; add.u32 %r11, %r10, 1; shl.b32 %r11, %r11, 16; or.b32 %r10, %r10, %r11;
    add.u32 %r11, %r10, 0x00400040; add.u32 %r12, %r10, 0x00800080; add.u32 %r13, %r10, 0x00C000C0;
    stmatrix.sync.aligned.m8n8.{FORM}.shared.b16 [%r9], {{{WORDS}}};
    bar.sync 0;
    shl.b32 %r8, %r0, 2; mov.u32 %r9, buf; add.s32 %r9, %r9, %r8;
    ld.shared.u32 %r5, [%r9]; ld.shared.u32 %r6, [%r9+{LAST}];
    st.global.u32 [%rd9], %r5; st.global.u32 [%rd9+{LAST}], %r6;
"""


@pytest.mark.parametrize(("count", "transposed"), [(1, False), (2, False), (4, False), (4, True), (2, True)])
def test_stmatrix(count: int, transposed: bool) -> None:
    """Check that lane 4 i + j stores elements 2 j and 2 j + 1 of row i of each matrix, or of column i if
    ``transposed``. A row takes 16 bytes."""
    form, words = f"x{count}" + ".trans" * transposed, ", ".join(f"%r{10 + i}" for i in range(count))
    text = STORED.format(AT=AT, FORM=form, WORDS=words, LAST=128 * (count - 1))
    (out,) = launch(entry(text, 512, 1), zeros(32 * count))
    matrices = np.arange(64 * count, dtype=np.uint16).reshape(count, 8, 8)
    matrices = matrices.swapaxes(1, 2) if transposed else matrices
    found = out.view(np.uint16).reshape(count, 8, 8)
    assert np.array_equal(found[[0, -1]], matrices[[0, -1]])


def test_stmatrix_of_a_part() -> None:
    """Check that bytes to which ``stmatrix`` does not store stay uninitialised."""
    text = STORED.format(AT=AT, FORM="x2", WORDS="%r10, %r11", LAST=256)
    with pytest.raises(Uninitialised):
        launch(entry(text, 512, 1), zeros(96))
