"""Test TMA copies with tensor maps in small programs."""

import itertools
import struct
from typing import NamedTuple

import numpy as np
import pytest
from programs import SEEDS, entry, launch

from ptx_emulator import Deadlock, EmulationError, OutOfBounds, Race, Uninitialised
from ptx_emulator.memory import REGION_SHIFT

TENSOR = (2 << REGION_SHIFT) + 16
"""Address of the second buffer of ``launch``."""
TYPES = {4: 11, 8: 0, 16: 6, 32: 7}


class Map(NamedTuple):
    """Sizes of a tensor and of its box in elements, innermost dimension first, and strides of the outer dimensions in
    bytes."""

    bits: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    spread: bool = False

    @property
    def words(self) -> np.ndarray:
        words = [0] * 32
        words[0], words[1] = TENSOR & 0xFFFFFFFF, TENSOR >> 32
        words[2] = self.swizzle << 13 | (12 if self.spread else TYPES[self.bits]) << 7 | len(self.sizes) - 1 << 4
        for i, stride in enumerate(self.strides):
            words[3 + i] = stride // 16
        for i, size in enumerate(self.sizes):
            words[8 + i] = size - 1
        words[13] = self.box[0] - 1 << 24
        for i, extent in enumerate(self.box[1:]):
            words[14] |= extent - 1 << 8 * i
        return np.frombuffer(struct.pack("<32I", *words), np.uint8)

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.bits // 8


def box(map: Map, data: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
    """Return the expected bytes of a box in the order of shared memory, with zeros outside of the tensor."""
    digits = np.zeros(int(np.prod(map.box)) * map.bits // 4, np.uint8)  # digits of 4 bits
    given = np.stack([data & 15, data >> 4], -1).reshape(-1)
    per = map.bits // 4
    for i, place in enumerate(itertools.product(*(range(extent) for extent in map.box[::-1]))):
        where = [a + b for a, b in zip(at, place[::-1], strict=True)]
        if all(0 <= one < size for one, size in zip(where, map.sizes, strict=True)):
            outer = sum(one * stride for one, stride in zip(where[1:], map.strides, strict=True))
            first = 2 * outer + per * where[0]
            digits[per * i : per * i + per] = given[first : first + per]
    plain = digits[::2] | digits[1::2] << 4
    swizzled = np.zeros_like(plain)
    for i, byte in enumerate(plain):
        swizzled[i ^ (i >> 7 & (1 << map.swizzle) - 1) << 4] = byte
    return swizzled


def joined(at: tuple[int, ...]) -> str:
    return ", ".join(str(one) for one in at)


LOAD = """
    mov.u32 %r1, buf; mov.u32 %r20, %cluster_ctarank; add.u32 %r2, %r1, {SIZE};
    setp.ne.u32 %p0, %r0, 0; setp.ne.u32 %p2, %r20, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p0 bra STARTED;
    {START}
STARTED:
    {{ .reg .pred P1;
LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r2], 0, 10000000;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
DONE: }}
    mul.wide.u32 %rd8, %r20, {SIZE}; add.u64 %rd9, %rd0, %rd8;
    shl.b32 %r4, %r0, 2; add.u32 %r5, %r1, %r4; cvt.u64.u32 %rd8, %r4; add.u64 %rd9, %rd9, %rd8;
NEXT:
    setp.ge.u32 %p1, %r4, {SIZE};
    @%p1 bra END;
    ld.shared.u32 %r6, [%r5];
    st.global.u32 [%rd9], %r6;
    add.u32 %r4, %r4, 128; add.u32 %r5, %r5, 128; add.u64 %rd9, %rd9, 128;
    bra NEXT;
END:
    barrier.cluster.arrive; barrier.cluster.wait;
"""
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {SIZE};"


def copied(
    map: Map, at: tuple[int, ...], mods: str = "", more: str = "", ctas: int = 1, to: str = "[%r2]", **kwargs
) -> np.ndarray:
    """Copy a box in CTA 0 or, if ``mods`` is not a multicast, in each CTA. Return a mask of the correct bytes in each
    CTA."""
    copy = f"""cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{mods}
        [%r1], [%rd2, {{{joined(at)}}}], {to}{more};"""
    guard = "@%p2 bra STARTED;" if "multicast" in mods else ""
    start = kwargs.pop("start", f"{EXPECT} {guard} {copy}").replace("{COPY}", copy)
    text = LOAD.format(SIZE=map.box_bytes, START=start.replace("{SIZE}", str(map.box_bytes)))
    size = sum((extent - 1) * stride for extent, stride in zip(map.sizes[1:], map.strides, strict=True))
    data = np.random.default_rng(0).integers(0, 256, size + map.sizes[0] * map.bits // 8).astype(np.uint8)
    out = np.zeros((ctas, map.box_bytes), np.uint8)
    data = data[: len(data) - kwargs.pop("short", 0)]
    program = entry(text, map.box_bytes + 8, 3)
    found = launch(program, out.reshape(-1), data, map.words, grid=ctas, cluster=ctas, **kwargs)[0]
    expected = box(map, data, at)
    return found.reshape(out.shape) == expected


MATRIX = Map(8, (112, 20), (112,), (64, 8))
CUBE = Map(16, (40, 9, 3), (80, 720), (32, 8, 2))
MAPS = [
    (Map(32, (50,), (), (16,)), (40,)),
    (MATRIX, (32, 4)),
    (MATRIX, (64, 16)),
    (MATRIX, (-16, -3)),
    (MATRIX, (112, 0)),
    (MATRIX._replace(swizzle=1), (0, 0)),
    (MATRIX._replace(swizzle=2), (48, 7)),
    (CUBE._replace(swizzle=3), (8, 4, 2)),
    (Map(4, (96, 6), (48,), (64, 8)), (64, 2)),
    (Map(8, (16, 4, 3, 2), (16, 64, 192), (16, 2, 2, 2)), (0, 1, 2, 1)),
    (Map(8, (16, 2, 2, 2, 2), (16, 32, 64, 128), (16, 1, 2, 1, 2)), (0, 1, 0, 1, 1)),
]


@pytest.mark.parametrize(("map", "at"), MAPS)
def test_boxes(map: Map, at: tuple[int, ...]) -> None:
    for seed in (None, *SEEDS):
        assert copied(map, at, seed=seed).all()


def test_multicast() -> None:
    for seed in (None, *SEEDS):
        assert copied(CUBE, (4, 0, 1), ".multicast::cluster", ", 3", ctas=2, seed=seed).all()
    with pytest.raises(Deadlock):
        copied(CUBE, (4, 0, 1), ".multicast::cluster", ", 1", ctas=2)
    for mask in (0, 5):
        with pytest.raises(EmulationError, match="mask"):
            copied(CUBE, (4, 0, 1), ".multicast::cluster", f", {mask}", ctas=2)


ALL_TO_ONE = """
    and.b32 %r7, %r2, 0xFEFFFFFF;
    @%p2 bra COPY;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {EXPECTED};
COPY:
    {COPY}
    @!%p2 bra STARTED;
    mbarrier.arrive.shared::cta.b64 _, [%r2];
"""


def test_a_pair_counts_on_one_mbarrier() -> None:
    """Check that with ``cta_group::2`` a copy may arrive at the mbarrier of the pair's other CTA, and that then no
    other mbarrier orders the copy."""
    twice = ALL_TO_ONE.replace("{EXPECTED}", str(2 * CUBE.box_bytes))
    own = {"to": "[%r7]", "ctas": 2, "start": twice}
    with pytest.raises((Race, Uninitialised)):
        copied(CUBE, (4, 0, 1), ".cta_group::2", **own)
    with pytest.raises(EmulationError, match="another CTA than the target"):
        copied(CUBE, (4, 0, 1), "", **own)
    both = f"{EXPECT} {{COPY}}"
    assert copied(CUBE, (4, 0, 1), ".cta_group::2", ctas=2, start=both).all()
    one = "mov.u32 %r7, %r2;" + EXPECT + "@%p2 bra STARTED; {COPY}"
    pairs = {"mods": ".multicast::cluster.cta_group::2", "more": ", 3", "ctas": 2}
    # The copies of both boxes arrive at CTA 0's mbarrier. CTA 1 waits at its own mbarrier, so it waits forever.
    with pytest.raises((EmulationError, Deadlock)):
        copied(CUBE, (4, 0, 1), start=one, **pairs)


def test_wrong_boxes() -> None:
    with pytest.raises(EmulationError, match="2 dimensions"):
        copied(MATRIX._replace(sizes=(112, 20)), (0, 0, 0))
    with pytest.raises(OutOfBounds):
        copied(MATRIX, (64, 16), short=16)
    with pytest.raises(EmulationError, match="no multiple of 128"):
        copied(MATRIX, (0, 0), start="add.u32 %r1, %r1, 16;" + EXPECT + "{COPY}")
    with pytest.raises(EmulationError, match="4 bits"):
        copied(MAPS[8][0], (1, 0))


STORE = """
    mov.u32 %r1, buf; shl.b32 %r4, %r0, 2; add.u32 %r5, %r1, %r4;
NEXT:
    setp.ge.u32 %p1, %r4, {SIZE};
    @%p1 bra STORED;
    add.u32 %r6, %r4, 7; st.shared.u32 [%r5], %r6;
    add.u32 %r4, %r4, 128; add.u32 %r5, %r5, 128;
    bra NEXT;
STORED:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra END;
    cp.async.bulk.tensor.{RANK}d.global.shared::cta.tile.bulk_group [%rd2, {{{AT}}}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
"""


def stored(map: Map, at: tuple[int, ...], before: str = "", after: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Store a box of shared memory to a tensor. Return the tensor after the store, and the box in shared memory."""
    text = STORE.format(SIZE=map.box_bytes, RANK=len(at), AT=joined(at))
    size = sum((extent - 1) * stride for extent, stride in zip(map.sizes[1:], map.strides, strict=True))
    tensor = np.zeros(size + map.sizes[0] * map.bits // 8, np.uint8)
    program = entry(text.replace(before, after), map.box_bytes, 3)
    source = np.arange(7, map.box_bytes + 7, 4, dtype=np.uint32).view(np.uint8)
    return launch(program, np.zeros(4, np.uint32), tensor, map.words)[1], source


@pytest.mark.parametrize(("map", "at"), [MAPS[1], MAPS[2], MAPS[3], MAPS[6], MAPS[7]])
def test_stored_boxes(map: Map, at: tuple[int, ...]) -> None:
    """Check that a box, stored and loaded again, contains the stored bytes, except outside of the tensor."""
    tensor, source = stored(map, at)
    there = box(map, np.full_like(tensor, 0xFF), at)
    assert np.array_equal(box(map, tensor, at), source & there)
    assert (tensor != 0).sum() == ((source & there) != 0).sum()


def test_faults_of_stores_are_found() -> None:
    with pytest.raises(Race, match=r"fence\.proxy\.async"):
        stored(MATRIX, (0, 0), "fence.proxy.async.shared::cta;")
    with pytest.raises(Uninitialised):
        stored(MATRIX, (0, 0), "st.shared.u32 [%r5], %r6;")
    with pytest.raises(EmulationError, match="waited for its bulk copies"):
        stored(MATRIX, (0, 0), "cp.async.bulk.wait_group.read 0;")


SPREAD = Map(4, (256, 9), (128,), (128, 8), 3, True)
"""Rows of 4-bit elements. A copy spreads 16 elements to 16 bytes of shared memory."""


def spread(map: Map, at: tuple[int, int], moved: int = 16, counted: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Copy a box of spread elements; return the bytes of codes in shared memory, and the expected bytes.

    The tensor begins ``moved`` bytes after the second buffer's start, which is 16 bytes after a multiple of 32.
    ``counted`` is added to the number of bytes that the mbarrier expects.
    """
    copy = f"""cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd2, {{{joined(at)}}}], [%r2];"""
    size = 2 * map.box_bytes
    text = LOAD.format(SIZE=size, START=f"{EXPECT.format(SIZE=map.box_bytes + counted)} {copy}")
    data = np.random.default_rng(0).integers(0, 256, 128 * 9 + moved).astype(np.uint8)
    words = map.words.view(np.uint32).copy()
    words[0] += moved
    out = np.zeros((1, size), np.uint8)
    found = launch(entry(text, size + 8, 3), out.reshape(-1), data, words.view(np.uint8))[0]
    place = np.arange(size)
    rows = found.reshape(-1)[place ^ (place >> 7 & (1 << map.swizzle) - 1) << 4].reshape(-1, 8, 16)
    return rows[..., :8].reshape(-1), box(map._replace(swizzle=0), data[moved:], at)


@pytest.mark.parametrize("at", [(0, 0), (128, 1), (128, 4), (0, -3)])
@pytest.mark.parametrize("swizzle", [0, 3])
def test_elements_of_4_bits_are_spread(at: tuple[int, int], swizzle: int) -> None:
    """Check that 16 elements take 16 bytes of shared memory, and that the mbarrier counts only the 8 bytes of codes."""
    got, want = spread(SPREAD._replace(swizzle=swizzle), at)
    assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("map", "at", "moved", "message"),
    [
        (SPREAD, (0, 0), 0, "multiples of 32"),
        (SPREAD._replace(strides=(112,)), (0, 0), 16, "multiples of 32"),
        (SPREAD._replace(sizes=(192, 9)), (0, 0), 16, "128 of a multiple of 128"),
        (SPREAD._replace(box=(64, 8)), (0, 0), 16, "128 of a multiple of 128"),
        (SPREAD._replace(swizzle=2), (0, 0), 16, "swizzle of less than 128 bytes"),
        (SPREAD, (64, 0), 16, "from element 64 on"),
    ],
)
def test_limits_of_spread_elements(map: Map, at: tuple[int, int], moved: int, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        spread(map, at, moved)


def test_the_gaps_of_spread_elements_are_not_counted() -> None:
    with pytest.raises(Deadlock):
        spread(SPREAD, (0, 0), counted=SPREAD.box_bytes)
