"""Test tensor memory and tensor cores (``tcgen05``) in small programs."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from formats import e2m1_value, scale_value
from programs import entry, launch

from ptx_emulator import Deadlock, EmulationError, OutOfBounds, Race, Uninitialised

N, K = 32, 64
ACCUMULATOR, A_SCALES, B_SCALES, A_COLUMNS = 0, 48, 52, 40
"""Columns of tensor memory, relative to the first allocated column."""
A, B, A_SCALE, B_SCALE, BYTES = 0, 4096, 5120, 5632, 6144
FULL, READY, DONE, FREE, POINTER = (BYTES + 8 * i for i in range(5))
"""Offsets in shared memory of four mbarriers and, last, of the address of the allocated tensor memory. The operands
precede them."""


def wait(offset: int, parity: int) -> str:
    return f"""{{ .reg .pred P1;
LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r1+{offset}], {parity}, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE: }}"""


def descriptor(target: str, offset: int, leading: int, stride: int) -> str:
    """Build a descriptor of an operand without swizzle, in which 8 rows of 16 bytes are contiguous."""
    constant = 1 << 46 | stride >> 4 << 32 | leading >> 4 << 16
    start = f"add.u32 %r4, %r1, {offset}; shr.u32 %r4, %r4, 4; cvt.u64.u32 {target}, %r4;"
    return f"{start} or.b64 {target}, {target}, {constant};"


NUMBERS = {"e4m3": 0, "e5m2": 1, "e2m1": 5, "f16": 0, "bf16": 1}
"""Numbers of the formats of operands in the descriptor of ``kind::f8f6f4``, ``kind::mxf8f6f4`` and ``kind::f16``."""
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


class Kind(NamedTuple):
    """Kind of an MMA of ``group`` CTAs: FP4 with a scale per ``block`` elements, FP8 or 16-bit formats without scales,
    or ``kind::mxf8f6f4`` with scales.

    Attributes:
        scale: format of the scales.
        formats: formats of A and B, or None for FP4.
        ids: bytes of a word that hold the scales of A and B in ``kind::mxf8f6f4``.
        stores_a: True if A is in tensor memory, to which each thread stores its row.
    """

    group: int
    block: int
    scale: str
    formats: tuple[str, str] | None = None
    ids: tuple[int, int] = (0, 0)
    stores_a: bool = False

    @property
    def is_mx(self) -> bool:
        """True for ``kind::mxf8f6f4``."""
        return self.formats is not None and self.block > 0

    @property
    def instruction(self) -> int:
        m, exponents = 128 * self.group, self.scale == "e8m0"
        if self.formats is not None:
            a, b = (NUMBERS[one] for one in self.formats)
            if self.is_mx:
                ids = self.ids[0] << 29 | self.ids[1] << 4
                return ids | m // 128 << 27 | exponents << 23 | N // 8 << 17 | b << 10 | a << 7
            return m // 16 << 24 | N // 8 << 17 | b << 10 | a << 7 | 1 << 4
        return m // 128 << 27 | exponents << 23 | N // 8 << 17 | 1 << 10 | 1 << 7


WORDS = [f"%r{i}" for i in range(23, 23 + N)]
AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"


def epilogue(kind: Kind, turn: int) -> str:
    """Return code in which each thread stores its row of the accumulator, and then allows the next MMA to overwrite the
    accumulator."""
    stores = " ".join(f"st.global.v4.b32 [%rd9+{4 * i}], {{{', '.join(WORDS[i : i + 4])}}};" for i in range(0, N, 4))
    return f"""
    {wait(DONE, turn)}
    {AFTER}
    tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{", ".join(WORDS)}}}, [%r6];
    {WAIT_LD}
    {stores}
    add.u64 %rd9, %rd9, {128 * kind.group * 4 * N};
    {BEFORE}
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22+{FREE}];
    """


def mma(kind: Kind, accumulates: str) -> str:
    if kind.is_mx:
        return f"""
    tcgen05.mma.cta_group::{kind.group}.kind::mxf8f6f4.block_scale.scale_vec::1X
        [%r3], %rd10, %rd11, {kind.instruction}, [%r3+{A_SCALES}], [%r3+{B_SCALES}], {accumulates};
    """
    if kind.formats is not None:
        name, a = "f16" if kind.formats[0] in HALVES else "f8f6f4", f"[%r3+{A_COLUMNS}]" if kind.stores_a else "%rd10"
        return f"""
    tcgen05.mma.cta_group::{kind.group}.kind::{name} [%r3], {a}, %rd11, {kind.instruction}, {accumulates};
    """
    return f"""
    tcgen05.mma.cta_group::{kind.group}.kind::mxf4nvf4.block_scale.block{kind.block}
        [%r3], %rd10, %rd11, {kind.instruction}, [%r3+{A_SCALES}], [%r3+{B_SCALES}], {accumulates};
    """


def commit(kind: Kind) -> str:
    if kind.group == 1:
        return "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r7];"
    return "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r7], 3;"


def copy(kind: Kind, column: int, source: str) -> str:
    if kind.formats is not None and not kind.is_mx:
        return ""
    return f"tcgen05.cp.cta_group::{kind.group}.32x128b.warpx4 [%r3+{column}], {source};"


STORE_A, WAIT_ST = "tcgen05.st.sync.aligned.32x32b.x8.b32", "tcgen05.wait::st.sync.aligned;"


def store_a(kind: Kind) -> str:
    """Return code in which each thread stores its row of A to tensor memory, if ``kind`` needs it there."""
    if not kind.stores_a:
        return ""
    halves = [", ".join(WORDS[i : i + 4]) for i in (0, 4)]
    return f"""
    {wait(FULL, 0)}
    shr.u32 %r8, %r0, 3; shl.b32 %r8, %r8, 8; and.b32 %r9, %r0, 7; mad.lo.u32 %r8, %r9, 16, %r8; add.u32 %r8, %r8, %r1;
    ld.shared.v4.b32 {{{halves[0]}}}, [%r8]; ld.shared.v4.b32 {{{halves[1]}}}, [%r8+128];
    {STORE_A} [%r6+{A_COLUMNS}], {{{", ".join(WORDS[:8])}}};
    {WAIT_ST}
    {BEFORE}
    barrier.cluster.arrive; barrier.cluster.wait;
    {AFTER}
    """


def program(kind: Kind) -> str:
    """Return a program that stores D = A @ B, and then D + A @ B. Each CTA holds 128 rows of A, some rows of B, and
    scales."""
    together = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = f"""
    mov.u32 %r1, buf; mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, 0;
    mapa.shared::cluster.u32 %r22, %r1, %r21;
    setp.ne.u32 %p0, %r0, 0; setp.ge.u32 %p1, %r0, 32; setp.ne.u32 %p2, %r20, 0;
    setp.eq.u32 %p5, 0, 0; not.pred %p4, %p5;
    or.pred %p6, %p0, %p2;
    @%p0 bra START;
    mbarrier.init.shared.b64 [%r1+{FULL}], 1; mbarrier.init.shared.b64 [%r1+{READY}], 1;
    mbarrier.init.shared.b64 [%r1+{DONE}], 1; mbarrier.init.shared.b64 [%r1+{FREE}], {128 * kind.group};
    fence.mbarrier_init.release.cluster;
START:
    @%p1 bra ALLOCATED;
    add.u32 %r2, %r1, {POINTER};
    tcgen05.alloc.cta_group::{kind.group}.sync.aligned.shared::cta.b32 [%r2], 64;
    tcgen05.relinquish_alloc_permit.cta_group::{kind.group}.sync.aligned;
ALLOCATED:
    {together}
    ld.shared.u32 %r3, [%r1+{POINTER}];
    mad.lo.s32 %r5, %r20, 128, %r0; mul.wide.u32 %rd8, %r5, {4 * N}; add.u64 %rd9, %rd0, %rd8;
    shr.u32 %r5, %r0, 5; shl.b32 %r5, %r5, 21; add.u32 %r6, %r3, %r5;
    @%p0 bra COPIED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{FULL}], {BYTES};
    mul.wide.u32 %rd8, %r20, {BYTES}; add.u64 %rd8, %rd8, %rd1;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd8], {BYTES}, [%r1+{FULL}];
COPIED:
    {store_a(kind)}
    @%p0 bra EPILOGUE;
    {wait(FULL, 0)}
    @%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22+{READY}];
    @%p2 bra EPILOGUE;
    {wait(READY, 0) if kind.group == 2 else ""}
    {descriptor("%rd10", A, 128, 256)} {descriptor("%rd11", B, 128, 256)}
    {descriptor("%rd12", A_SCALE, 0, 128)} {descriptor("%rd13", B_SCALE, 0, 128)}
    add.u32 %r7, %r1, {DONE};
    {copy(kind, A_SCALES, "%rd12")} {copy(kind, B_SCALES, "%rd13")}
    {mma(kind, "%p4")}
    {commit(kind)}
EPILOGUE:
    {epilogue(kind, 0)}
    @%p6 bra AGAIN;
    {wait(FREE, 0)}
    {AFTER}
    {mma(kind, "%p5")}
    {commit(kind)}
AGAIN:
    {epilogue(kind, 1)}
    {together}
    @%p1 bra END;
    tcgen05.dealloc.cta_group::{kind.group}.sync.aligned.b32 %r3, 64;
END:
    """
    return entry(body, POINTER + 16)


class Operands(NamedTuple):
    """Operands and the expected product. Row i of an operand's array contains the bytes that CTA i copies."""

    data: np.ndarray
    product: np.ndarray


def coded(numbers: np.ndarray, fmt: str) -> np.ndarray:
    """Encode numbers in FP8 or in 16 bits. Return the bytes of each row."""
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, **HALVES}
    return torch.from_numpy(numbers).to(dtypes[fmt]).view(torch.uint8).numpy()


def in_rows_of_8(data: np.ndarray) -> np.ndarray:
    """Arrange rows of 32 bytes as 16-byte chunks of 8 rows each, for ``descriptor(…, 128, 256)``."""
    return data.astype(np.uint8).reshape(-1, 8, 2, 16).swapaxes(1, 2).reshape(-1)


def packed(codes: np.ndarray) -> np.ndarray:
    """Pack FP4 codes, two per byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def in_blocks(scales: np.ndarray, count: int) -> np.ndarray:
    """Arrange scales in the 128x4 layout: byte ``16 (r % 32) + 4 (r // 32) + block`` of row r. Padding is NaN."""
    blocks = np.full(512, 0xFF, np.uint8)
    for row, some in enumerate(scales):
        start = 16 * (row % 32) + 4 * (row // 32)
        blocks[start : start + count] = some
    return blocks


def operands(kind: Kind, seed: int = 0) -> Operands:
    random = np.random.default_rng(seed)
    if kind.is_mx:
        return mx_operands(kind, random)
    if kind.formats is not None:
        return plain_operands(kind, random)
    rows, count = 128 * kind.group, K // kind.block
    codes = [random.integers(0, 16, (size, K)) for size in (rows, N)]
    few = (0x28, 0x30, 0x38, 0x40, 0x48) if kind.scale == "e4m3" else range(125, 130)
    scales = [random.choice(few, (size, count)).astype(np.uint8) for size in (rows, N)]
    a, b = (
        e2m1_value(one).astype(np.float64) * np.repeat(scale_value(scale, kind.scale), kind.block, 1)
        for one, scale in zip(codes, scales, strict=True)
    )
    data = np.zeros((kind.group, BYTES), np.uint8)
    for rank, row in enumerate(data):
        own, part = slice(128 * rank, 128 * rank + 128), N // kind.group
        row[A:B] = in_rows_of_8(packed(codes[0][own]))
        row[B : B + 32 * part] = in_rows_of_8(packed(codes[1][part * rank : part * rank + part]))
        row[A_SCALE:B_SCALE] = in_blocks(scales[0][own], count)
        row[B_SCALE:] = in_blocks(scales[1], count)
    return Operands(data, a @ b.T)


def plain_operands(kind: Kind, random: np.random.Generator) -> Operands:
    """Return operands without scales: rows of 32 bytes with codes of small numbers."""
    assert kind.formats is not None
    k = K // 4 if kind.formats[0] in HALVES else K // 2
    numbers = [random.integers(-8, 9, (size, k)) / 4 for size in (128 * kind.group, N)]
    codes = [coded(one, fmt) for one, fmt in zip(numbers, kind.formats, strict=True)]
    data = np.zeros((kind.group, BYTES), np.uint8)
    for rank, row in enumerate(data):
        part = N // kind.group
        row[A:B] = in_rows_of_8(codes[0][128 * rank : 128 * rank + 128])
        row[B : B + 32 * part] = in_rows_of_8(codes[1][part * rank : part * rank + part])
    return Operands(data, numbers[0] @ numbers[1].T)


def mx_operands(kind: Kind, random: np.random.Generator) -> Operands:
    """Return operands of ``kind::mxf8f6f4``: rows of 32 codes, and four scales per row. The MMA uses one of the four
    scales. The 8 ignored bytes after every 8 bytes of FP4 codes contain e4m3's NaN."""
    assert kind.formats is not None
    rows, data, factors = (128 * kind.group, N), [], []
    for fmt, size, number in zip(kind.formats, rows, kind.ids, strict=True):
        if fmt == "e2m1":
            codes = random.integers(0, 16, (size, K // 2))
            spread = np.full((size, 2, 16), 0x7F, np.uint8)
            spread[..., :8] = packed(codes).reshape(size, 2, 8)
            some, values = spread.reshape(size, 32), e2m1_value(codes).astype(np.float64)
        else:
            values = random.integers(-8, 9, (size, K // 2)) / 4
            some = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        scales = random.integers(125, 130, (size, 4)).astype(np.uint8)
        data.append((some, scales))
        factors.append(values * scale_value(scales[:, number : number + 1], kind.scale))
    bytes_ = np.zeros((kind.group, BYTES), np.uint8)
    for rank, row in enumerate(bytes_):
        own, part = slice(128 * rank, 128 * rank + 128), N // kind.group
        row[A:B] = in_rows_of_8(data[0][0][own])
        row[B : B + 32 * part] = in_rows_of_8(data[1][0][part * rank : part * rank + part])
        row[A_SCALE:B_SCALE] = in_blocks(data[0][1][own], 4)
        row[B_SCALE:] = in_blocks(data[1][1], 4)
    return Operands(bytes_, factors[0] @ factors[1].T)


def run(kind: Kind, text: str, seed: int | None = 0, **kwargs: bool) -> np.ndarray:
    """Run a program and return both results, (2, rows, columns)."""
    out = np.zeros((2, 128 * kind.group, N), np.float32)
    data = operands(kind).data.reshape(-1)
    found = launch(text, out.reshape(-1), data, block=128, grid=kind.group, cluster=kind.group, seed=seed, **kwargs)
    return found[0].reshape(out.shape)


NVFP4 = Kind(1, 16, "e4m3")
KINDS = [NVFP4, Kind(1, 32, "e8m0"), Kind(1, 16, "e8m0"), Kind(2, 16, "e4m3"), Kind(2, 32, "e8m0")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.group}-{kind.block}-{kind.scale}")
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_block_scaled_mma(kind: Kind, seed: int | None) -> None:
    product = operands(kind).product
    assert np.array_equal(run(kind, program(kind), seed, strict=True), [product, 2 * product])


FP8 = Kind(1, 0, "", ("e4m3", "e4m3"))
FP8_KINDS = [FP8, FP8._replace(formats=("e4m3", "e5m2")), FP8._replace(group=2), Kind(2, 0, "", ("e5m2", "e4m3"))]
BF16, F16 = FP8._replace(formats=("bf16", "bf16")), FP8._replace(formats=("f16", "f16"))
HALF_KINDS = [BF16, F16, BF16._replace(group=2)]
STORED_KINDS = [one._replace(stores_a=True) for one in (FP8, BF16, F16, BF16._replace(group=2), FP8._replace(group=2))]


@pytest.mark.parametrize(
    "kind",
    [*FP8_KINDS, *HALF_KINDS, *STORED_KINDS],
    ids=lambda kind: f"{kind.group}-{'-'.join(kind.formats)}{'-stored' * kind.stores_a}",
)
@pytest.mark.parametrize("seed", [None, 0])
def test_mma_without_scales(kind: Kind, seed: int | None) -> None:
    product = operands(kind).product
    assert np.array_equal(run(kind, program(kind), seed, strict=True), [product, 2 * product])


MX = Kind(1, 32, "e8m0", ("e2m1", "e4m3"))
MX_KINDS = [MX, MX._replace(ids=(3, 1)), MX._replace(formats=("e4m3", "e2m1"), ids=(1, 2)), MX._replace(group=2)]


@pytest.mark.parametrize("kind", MX_KINDS, ids=lambda kind: f"{kind.group}-{'-'.join(kind.formats)}-{kind.ids}")
@pytest.mark.parametrize("seed", [None, 0])
def test_mma_of_fp8_and_fp4_with_scales(kind: Kind, seed: int | None) -> None:
    product = operands(kind).product
    assert np.array_equal(run(kind, program(kind), seed, strict=True), [product, 2 * product])


def test_scales_of_mxf8f6f4_are_powers_of_two() -> None:
    with pytest.raises(EmulationError, match="blocks of 32"):
        run(MX._replace(scale="e4m3"), program(MX._replace(scale="e4m3")), strict=True)


@pytest.mark.parametrize("negated", [(1, 0), (0, 1), (1, 1)])
def test_negated_operands_of_fp8(negated: tuple[int, int]) -> None:
    bits = negated[0] << 13 | negated[1] << 14
    text = program(FP8).replace(str(FP8.instruction), str(FP8.instruction | bits))
    product = operands(FP8).product * (-1) ** sum(negated)
    assert np.array_equal(run(FP8, text, strict=True), [product, 2 * product])


def test_lanes_of_an_mma_of_fp8_may_be_listed() -> None:
    """Check that a vector of disabled lanes is accepted, without an effect, if it is zero, and refused otherwise."""
    given = f"{FP8.instruction}, %p"
    product = operands(FP8).product
    for lanes, error in (("0, 0, 0, 0", None), ("0, 1, 0, 0", NotImplementedError), ("0, 0", NotImplementedError)):
        text = program(FP8).replace(given, f"{FP8.instruction}, {{{lanes}}}, %p")
        if error is None:
            assert np.array_equal(run(FP8, text, strict=True), [product, 2 * product])
        else:
            with pytest.raises(error):
                run(FP8, text, strict=True)


def test_special_values_of_fp8() -> None:
    """Check that NaN in e4m3 or e5m2, and infinity in e5m2, reach the result."""
    kind = FP8._replace(formats=("e5m2", "e4m3"))
    given = operands(kind)
    data = given.data.copy()
    data[0, 0], data[0, 16 * 1], data[0, B + 16 * 2] = 0x7C, 0xFF, 0x7F  # A[0, 0], A[1, 0] and B[2, 0]
    out = np.zeros((2, 128, N), np.float32)
    got = launch(program(kind), out.reshape(-1), data.reshape(-1), block=128, grid=1, cluster=1, seed=0, strict=True)
    first = got[0].reshape(out.shape)[0]
    assert np.isnan(first[1]).all() and np.isnan(first[:, 2]).all()
    first_of_rows = B + np.array([256 * (n // 8) + 16 * (n % 8) for n in range(N)])
    numbers = torch.from_numpy(data[0, first_of_rows]).view(torch.float8_e4m3fn).float().numpy()
    with np.errstate(invalid="ignore"):
        want = np.inf * numbers
    assert np.array_equal(np.isnan(first[0]), np.isnan(want))
    assert np.array_equal(first[0][~np.isnan(want)], want[~np.isnan(want)])
    others = np.ones_like(first, bool)
    others[:2], others[:, 2] = False, False
    assert np.array_equal(first[others], given.product[others])


FP8_FAULTS = {
    "reserved bits": (1 << 23, EmulationError, "reserved"),
    "sparsity": (1 << 2, EmulationError, "reserved"),
    "fp16 accumulators": (1 << 4, NotImplementedError, "e5m2 to fp32"),
    "another format": (3 << 7, NotImplementedError, "e5m2 to fp32"),
    "M-major": (1 << 15, NotImplementedError, "e5m2 to fp32"),
    "rows": (1 << 25, EmulationError, "160 x 32"),
    "no columns": (4 << 17, EmulationError, "128 x 0"),
}


@pytest.mark.parametrize("name", FP8_FAULTS)
def test_fp8_descriptors_that_do_not_exist(name: str) -> None:
    bits, error, message = FP8_FAULTS[name]
    text = program(FP8).replace(str(FP8.instruction), str(FP8.instruction ^ bits))
    with pytest.raises(error, match=message):
        run(FP8, text, strict=True)


def test_16_bit_descriptors_that_do_not_exist() -> None:
    for bits, error, message in (
        (3 << 7, NotImplementedError, "f16 or bf16 to fp32"),
        (1 << 7, NotImplementedError, "fp16 times bf16"),
        (1 << 16, NotImplementedError, "K-major"),
        (1 << 29, EmulationError, "reserved"),
    ):
        with pytest.raises(error, match=message):
            run(F16, program(F16).replace(str(F16.instruction), str(F16.instruction ^ bits)), strict=True)


STORED = BF16._replace(stores_a=True)
A_STORED = f"{STORE_A} [%r6+{A_COLUMNS}], {{{', '.join(WORDS[:8])}}};"
A_FAULTS = {
    "no wait::st": (WAIT_ST, "", Race, "mma with A .* without tcgen05.wait"),
    "no fence before the barrier": (
        f"{WAIT_ST}\n    {BEFORE}",
        WAIT_ST,
        Race,
        "mma with A .* without tcgen05.fence::before_thread_sync",
    ),
    "no fence behind the barrier": (
        f"barrier.cluster.wait;\n    {AFTER}",
        "barrier.cluster.wait;",
        Race,
        "mma with A .* without tcgen05.fence::after_thread_sync",
    ),
    "no store": (A_STORED, "", Uninitialised, ""),
    "a store under the MMA": (
        "EPILOGUE:",
        f"EPILOGUE: {A_STORED}",
        Race,
        "tcgen05.st .* used by an MMA",
    ),
    "A in the accumulator": (
        f"[%r3+{A_COLUMNS}], %rd11",
        f"[%r3+{N - 1}], %rd11",
        EmulationError,
        "accumulator overlaps A",
    ),
    "A in another lane": (
        f"[%r3+{A_COLUMNS}], %rd11",
        f"[%r3+{A_COLUMNS + 0x200000}], %rd11",
        EmulationError,
        "lane 32",
    ),
    "A beyond the allocation": (f"[%r3+{A_COLUMNS}], %rd11", "[%r3+58], %rd11", OutOfBounds, "not all allocated"),
    "columns": (str(STORED.instruction), str(STORED.instruction - (1 << 17)), EmulationError, "128 x 24 with A in"),
}


@pytest.mark.parametrize("name", A_FAULTS)
def test_faults_of_stored_operands_are_found(name: str) -> None:
    before, after, kind, message = A_FAULTS[name]
    text = program(STORED)
    assert before in text
    with pytest.raises(kind, match=message or None):
        run(STORED, text.replace(before, after), strict=True)


def test_fewer_columns_with_stored_operands() -> None:
    """Check that the multiple of columns with A in tensor memory is 8 in lenient mode. The MMA leaves 8 columns."""
    text = program(STORED).replace(str(STORED.instruction), str(STORED.instruction - (1 << 17)))
    with pytest.raises(Uninitialised, match=r"st\.global"):
        run(STORED, text, lenient=True)


PLAIN = program(NVFP4)
MMA = mma(NVFP4, "%p4")
COPY = copy(NVFP4, A_SCALES, "%rd12")
FILL = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd8], 16, [%r1+{FULL}];"
LAST = "barrier.cluster.arrive; barrier.cluster.wait;\n    @%p1 bra END"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], "
FAULTS = {
    "no wait::ld": (WAIT_LD, "", Race, "without tcgen05.wait"),
    "no fence before the barrier": (BEFORE, "", Race, "without tcgen05.fence::before_thread_sync"),
    "no fence behind the barrier": (AFTER, "", Race, "without tcgen05.fence::after_thread_sync"),
    "no wait for the MMA": (wait(DONE, 0), "", (Race, Uninitialised), ""),
    "no wait for the loads": (wait(FREE, 0), "", Race, "tcgen05.mma .* loaded by"),
    "no wait for the operands": (wait(FULL, 0), "", (Race, Uninitialised), ""),
    "a copy behind an MMA that reads there": (MMA, MMA + copy(NVFP4, A_SCALES, "%rd12"), Race, "used by an MMA"),
    "another accumulator's columns": (
        mma(NVFP4, "%p5"),
        mma(NVFP4, "%p5") + mma(NVFP4, "%p5").replace("[%r3],", "[%r3+8],"),
        Race,
        "written",
    ),
    "a store to operands that is not fenced": (COPY, f"st.shared.u32 [%r1+{B_SCALE}], %r0;" + COPY, Race, "proxy"),
    "operands overwritten under an MMA": (MMA, MMA + FILL, Race, "which a tensor core's operation .* read"),
    "dealloc under loads": (LAST, LAST.split("\n")[1], Race, "dealloc"),
    "no commit": (commit(NVFP4), "", Deadlock, ""),
    "no dealloc": ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;", "", EmulationError, "ended with tensor"),
    "dealloc of a part": ("b32 %r3, 64", "b32 %r3, 32", EmulationError, "no allocation"),
    "too few columns": (", 64;", ", 32;", OutOfBounds, "not all allocated"),
    "no power of two": ("b32 [%r2], 64", "b32 [%r2], 96", EmulationError, "96 columns"),
    "too many columns": (ALLOC + "64;", ALLOC + "512;" + ALLOC + "32;", EmulationError, "waits for ever"),
    "scales in the accumulator": (f"[%r3+{A_SCALES}], [%r3", "[%r3+12], [%r3", EmulationError, ""),
    "scales not copied": (copy(NVFP4, B_SCALES, "%rd13"), "", Uninitialised, ""),
    "columns that the MMA leaves": (str(NVFP4.instruction), str(NVFP4.instruction - (1 << 17)), Uninitialised, ""),
    "reserved bits of an instruction": (str(NVFP4.instruction), str(NVFP4.instruction + 1), EmulationError, "reserved"),
    "a descriptor's constant": (str(1 << 46 | 16 << 32 | 8 << 16), str(16 << 32 | 8 << 16), EmulationError, "0b001"),
    "a warp with others' lanes": ("shl.b32 %r5, %r5, 21", "shl.b32 %r5, %r5, 20", EmulationError, "this warp accesses"),
    "another cta_group": ("permit.cta_group::1", "permit.cta_group::2", EmulationError, "in one kernel"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    before, after, kind, message = FAULTS[name]
    assert before in PLAIN
    with pytest.raises(kind, match=message or None):
        run(NVFP4, PLAIN.replace(before, after), strict=True)


@pytest.mark.parametrize("name", ["no wait::ld", "no fence before the barrier", "no fence behind the barrier"])
def test_lenient_rules(name: str) -> None:
    """Check that with ``lenient`` the emulator accepts omissions that NVIDIA's own kernels contain."""
    before, after, _, _ = FAULTS[name]
    product = operands(NVFP4).product
    assert np.array_equal(run(NVFP4, PLAIN.replace(before, after), lenient=True), [product, 2 * product])


def test_lenient_copies_follow_mmas() -> None:
    before, after, _, _ = FAULTS["a copy behind an MMA that reads there"]
    product = operands(NVFP4).product
    assert np.array_equal(run(NVFP4, PLAIN.replace(before, after), lenient=True), [product, 2 * product])


PAIR = Kind(2, 16, "e4m3")


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (wait(READY, 0), "", (Race, Uninitialised)),
        ("[%r7], 3;", "[%r7], 1;", Deadlock),
        ("[%r7], 3;", "[%r7], 7;", EmulationError),
        (f"[%r1+{FREE}], 256", f"[%r1+{FREE}], 128", (Race, EmulationError)),
        (LAST, LAST.split("\n")[1], (Race, EmulationError)),
    ],
)
def test_faults_of_pairs_are_found(before: str, after: str, kind: type[Exception]) -> None:
    text = program(PAIR)
    assert before in text
    with pytest.raises(kind):
        for seed in (None, *range(4)):
            run(PAIR, text.replace(before, after), seed, strict=True)


# Loads and stores

MOVE = """
    mov.u32 %r1, buf; setp.ge.u32 %p1, %r0, 32;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ALLOCATED:
    bar.sync 0;
    ld.shared.u32 %r2, [%r1];
    shr.u32 %r5, %r0, 5; shl.b32 %r5, %r5, 21; add.u32 %r6, %r2, %r5;
    shl.b32 %r10, %r0, 8;
    add.u32 %r11, %r10, 1; add.u32 %r12, %r10, 2; add.u32 %r13, %r10, 3;
    add.u32 %r14, %r10, 4; add.u32 %r15, %r10, 5; add.u32 %r16, %r10, 6; add.u32 %r17, %r10, 7;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r6+4], {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17};
    {WAIT}
    tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r20, %r21, %r22, %r23}, [%r6+{FIRST}];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd8, %r0, 16; add.u64 %rd9, %rd0, %rd8;
    st.global.v4.b32 [%rd9], {%r20, %r21, %r22, %r23};
    bar.sync 0;
    @%p1 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
END:
"""


def move(wait: str = "tcgen05.wait::st.sync.aligned;", first: int = 4) -> np.ndarray:
    text = entry(MOVE.replace("{WAIT}", wait).replace("{FIRST}", str(first)), 16, 1)
    return launch(text, np.zeros((128, 4), np.uint32).reshape(-1), block=128, strict=True)[0].reshape(4, 32, 4)


@pytest.mark.parametrize("half", [0, 1])
def test_stored_rows_are_loaded_as_fragments(half: int) -> None:
    """Check that lane 4 i + j receives columns 2 j and 2 j + 1 of rows i and i + 8, in each half of its warp's rows."""
    lane = np.arange(32)
    rows = (lane // 4 + 16 * half)[:, None] + [0, 0, 8, 8]
    columns = (2 * (lane % 4))[:, None] + [0, 1, 0, 1]
    expected = [256 * (32 * warp + rows) + columns for warp in range(4)]
    assert np.array_equal(move(first=4 + (16 << 16) * half), expected)


def test_faults_of_loads_and_stores_are_found() -> None:
    with pytest.raises(Race, match=r"without tcgen05\.wait"):
        move(wait="")
    with pytest.raises(Uninitialised):
        move(first=8)
    with pytest.raises(OutOfBounds):
        move(first=28)
