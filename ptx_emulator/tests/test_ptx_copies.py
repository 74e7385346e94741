"""Test mbarriers, bulk copies, ``cp.async`` and clusters in small programs."""

import numpy as np
import pytest
from programs import AT, SEEDS, SLOT, entry, launch, zeros

from ptx_emulator import Deadlock, EmulationError, Misaligned, OutOfBounds, Race, Uninitialised

# mbarriers and copies

COPY = """
    {SLOT}
    mov.u32 %r1, buf; add.u32 %r2, %r1, 256;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r2];
READY:
    bar.sync 0;
    {WAIT}
    ld.shared.u32 %r5, [%r9];
    {AT}
    st.global.u32 [%rd9], %r5;
"""
WAIT = """{ .reg .pred P1;
LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r2], 0, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE: }"""


def copy(wait: str) -> str:
    return entry(COPY.format(SLOT=SLOT, AT=AT, WAIT=wait), 264)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_copy(seed: int | None) -> None:
    data = np.arange(64, dtype=np.uint32) * 7
    assert (launch(copy(WAIT), zeros(64), data, block=64, seed=seed)[0] == data).all()
    with pytest.raises((Race, Uninitialised)):
        launch(copy(""), zeros(64), data, block=64, seed=seed)


TOLD = """
    {AT}
    mov.u32 %r1, buf; add.u32 %r2, %r1, 256; add.u32 %r3, %r1, 264;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @%p0 bra STARTED;
    {BEFORE}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    {AFTER}
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r2];
STARTED:
    {WAIT}
    ld.shared.u32 %r5, [%r3];
    st.global.u32 [%rd9], %r5;
"""


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_copies_tell_of_themselves_alone(seed: int | None) -> None:
    """Check that a wait for a copy orders the issuing thread's stores before its arrival at the mbarrier, but not its
    stores between this arrival and the copy."""
    store = "mov.u32 %r4, 9; st.shared.u32 [%r3], %r4;"
    before, after = (
        entry(TOLD.format(AT=AT, WAIT=WAIT, BEFORE=one, AFTER=other), 272) for one, other in ((store, ""), ("", store))
    )
    assert (launch(before, zeros(64), zeros(64), block=64, seed=seed)[0] == 9).all()
    with pytest.raises(Race):
        launch(after, zeros(64), zeros(64), block=64, seed=seed)


def test_wrong_bulk_copies() -> None:
    data = zeros(64)
    with pytest.raises(Deadlock, match="wants 0 arrivals, 16 bytes"):
        launch(copy(WAIT).replace("_, [%r2], 256", "_, [%r2], 272"), zeros(64), data, block=64)
    with pytest.raises(OutOfBounds):
        launch(copy(WAIT).replace("[%rd1], 256", "[%rd1+16], 256"), zeros(64), data, block=64)
    with pytest.raises(Misaligned):
        launch(copy(WAIT).replace("[%rd1], 256", "[%rd1+8], 240"), zeros(64), data, block=64)
    with pytest.raises(EmulationError, match="mbarrier"):
        launch(copy(WAIT).replace("[%r1], [%rd1]", "[%r1+16], [%rd1]"), zeros(64), data, block=64)


def test_bulk_prefetches() -> None:
    """Check that a prefetch accepts multiples of 16 bytes inside one tensor, even uninitialised bytes, and that other
    sizes and addresses raise a fault."""

    def prefetch(source: str, size: str) -> None:
        body = "setp.ne.u32 %p0, %r0, 0; mov.u32 %r1, 256; mov.u32 %r2, 0; mov.u64 %rd2, 64;"
        launch(entry(f"{body} @!%p0 cp.async.bulk.prefetch.L2.global {source}, {size};"), zeros(64), zeros(64))

    prefetch("[%rd1]", "%r1")
    prefetch("[%rd1+240]", "16")
    for source, size, error, text in (
        ("[%rd1+8]", "16", Misaligned, "in bulk"),
        ("[%rd1]", "24", Misaligned, "in bulk"),
        ("[%rd1]", "%r2", EmulationError, "no bytes"),
        ("[%rd1+16]", "%r1", OutOfBounds, "256 bytes, of"),
        ("[%rd1+256]", "16", OutOfBounds, "16 bytes, of"),
        ("[%rd2]", "16", OutOfBounds, "0x40 is in no allocation"),
    ):
        with pytest.raises(error, match=text):
            prefetch(source, size)


FENCE = "fence.proxy.async.shared::cta;"
READ = "cp.async.bulk.wait_group.read 0;"


def stored(before: str = FENCE, after: str = "", wait: str = READ, end: str = "") -> str:
    """Return a program in which all threads store words, and thread 0 copies these words to global memory.

    ``before`` and ``after`` are instructions, such as fences, before and after the barrier. All threads execute
    ``end``.
    """
    body = f"""
    {SLOT} setp.ne.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 33; mov.u32 %r1, buf;
    st.shared.u32 [%r9], %r0;
    {before}
    bar.sync 0;
    {after}
    @%p0 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 256;
    cp.async.bulk.commit_group;
    {wait}
END:
    {end}
    """
    return entry(body, 256, 1)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_store(seed: int | None) -> None:
    for program in (
        stored(),
        stored("fence.proxy.async;", wait="cp.async.bulk.wait_group 0;"),
        stored("fence.proxy.async.shared::cluster;"),
        # Either the copying thread executes the fence after the barrier, or the other threads execute it before the
        # barrier.
        stored("", FENCE),
        stored("", f"@!%p0 {FENCE}"),
        stored("", f"@%p1 {FENCE} bar.sync 0;"),
    ):
        (out,) = launch(program, zeros(64), block=64, seed=seed)
        assert out.tolist() == list(range(64))


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_stores_need_a_fence(seed: int | None) -> None:
    """Check that a bulk copy needs a proxy fence for shared memory between the stores and the copy."""
    for fences in (
        ("",),
        ("fence.proxy.async.global;",),
        ("fence.acq_rel.cta; membar.cta;",),
        (f"@!%p0 {FENCE}",),
        (f"{FENCE} st.shared.u32 [%r9], %r0;",),
        ("", f"@%p1 {FENCE}"),
    ):
        with pytest.raises(Race, match=r"no fence\.proxy\.async since thread \d+ of CTA 0"):
            launch(stored(*fences), zeros(64), block=64, seed=seed)
    with pytest.raises(Race):
        launch(stored().replace("bar.sync 0;", ""), zeros(64), block=64, seed=seed)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_stores_must_have_read(seed: int | None) -> None:
    """Check that a fault is raised if the source of a bulk copy is overwritten, or the issuing thread ends, before the
    copy has read its source."""
    again = "bar.sync 0; st.shared.u32 [%r9], %r0;"
    later = "mov.u32 %r4, 0; L: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 300; @%p2 bra L;"
    launch(stored(end=again), zeros(64), block=64, seed=seed)
    with pytest.raises(Race, match=r"a bulk copy of thread 0 of CTA 0 read"):
        launch(stored(wait="", end=again), zeros(64), block=64, seed=seed)
    for bad in (
        stored(wait="cp.async.bulk.wait_group.read 1;", end=again),
        # The wrong thread waits, or the right thread waits too late.
        stored(wait="", end=f"@%p1 {READ} {again}"),
        stored(wait="", end=f"bar.sync 0; {READ} {later} st.shared.u32 [%r9], %r0;"),
        stored(end="st.shared.u32 [%r9], %r0;"),
    ):
        with pytest.raises(Race):
            launch(bad, zeros(64), block=64, seed=seed)
    with pytest.raises(EmulationError, match="ended before"):
        launch(stored(wait="", end=later), zeros(64), block=64, seed=seed)


STREAM = f"""
    {SLOT} mov.u32 %r1, buf; add.u32 %r2, %r1, 256; mov.u32 %r3, 0;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    bra.uni LOAD;
READY:
    bar.sync 0;
LOOP:
    and.b32 %r4, %r3, 1;
    {WAIT.replace(" 0, ", " %r4, ")}
    ld.shared.u32 %r5, [%r9]; add.u32 %r5, %r5, 1;
    st.shared.u32 [%r9], %r5;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    add.u32 %r3, %r3, 1;
    setp.eq.u32 %p1, %r3, 3;
    @%p0 bra NEXT;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 256;
    cp.async.bulk.commit_group;
    add.s64 %rd0, %rd0, 256;
    @%p1 bra NEXT;
    cp.async.bulk.wait_group.read 0;
LOAD:
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r2];
    add.s64 %rd1, %rd1, 256;
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READY;
NEXT:
    @!%p1 bra LOOP;
    cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_one_buffer_for_bulk_loads_and_stores(seed: int | None) -> None:
    data = np.arange(192, dtype=np.uint32) * 7
    assert (launch(entry(STREAM, 264), zeros(192), data, block=64, seed=seed)[0] == data + 1).all()
    for part, error in {FENCE: Race, READ: Race, "cp.async.bulk.wait_group 0;": EmulationError}.items():
        with pytest.raises(error):
            launch(entry(STREAM.replace(part, ""), 264), zeros(192), data, block=64, seed=seed)
    # If no thread accesses the bytes, the copies need no fence.
    unchanged = STREAM.replace("ld.shared.u32 %r5, [%r9]; add.u32 %r5, %r5, 1;", "")
    unchanged = unchanged.replace("st.shared.u32 [%r9], %r5;", "").replace(FENCE, "")
    assert (launch(entry(unchanged, 264), zeros(192), data, block=64, seed=seed)[0] == data).all()


# cp.async


def gathered(
    copies: str = "cp.async.ca.shared.global [%r9], [%rd9], 4; cp.async.commit_group;",
    between: str = "cp.async.wait_group 0; bar.sync 0;",
    partner: int = 32,
    after: str = "",
) -> str:
    """Return a program in which every thread copies a word and then reads the word that thread ``tid ^ partner``
    copied."""
    body = f"""
    {AT} {SLOT} setp.lt.u32 %p0, %r0, 32;
    add.s64 %rd10, %rd1, %rd8;
    {copies}
    {between}
    xor.b32 %r8, %r8, {4 * partner}; mov.u32 %r7, buf; add.u32 %r7, %r7, %r8;
    ld.shared.u32 %r1, [%r7];
    st.global.u32 [%rd10], %r1;
    {after}
    """
    return entry(body, 512)


WORDS = np.arange(64, dtype=np.uint32) * 7 + 1


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_cp_async(seed: int | None) -> None:
    for program, partner in (
        (gathered(), 32),
        (gathered(between="cp.async.wait_all; bar.sync 0;"), 32),
        (gathered("cp.async.ca.shared.global [%r9], [%rd9], 4;", "cp.async.wait_all; bar.sync 0;"), 32),
        # Within a warp, bar.warp.sync is enough. Within a thread, no barrier is needed.
        (gathered(between="cp.async.wait_group 0; bar.warp.sync -1;", partner=1), 1),
        (gathered(between="cp.async.wait_group 0;", partner=0), 0),
        # The newest group is empty, so it is enough to wait for all other groups.
        (gathered(between="cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;"), 32),
        (gathered(after="bar.sync 0; cp.async.ca.shared.global [%r9], [%rd9], 4; cp.async.wait_all;"), 32),
    ):
        out = launch(program, WORDS, zeros(64), block=64, seed=seed, strict=True)[1]
        assert (out == WORDS[np.arange(64) ^ partner]).all()


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_cp_async_must_be_waited_for(seed: int | None) -> None:
    wait, copy = "cp.async.wait_group 0;", "cp.async.ca.shared.global [%r9], [%rd9], 4;"
    for program in (
        gathered(between="bar.sync 0;"),
        gathered(between="", partner=0),
        gathered(between=wait),
        gathered(between=wait, partner=1),
        gathered(between=f"bar.sync 0; {wait}"),
        gathered(between="cp.async.wait_group 1; bar.sync 0;"),
        # In these programs, the group is not committed, or some threads do not wait.
        gathered(copy, f"{wait} bar.sync 0;"),
        gathered(between=f"@%p0 {wait} bar.sync 0;"),
    ):
        with pytest.raises(Race, match=r"read of .* a cp\.async of thread \d+ of CTA 0 wrote"):
            launch(program, WORDS, zeros(64), block=64, seed=seed)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_cp_async_must_not_overwrite(seed: int | None) -> None:
    """Check that a race is reported if ``cp.async`` overwrites bytes that other threads may still read, or if a thread
    stores to bytes that ``cp.async`` is still writing."""
    again = "cp.async.ca.shared.global [%r9], [%rd9], 4;"
    with pytest.raises(Race, match=r"write of .* thread \d+ of CTA 0 read unordered; .*cp\.async\.ca"):
        launch(gathered(after=f"{again} cp.async.wait_all;"), WORDS, zeros(64), block=64, seed=seed)
    for first in (f"{again} st.shared.u32 [%r9], %r0;", f"{again} {again}"):
        with pytest.raises(Race, match=r"write of .* a cp\.async of thread \d+ of CTA 0 wrote"):
            launch(gathered(first), WORDS, zeros(64), block=64, seed=seed)
    with pytest.raises(Race, match=r"which a cp\.async of thread"):
        one = "mov.u32 %r9, buf; cp.async.ca.shared.global [%r9], [%rd9], 4;"
        launch(gathered(one), WORDS, zeros(64), block=64, seed=seed)
    with pytest.raises(EmulationError, match=r"ended before it waited for its cp\.async"):
        launch(gathered(after=f"bar.sync 0; {again}"), WORDS, zeros(64), block=64, seed=seed)


ONE_COPY = "cp.async.ca.shared.global [%r9], [%rd9], 4;"


def arriving(
    arrive: str = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];",
    copies: str = ONE_COPY,
    count: int = 64,
    before: str = "",
    behind: str = "",
    after: str = "",
) -> str:
    """Return a program as in ``gathered``, in which threads learn of the copies from an mbarrier."""
    init = f"""
    mov.u32 %r5, buf; add.u32 %r5, %r5, 256; setp.ne.u32 %p1, %r0, 0;
    @%p1 bra START; mbarrier.init.shared.b64 [%r5], {count}; START: bar.sync 0; {before}
    """
    wait = """
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0; @!%p2 bra WAIT;
    """
    return gathered(f"{init} {copies} {arrive} {behind}", wait, after=after)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_cp_async_arrives_at_an_mbarrier(seed: int | None) -> None:
    """Check both forms of the arrival. Without ``noinc``, the arrival does not count, and the threads arrive
    themselves."""
    plain = "cp.async.mbarrier.arrive.shared::cta.b64 [%r5]; mbarrier.arrive.shared.b64 _, [%r5];"
    for program in (arriving(), arriving(plain), arriving(copies=f"{ONE_COPY} cp.async.wait_all;")):
        out = launch(program, WORDS, zeros(64), block=64, seed=seed, strict=True)[1]
        assert (out == WORDS[np.arange(64) ^ 32]).all()


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_what_an_arrival_of_cp_async_does_not_order(seed: int | None) -> None:
    """Check that a thread that waits for the mbarrier does not learn of the copying threads' later copies, nor of their
    stores."""
    late = "cp.async.ca.shared.global [%r9], [%rd9], 4; cp.async.wait_all;"
    read = r"read of .* a cp\.async of thread \d+ of CTA 0 wrote"
    for program, message in (
        (arriving(copies="", behind=late), read),
        (arriving(copies="", before="st.shared.u32 [%r9], %r0;"), r"read of .* thread \d+ of CTA 0 wrote"),
        (arriving("mbarrier.arrive.shared.b64 _, [%r5];"), read),
    ):
        with pytest.raises(Race, match=message):
            launch(program, WORDS, zeros(64), block=64, seed=seed)


def test_faults_of_arrivals_of_cp_async() -> None:
    for program, kind, message in (
        (arriving(count=65), Deadlock, ""),
        (arriving("cp.async.mbarrier.arrive.noinc.shared.b64 [%r5+8];"), EmulationError, "no mbarrier"),
        (arriving(after=f"bar.sync 0; {ONE_COPY}"), EmulationError, "ended before it waited for its cp"),
        # The emulator does not model arrivals in programs with groups of copies.
        (arriving(copies=f"{ONE_COPY} cp.async.commit_group;"), NotImplementedError, ""),
        (arriving("cp.async.mbarrier.arrive.noinc.shared::cluster.b64 [%r5];"), NotImplementedError, ""),
    ):
        with pytest.raises(kind, match=message or None):
            launch(program, WORDS, zeros(64), block=64)


def test_equal_copies_of_a_warp() -> None:
    """Check that lanes of a warp may copy one word to one place, but in lenient mode only, and only the same word."""
    copy = "mov.u32 %r9, buf; cp.async.ca.shared.global [%r9], [SOURCE], 4; cp.async.wait_all; bar.warp.sync -1;"
    text = entry(f"{AT} {copy} ld.shared.u32 %r1, [%r9]; st.global.u32 [%rd9], %r1;", 512, 1)
    words = WORDS[:32].copy()
    assert (launch(text.replace("SOURCE", "%rd0"), words, lenient=True)[0] == words[0]).all()
    for source, lenient in (("%rd0", False), ("%rd9", True)):
        with pytest.raises(Race, match=r"write of .* a cp\.async of thread"):
            launch(text.replace("SOURCE", source), words, lenient=lenient)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_groups_of_cp_async(seed: int | None) -> None:
    """Check that a wait for all groups except the newest orders the older of two groups, but not the newer group."""
    two = """
    cp.async.ca.shared.global [%r9], [%rd9], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r9+256], [%rd9], 4; cp.async.commit_group;
    """
    wait = "cp.async.wait_group 1; bar.sync 0;"
    newer = "add.u32 %r8, %r8, 256;"
    assert (launch(gathered(two, wait, after="cp.async.wait_all;"), WORDS, zeros(64), block=64, seed=seed)[1]).all()
    with pytest.raises(Race):
        launch(gathered(two, wait + newer, after="cp.async.wait_all;"), WORDS, zeros(64), block=64, seed=seed)
    wait = wait.replace("1", "0")
    assert (launch(gathered(two, wait + newer), WORDS, zeros(64), block=64, seed=seed)[1]).all()
    # A bulk copy may read bytes that cp.async wrote if the threads that issued the cp.async executed a fence.
    stored = f"""
    {wait} {FENCE} bar.sync 0; setp.ne.u32 %p2, %r0, 0; @%p2 bra END; mov.u32 %r1, buf;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1+256], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: ret;
    """
    assert (launch(gathered(two, stored), WORDS, zeros(64), block=64, seed=seed)[1] == WORDS).all()
    with pytest.raises(Race, match=r"no fence\.proxy\.async since a cp\.async of thread"):
        launch(gathered(two, stored.replace(FENCE, "")), WORDS, zeros(64), block=64, seed=seed)


COPIES = """
    mul.wide.u32 %rd8, %r0, {size}; add.s64 %rd9, %rd0, %rd8; add.s64 %rd10, %rd1, %rd8;
    mov.u32 %r9, buf; mad.lo.u32 %r9, %r0, {size}, %r9;
    and.b32 %r1, %r0, {size}; mov.u64 %rd5, 0;
    setp.lt.u32 %p0, %r0, 20; setp.ge.u32 %p1, %r0, 20; selp.u32 %r2, {size}, 0, %p0;
    st.shared.{type} [%r9], {value};
    {copy}
    cp.async.wait_all;
    ld.shared.{type} {value}, [%r9]; st.global.{type} [%rd10], {value};
"""


def copied(copy: str, data: np.ndarray) -> np.ndarray:
    """Run ``copy`` in 32 threads, with target bytes initialised to 0xFF, and return the target bytes of each thread."""
    size = data.shape[1]
    kind, value = {4: ("b32", "%r4"), 8: ("v2.b32", "{%r4, %r5}"), 16: ("v4.b32", "{%r4, %r5, %r6, %r7}")}[size]
    start = "mov.b32 %r4, -1; mov.b32 %r5, -1; mov.b32 %r6, -1; mov.b32 %r7, -1;"
    program = entry(start + COPIES.format(copy=copy, size=size, type=kind, value=value), 32 * size)
    return launch(program, data.reshape(-1), np.zeros(32 * size, np.uint8))[1].reshape(32, size)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_sizes_of_cp_async(size: int) -> None:
    data = np.random.default_rng(size).integers(1, 256, (32, size), dtype=np.uint8)
    lane, column = np.arange(32)[:, None], np.arange(size)
    every, some = lane < 32, lane < 20
    ca, at = "cp.async.ca.shared.global", f"[%r9], [%rd9], {size}"
    for copy, reads, otherwise in (
        (f"{ca} {at};", every, 0),
        (f"cp.async.ca.shared::cta.global.L2::128B {at};", every, 0),
        (f"{ca}.L2::cache_hint {at}, %rd5;", every, 0),
        (f"{ca}.L2::cache_hint.L2::256B {at}, {size}, %rd5;", every, 0),
        (f"{ca} {at}, 3;", column < 3, 0),
        (f"{ca} {at}, %r1;", column < (lane & size), 0),
        (f"{ca} {at}, %r2;", some, 0),
        (f"{ca} {at}, %p1;", some, 0),
        (f"@%p0 {ca} {at};", some, 0xFF),
    ):
        # A copy that reads no bytes may have an address out of bounds.
        found = copied(copy, data[:20] if reads is some else data)
        assert (found == np.where(reads, data, otherwise)).all(), copy
        if reads is some:
            with pytest.raises(OutOfBounds, match=r"thread 19; .*cp\.async"):
                copied(copy, data[:19])
    for copy, error, message in (
        (f"{ca} {at}, {size + 1};", EmulationError, f"{size + 1} of {size} bytes"),
        (f"{ca} [%r9+2], [%rd9], {size};", Misaligned, "shared memory"),
        (f"{ca} [%r9], [%rd9+2], {size};", Misaligned, f"{size} of {size} bytes"),
        (f"{ca} [%r9+{size}], [%rd9], {size};", OutOfBounds, "thread 31"),
        (f"{ca}.L1::evict_first {at};", NotImplementedError, "L1::evict_first"),
        (f"cp.async.cg.shared.global [%r9], [%rd9], {size // 2};", NotImplementedError, r"cp\.async\.cg"),
    ):
        with pytest.raises(error, match=message):
            copied(copy, data)
    if size == 16:
        assert (copied(f"cp.async.cg.shared.global {at};", data) == data).all()


CLUSTER = f"""
    {AT}
    mov.u32 %r1, buf; add.u32 %r2, %r1, 64;
    mov.u32 %r3, %cluster_ctarank;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 8;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    setp.gt.u32 %p1, %r0, 1;
    @%p1 bra SENT;
    shl.b32 %r4, %r3, 2; add.u32 %r4, %r4, %r1;
    mapa.shared::cluster.u32 %r5, %r4, %r0;
    mapa.shared::cluster.u32 %r6, %r2, %r0;
    add.u32 %r7, %r3, 100;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %r7, [%r6];
SENT:
    {WAIT}
    ld.shared.v2.u32 {{%r10, %r11}}, [%r1];
    mul.lo.u32 %r10, %r10, 1000; add.u32 %r10, %r10, %r11;
    mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ntid.x; mad.lo.u32 %r0, %r12, %r13, %r0;
    {AT}
    st.global.u32 [%rd9], %r10;
"""


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_cluster(seed: int | None) -> None:
    """Check the words that each of two CTAs sends to itself and to the other CTA."""
    (out,) = launch(entry(CLUSTER, 72, 1), zeros(128), grid=4, cluster=2, seed=seed)
    assert out.tolist() == [100101] * 128
    early = CLUSTER.replace("barrier.cluster.arrive.aligned;", "").replace("barrier.cluster.wait.aligned;", "")
    with pytest.raises(EmulationError):
        launch(entry(early, 72, 1), zeros(128), grid=4, cluster=2, seed=seed)


def waits(order: str, fence: str = "") -> str:
    """Return the instructions ``WAIT`` with the memory semantics ``order``, followed by the instruction ``fence``."""
    return WAIT.replace("try_wait.parity", f"try_wait.parity{order}") + fence


ACQUIRE = "fence.acquire.sync_restrict::shared::cluster.cluster;"
RELEASE = "fence.release.sync_restrict::shared::cta.cluster;"


SENT = f"""
    {AT}
    mov.u32 %r1, buf; add.u32 %r2, %r1, 64;
    mov.u32 %r3, %cluster_ctarank;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 4;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p0 bra SENT;
    xor.b32 %r4, %r3, 1;
    mapa.shared::cluster.u32 %r5, %r1, %r4;
    mapa.shared::cluster.u32 %r6, %r2, %r4;
    add.u32 %r7, %r3, 100;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %r7, [%r6];
SENT:
    WAIT
    ld.shared.u32 %r10, [%r1];
    mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ntid.x; mad.lo.u32 %r0, %r12, %r13, %r0;
    {AT}
    st.global.u32 [%rd9], %r10;
"""


@pytest.mark.parametrize(
    ("wait", "suffices"),
    [
        pytest.param(WAIT, False, id="default"),
        pytest.param(waits(".acquire.cta"), False, id="CTA"),
        pytest.param(waits(".acquire.cluster"), True, id="cluster"),
        pytest.param(waits(".relaxed.cluster"), False, id="relaxed"),
        pytest.param(waits(".relaxed.cluster", ACQUIRE), True, id="fence"),
        pytest.param(waits(".relaxed.cluster", RELEASE), False, id="release fence"),
        pytest.param(waits(".relaxed.cluster", "fence.acq_rel.cluster;"), True, id="fence of all memory"),
        pytest.param(waits(".relaxed.cluster", "fence.acq_rel.cta;"), False, id="fence of the CTA"),
        pytest.param(waits(".relaxed.cta", ACQUIRE), False, id="relaxed, CTA"),
    ],
)
def test_words_of_another_cta_are_acquired_at_cluster_scope(wait: str, suffices: bool) -> None:
    """Check that a wait for a word from another CTA needs cluster scope with ``scoped``, and that any scope suffices
    without ``scoped``."""
    text = entry(SENT.replace("WAIT", wait), 72, 1)
    want = ([101] * 32 + [100] * 32) * 2
    for seed in (None, *SEEDS):
        (out,) = launch(text, zeros(128), grid=4, cluster=2, seed=seed)
        assert out.tolist() == want
        if suffices:
            (out,) = launch(text, zeros(128), grid=4, cluster=2, seed=seed, scoped=True)
            assert out.tolist() == want
        else:
            with pytest.raises(Race, match="which an asynchronous copy wrote unordered"):
                launch(text, zeros(128), grid=4, cluster=2, seed=seed, scoped=True)


ARRIVED = f"""
    {SLOT}
    mov.u32 %r1, buf; add.u32 %r2, %r1, 128;
    mov.u32 %r3, %cluster_ctarank;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 32;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    add.u32 %r7, %r3, 7;
    st.shared.u32 [%r9], %r7;
    xor.b32 %r3, %r3, 1;
    mapa.shared::cluster.u32 %r6, %r2, %r3;
    ARRIVE
    {waits(".acquire.cluster")}
    mapa.shared::cluster.u32 %r5, %r9, %r3;
    ld.shared::cluster.u32 %r6, [%r5];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ntid.x; mad.lo.u32 %r0, %r12, %r13, %r0;
    {AT}
    st.global.u32 [%rd9], %r6;
"""


@pytest.mark.parametrize(
    ("fence", "order", "suffices"),
    [
        pytest.param("", "", False, id="default"),
        pytest.param("", ".release.cta", False, id="CTA"),
        pytest.param("", ".release.cluster", True, id="cluster"),
        pytest.param("", ".relaxed.cluster", False, id="relaxed"),
        pytest.param(RELEASE, ".relaxed.cluster", True, id="fence"),
        pytest.param(ACQUIRE, ".relaxed.cluster", False, id="acquire fence"),
        pytest.param("fence.acq_rel.gpu;", ".relaxed.cluster", True, id="fence of all memory"),
        pytest.param("fence.acq_rel.cta;", ".relaxed.cluster", False, id="fence of the CTA"),
        pytest.param(RELEASE, ".relaxed.cta", False, id="relaxed, CTA"),
    ],
)
def test_stores_are_released_to_another_cta_at_cluster_scope(fence: str, order: str, suffices: bool) -> None:
    """Check that threads must arrive with release semantics at cluster scope if another CTA loads words that they
    stored."""
    arrival = f"{fence} mbarrier.arrive{order}.shared::cluster.b64 _, [%r6];"
    text = entry(ARRIVED.replace("ARRIVE", arrival), 136, 1)
    for seed in (None, *SEEDS):
        if suffices:
            (out,) = launch(text, zeros(128), grid=4, cluster=2, seed=seed, scoped=True)
            assert out.tolist() == ([8] * 32 + [7] * 32) * 2
        else:
            with pytest.raises(Race, match="wrote unordered"):
                launch(text, zeros(128), grid=4, cluster=2, seed=seed, scoped=True)


def test_stores_after_a_release_fence_are_not_released() -> None:
    """Check that a relaxed arrival releases only the accesses that precede the thread's release fence."""
    arrival = f"{RELEASE} st.shared.u32 [%r9], %r7; mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r6];"
    with pytest.raises(Race, match="wrote unordered"):
        launch(entry(ARRIVED.replace("ARRIVE", arrival), 136, 1), zeros(128), grid=4, cluster=2, scoped=True)


MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
PEER = f"""
    {SLOT}
    mov.u32 %r3, %cluster_ctarank;
    add.u32 %r7, %r3, 7;
    st.shared.u32 [%r9], %r7;
    {MEET}
    xor.b32 %r3, %r3, 1;
    mapa.shared::cluster.u32 %r5, %r9, %r3;
    ld.shared::cluster.u32 %r6, [%r5];
    LAST
    mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ntid.x; mad.lo.u32 %r0, %r12, %r13, %r0;
    {AT}
    st.global.u32 [%rd9], %r6;
"""


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_cta_ends_after_its_peers_have_read(seed: int | None) -> None:
    """Check that in every order a CTA's end raises a fault if other CTAs have not read its shared memory yet."""
    (out,) = launch(entry(PEER.replace("LAST", MEET), 128, 1), zeros(128), grid=4, cluster=2, seed=seed)
    assert out.tolist() == ([8] * 32 + [7] * 32) * 2
    with pytest.raises(EmulationError, match=r"may end before thread 0 of CTA \d has accessed|which has ended"):
        launch(entry(PEER.replace("LAST", ""), 128, 1), zeros(128), grid=4, cluster=2, seed=seed)


BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r2];"
REFILLED = f"""
    {SLOT}
    mov.u32 %r1, buf; add.u32 %r2, %r1, 256;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra FIRST;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    {BULK}
FIRST:
    bar.sync 0;
    {WAIT}
    ld.shared.u32 %r10, [%r9];
    BETWEEN
    bar.sync 0;
    @%p0 bra SECOND;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    {BULK}
SECOND:
    {WAIT.replace(", 0, ", ", 1, ")}
    ld.shared.u32 %r11, [%r9];
    add.u32 %r10, %r10, %r11;
    {AT}
    st.global.u32 [%rd9], %r10;
"""


def refilled(between: str, seed: int | None = None) -> None:
    """Run a kernel that loads from a stage and then overwrites the stage by a bulk copy. ``between`` is the code
    between the load and the copy."""
    data = np.arange(64, dtype=np.uint32) * 7
    kernel = entry(REFILLED.replace("BETWEEN", between), 520)
    assert (launch(kernel, zeros(64), data, block=64, seed=seed)[0] == 2 * data).all()


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_barrier_does_not_wait_for_loads(seed: int | None) -> None:
    refilled(FENCE, seed)
    for between in ("", "add.u32 %r12, %r10, 1;", "mov.u32 %r12, %r10;"):
        with pytest.raises(Race, match="which thread 0 of CTA 0 may not have loaded yet"):
            refilled(between, seed)


@pytest.mark.parametrize(
    "between",
    [
        "shfl.sync.idx.b32 %r12, %r10, 0, 31, -1;",
        "add.u32 %r12, %r10, 1; st.shared.u32 [%r9+264], %r12;",
        "setp.lt.u32 %p1, %r10, 9; @%p1 bra ON; ON:",
        "ld.shared.u32 %r12, [%r9]; st.shared.u32 [%r9+264], %r12;",
    ],
)
def test_what_waits_for_loads(between: str) -> None:
    """Check that a load counts as performed when an instruction that the compiler cannot move needs the value of this
    load or of a later load."""
    refilled(between)


# Waits that time out

PEEK = """
    {AT}
    mov.u32 %r1, buf; mov.u32 %r5, 0;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra END;
    mbarrier.init.shared.b64 [%r1], 1;
    {BEFORE}
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0, 10000000;
    {AFTER}
LOOP:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0, 10000000;
    @%p2 bra DONE;
    add.u32 %r5, %r5, 1;
    bra LOOP;
DONE:
    selp.u32 %r6, 1, 0, %p1;
    st.global.u32 [%rd9], %r6; st.global.u32 [%rd9+4], %r5;
END:
"""
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r1];"


def peek(before: str, after: str, seed: int | None) -> list[int]:
    """Run a thread that waits twice. Return two numbers: 1 if the first wait succeeded, else 0; and how often the
    second wait timed out."""
    program = entry(PEEK.format(AT=AT, BEFORE=before, AFTER=after), 16)
    return launch(program, zeros(2), zeros(2), seed=seed)[0].tolist()


def test_a_wait_may_time_out_once() -> None:
    for seed in (None, *SEEDS):
        assert peek(ARRIVE, "", seed) == [1, 0]
        # The thread itself arrives only after its first wait, so the first wait times out.
        assert peek("", ARRIVE, seed) == [0, 0]
        with pytest.raises(Deadlock):
            peek("", "", seed)


def test_waits_time_out_at_random() -> None:
    """Check that a wait for a copy times out with some of many seeds, and that without a seed it times out only if
    nothing else can run."""
    body = PEEK.format(AT=AT, BEFORE="", AFTER="").replace(
        "mbarrier.try_wait.parity.shared.b64 %p1",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+16], [%rd1], 16, [%r1];"
        "mbarrier.try_wait.parity.shared.b64 %p1",
    )
    found = [tuple(launch(entry(body, 32), zeros(2), zeros(4), seed=seed)[0].tolist()) for seed in range(40)]
    assert set(found) == {(1, 0), (0, 0)}
    assert launch(entry(body, 32), zeros(2), zeros(4), seed=None)[0].tolist() == [1, 0]


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_copy_that_is_held(seed: int | None) -> None:
    """Check that, of two copies to the same address, the copy in ``held`` is executed last, and that waiting for it
    still succeeds."""
    start = "cp.async.bulk.global.shared::cta.bulk_group [%rd0],"
    body = f"""
    {SLOT} setp.ne.u32 %p0, %r0, 0; mov.u32 %r1, buf;
    st.shared.u32 [%r9], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 bra END;
    {start} [%r1], 128; {start} [%r1+128], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
    """
    for held in (0, 1):
        (out,) = launch(entry(body, 256, 1), zeros(32), block=64, seed=seed, held={held})
        assert out.tolist() == list(range(32 * held, 32 * held + 32))
