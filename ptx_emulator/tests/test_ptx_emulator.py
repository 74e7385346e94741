"""Test control flow, warps, memory, barriers and races in small programs."""

import struct

import numpy as np
import pytest
from programs import AT, SEEDS, SLOT, entry, launch, zeros

from ptx_emulator import (
    Deadlock,
    EmulationError,
    GlobalMemory,
    Launch,
    Machine,
    Misaligned,
    OutOfBounds,
    Race,
    Uninitialised,
    parse,
)

# Control flow and warps


def test_divergent_loops_meet_again() -> None:
    body = f"""
    {AT}
    mov.u32 %r1, 0; mov.u32 %r2, 0;
LOOP:
    setp.ge.u32 %p0, %r2, %r0;
    @%p0 bra DONE;
    add.u32 %r2, %r2, 1;
    and.b32 %r3, %r2, 1;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra LOOP;
    add.u32 %r1, %r1, %r2;
    bra.uni LOOP;
DONE:
    bar.warp.sync -1;
    @!%p0 mov.u32 %r1, 77;
    st.global.u32 [%rd9], %r1;
    """
    (out,) = launch(entry(body, params=1), zeros(64), block=64)
    assert out.tolist() == [sum(range(1, i + 1, 2)) for i in range(64)]


def test_scopes_have_their_own_registers_and_labels() -> None:
    scope = "{ .reg .b32 t; mov.b32 t, %s; bra.uni OUT; mov.b32 t, 9; OUT: add.u32 %%r1, %%r1, t; }"
    body = f"{AT} mov.b32 %r1, 0; {scope % 1} {scope % 20} st.global.u32 [%rd9], %r1;"
    assert launch(entry(body, params=1), zeros(1), block=1)[0].tolist() == [21]


@pytest.mark.parametrize("width", [32, 8])
def test_shuffle_reduction(width: int) -> None:
    steps = "".join(
        f"shfl.sync.bfly.b32 %r2, %r1, {1 << i}, 31, -1; add.u32 %r1, %r1, %r2;" for i in range(width.bit_length() - 1)
    )
    body = f"{AT} ld.global.u32 %r1, [%rd9]; {steps} st.global.u32 [%rd9], %r1;"
    values = np.arange(64, dtype=np.uint32) ** 2
    (out,) = launch(entry(body, params=1), values, block=64)
    assert (out == values.reshape(-1, width).sum(1).repeat(width)).all()


@pytest.mark.parametrize(
    ("mode", "b", "want"),
    [
        ("up", 3, [i - 3 if i >= 3 else i for i in range(32)]),
        ("down", 5, [i + 5 if i + 5 < 32 else i for i in range(32)]),
        ("idx", 7, [7] * 32),
        ("bfly", 16, [i ^ 16 for i in range(32)]),
    ],
)
def test_shuffle_modes(mode: str, b: int, want: list[int]) -> None:
    clamp = 0 if mode == "up" else 31
    body = f"{AT} shfl.sync.{mode}.b32 %r1|%p0, %r0, {b}, {clamp}, -1; st.global.u32 [%rd9], %r1;"
    assert launch(entry(body, params=1), zeros(32))[0].tolist() == want


@pytest.mark.parametrize("mode", ["up", "down", "idx", "bfly"])
def test_shuffles_within_segments(mode: str) -> None:
    """Check that, with segments of 8 lanes, a lane that would read from another segment gets its own value, and a false
    predicate."""
    clamp = (24 << 8) | (0 if mode == "up" else 7)
    body = f"""
    {AT} shfl.sync.{mode}.b32 %r1|%p0, %r0, 10, {clamp}, -1;
    shfl.sync.{mode}.b32 %r2|%p1, %r0, 3, {clamp}, -1;
    selp.u32 %r3, 100, 0, %p0; selp.u32 %r4, 1000, 0, %p1;
    mad.lo.u32 %r2, %r2, 10000, %r1; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4;
    st.global.u32 [%rd9], %r2;
    """
    want = []
    for lane in range(32):
        word = 0
        for by, digits, yes in ((10, 1, 100), (3, 10000, 1000)):
            near = {"up": lane - by, "down": lane + by, "idx": lane // 8 * 8 + by % 8, "bfly": lane ^ by}[mode]
            inside = near >= lane // 8 * 8 if mode == "up" else near <= lane // 8 * 8 + 7
            word += (near if inside else lane) * digits + inside * yes
        want.append(word)
    assert launch(entry(body, params=1), zeros(32))[0].tolist() == want


def test_vote_elect_and_reduce() -> None:
    body = f"""
    {AT}
    setp.lt.u32 %p0, %r0, 3;
    vote.sync.ballot.b32 %r1, %p0, -1;
    redux.sync.max.u32 %r2, %r0, -1;
    elect.sync %r3|%p1, -1;
    selp.b32 %r4, 1000, 0, %p1;
    add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r4;
    st.global.u32 [%rd9], %r1;
    """
    assert launch(entry(body, params=1), zeros(32))[0].tolist() == [1038] + [38] * 31


def test_predicated_instructions_leave_other_threads_alone() -> None:
    body = f"""
    {AT}
    mov.u32 %r1, 5;
    setp.lt.u32 %p0|%p1, %r0, 2;
    @%p0 add.u32 %r1, %r1, %r0;
    @%p1 st.global.u32 [%rd9], %r1;
    @!%p1 st.global.u32 [%rd9], %r1;
    """
    assert launch(entry(body, params=1), zeros(4), block=4)[0].tolist() == [5, 6, 5, 5]


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"tcgen05\.shift"):
        launch(entry("tcgen05.shift.cta_group::1.down;", params=0))
    for opcode in ("add.rz.f32", "add.rn.f32.bf16", "add.ftz.f16x2"):
        with pytest.raises(NotImplementedError, match=opcode):
            launch(entry(f"{opcode} %r1, %r2, %r3;", params=0))


# Memory


def test_out_of_bounds() -> None:
    body = f"{AT} st.global.u32 [%rd9], %r0;"
    launch(entry(body, params=1), zeros(32))
    with pytest.raises(OutOfBounds, match=r"thread 31; .*st\.global"):
        launch(entry(body, params=1), zeros(31))


def test_misaligned() -> None:
    with pytest.raises(Misaligned, match="thread 1"):
        launch(entry(f"{AT} ld.global.v2.u32 {{%r1, %r2}}, [%rd9];", params=1), zeros(64))


def test_values_that_nobody_wrote_may_be_read_but_not_stored() -> None:
    read = f"{AT} {SLOT} ld.shared.u32 %r1, [%r9]; add.u32 %r2, %r1, 1; setp.eq.u32 %p0, %r0, 99;"
    launch(entry(f"{read} selp.b32 %r2, %r2, %r0, %p0; st.global.u32 [%rd9], %r2;", 128, 1), zeros(32))
    with pytest.raises(Uninitialised, match=r"thread 0; .*st\.global"):
        launch(entry(f"{read} st.global.u32 [%rd9], %r2;", 128, 1), zeros(32))
    with pytest.raises(Uninitialised):
        launch(
            entry(f"{read} st.shared.u32 [%r9], %r2; ld.shared.u32 %r3, [%r9]; st.global.u32 [%rd9], %r3;", 128, 1),
            zeros(32),
        )


def test_shared_memory_has_bounds() -> None:
    with pytest.raises(OutOfBounds):
        launch(entry(f"{SLOT} st.shared.u32 [%r9], %r0;", 124, 0))
    with pytest.raises(OutOfBounds):
        launch(entry("mov.u32 %r1, 0; st.shared.u32 [%r1], %r0;", 124, 0))


def test_generic_addresses_and_local_memory() -> None:
    body = f"""
    .local .align 8 .b8 depot[16];
    {AT} {SLOT}
    mov.u64 %rd2, depot; cvta.local.u64 %rd3, %rd2;
    st.u32 [%rd3+4], %r0; ld.local.u32 %r1, [%rd2+4];
    cvt.u64.u32 %rd4, %r9; cvta.shared.u64 %rd4, %rd4;
    st.u32 [%rd4], %r1; ld.shared.u32 %r2, [%r9];
    st.u32 [%rd9], %r2;
    """
    assert launch(entry(body, 128, 1), zeros(32))[0].tolist() == list(range(32))


def test_atomics() -> None:
    body = "atom.global.add.u32 %r1, [%rd0], 1; red.global.max.u32 [%rd0+4], %r0;"
    assert launch(entry(body, params=1), zeros(2), block=64, grid=2)[0].tolist() == [128, 63]


def test_atomic_sums_of_floats() -> None:
    body = f"{AT} cvt.rn.f32.u32 %r1, %r0; red.global.add.f32 [%rd0], %r1; atom.global.add.f32 %r2, [%rd0], 0f3F800000;"
    assert launch(entry(body, params=1), zeros(1), block=64)[0].view(np.float32).tolist() == [sum(range(64)) + 64]
    # Atomic fp32 sums in global memory flush subnormals to zeros of the same sign. In shared memory, they do not.
    values = np.uint32([1, 0x80000002, 0x00800001, 0x00800000])
    body = f"""
    {AT} {SLOT} ld.global.b32 %r1, [%rd9]; mov.b32 %r2, {{NUMBER}};
    st.shared.b32 [%r9], %r1; red.shared.add.f32 [%r9], %r2; ld.shared.b32 %r3, [%r9]; st.global.b32 [%rd9+16], %r3;
    red.global.add.f32 [%rd9], %r2;
    """
    buffer = np.concatenate([values, values])
    (out,) = launch(entry(body.replace("{NUMBER}", "0x80800000"), 128, 1), buffer, block=4)
    assert out.tolist() == [0x80800000, 0x80800000, 0, 0, 0x807FFFFF, 0x80800002, 1, 0]
    (out,) = launch(entry(body.replace("{NUMBER}", "0x80000001"), 128, 1), buffer, block=4)
    assert out.tolist() == [0, 0x80000000, 0x00800001, 0x00800000, 0, 0x80000003, 0x00800000, 0x007FFFFF]


def test_forms_of_global_loads() -> None:
    words = np.arange(64, dtype=np.uint32) * 3
    for opcode in (
        "ld.global.nc",
        "ld.global.L1::no_allocate",
        "ld.global.nc.L1::no_allocate.L2::128B",
        "ld.global.nc.L1::evict_last.L2::256B",
        "ld.relaxed.gpu.global.L1::no_allocate",
        "ld.volatile.global",
        "ld.global.cg",
    ):
        body = f"""
        shl.b32 %r1, %r0, 5; cvt.u64.u32 %rd8, %r1; add.s64 %rd9, %rd0, %rd8;
        {opcode}.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd9+16];
        createpolicy.fractional.L2::evict_first.b64 %rd5, 1.0;
        {opcode}.L2::cache_hint.v2.b32 {{%r6, %r7}}, [%rd9], %rd5;
        add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5; add.u32 %r2, %r2, %r6;
        add.u32 %r2, %r2, %r7; st.global.u32 [%rd9], %r2;
        """
        (out,) = launch(entry(body, params=1), words, block=8)
        rows = words.reshape(8, 8)
        assert (out.reshape(8, 8)[:, 0] == rows[:, [0, 1, 4, 5, 6, 7]].sum(1)).all(), opcode


# Barriers and races


@pytest.mark.parametrize(("operation", "decides"), [("and", 0), ("or", 1)])
def test_one_operand_may_decide(operation: str, decides: int) -> None:
    """Check that an uninitialised operand of a logical operation has no effect if the other operand alone determines
    the result."""
    read = f"{AT} {SLOT} ld.shared.u32 %r1, [%r9]; setp.eq.u32 %p0, %r1, 5;"
    for value in (0, 1):
        body = f"{read} setp.eq.u32 %p1, {value}, 1; {operation}.pred %p2, %p0, %p1; selp.u32 %r2, 1, 0, %p2;"
        program = entry(f"{body} st.global.u32 [%rd9], %r2;", 128, 1)
        if value == decides:
            (out,) = launch(program, zeros(32))
            assert out.tolist() == [decides] * 32
        else:
            with pytest.raises(Uninitialised):
                launch(program, zeros(32))


def exchange(barrier: str, after: str = "", partner: int = 32) -> str:
    """Return a program in which every thread stores a word and then reads the word that thread ``tid ^ partner``
    stored."""
    body = f"""
    {AT} {SLOT}
    st.shared.u32 [%r9], %r0;
    {barrier}
    xor.b32 %r8, %r8, {4 * partner}; mov.u32 %r7, buf; add.u32 %r7, %r7, %r8;
    ld.shared.u32 %r1, [%r7];
    st.global.u32 [%rd9], %r1;
    {after}
    """
    return entry(body, 256, 1)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_barrier_between_warps(seed: int | None) -> None:
    (out,) = launch(exchange("bar.sync 0;"), zeros(64), block=64, seed=seed)
    assert out.tolist() == [i ^ 32 for i in range(64)]
    (out,) = launch(exchange("barrier.sync 3, 64;"), zeros(64), block=64, seed=seed)
    assert out.tolist() == [i ^ 32 for i in range(64)]


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("instead", ["", "bar.warp.sync -1;"])
def test_a_missing_barrier_is_noticed(instead: str, seed: int | None) -> None:
    with pytest.raises((Race, Uninitialised)):
        launch(exchange(instead), zeros(64), block=64, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_overwriting_what_others_may_still_read_is_noticed(seed: int) -> None:
    again = "st.shared.u32 [%r9], %r0;"
    launch(exchange("bar.sync 0;", f"bar.sync 0; {again}"), zeros(64), block=64, seed=seed)
    with pytest.raises(Race):
        launch(exchange("bar.sync 0;", again), zeros(64), block=64, seed=seed)


def test_lanes_of_a_warp_race_too() -> None:
    launch(exchange("bar.warp.sync -1;", partner=1), zeros(32))
    with pytest.raises(Race):
        launch(exchange("", partner=1), zeros(32))
    shuffle = exchange("shfl.sync.idx.b32 %r3, %r0, 0, 31, -1;", partner=1)
    launch(shuffle, zeros(32))
    with pytest.raises(Race):
        launch(shuffle, zeros(32), strict=True)


def test_two_threads_that_write_one_word_race() -> None:
    with pytest.raises(Race):
        launch(entry("mov.u32 %r1, buf; st.shared.u32 [%r1], %r0;", 128, 0))


@pytest.mark.parametrize(
    "body",
    [
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra END; bar.sync 0; END:",
        "setp.lt.u32 %p0, %r0, 5; @%p0 bra END; bar.warp.sync -1; END: bar.sync 0;",
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra A; bar.sync 1; bra B; A: bar.sync 2; B:",
    ],
)
def test_deadlock(body: str) -> None:
    with pytest.raises(Deadlock, match="threads"):
        launch(entry(body, params=0), block=64)


def test_an_endless_loop_ends() -> None:
    with pytest.raises(EmulationError, match="steps"):
        launch(entry("L: bra L;", params=0), max_steps=1000)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_who_polls_does_not_keep_others_from_going_on(seed: int | None) -> None:
    """Check that the last warp runs even if the other warps poll at a lower program address."""
    body = """
    setp.ge.u32 %p0, %r0, 992;
    @%p0 bra STORE;
POLL:
    ld.acquire.gpu.global.u32 %r1, [%rd0];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra POLL;
    st.global.u32 [%rd0+4], %r1;
    bra END;
STORE:
    st.release.gpu.global.u32 [%rd0], 7;
END:
    """
    (out,) = launch(entry(body, params=1), zeros(2), block=1024, seed=seed, max_steps=1_000)
    assert out.tolist() == [7, 7]


# The previous kernel


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_what_the_kernel_before_writes_is_there_behind_the_wait(seed: int | None) -> None:
    memory = GlobalMemory()
    address = memory.allocate("p0", np.full(64, 3, np.uint32).view(np.uint8))

    def before() -> None:
        memory.contents(address, 256).view(np.uint32)[:] = 5

    loads = "ld.global.u32 %r1, [%rd9]; griddepcontrol.wait; ld.global.u32 %r2, [%rd9];"
    text = entry(f"{AT} {loads} mad.lo.u32 %r2, %r1, 16, %r2; st.global.u32 [%rd9], %r2;", params=1)
    place = Launch((1, 1, 1), (64, 1, 1), [struct.pack("<Q", address)], (1, 1, 1))
    Machine(parse(text), place, memory, seed, before=before).run()
    assert (memory.contents(address, 256).view(np.uint32) == 3 * 16 + 5).all()


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("polled", [3, 5])
def test_the_kernel_before_ends_for_those_who_poll(polled: int, seed: int | None) -> None:
    """Check that the previous kernel ends if all threads poll for the value 5, which this kernel writes, but does not
    end while the threads can continue with the old value 3."""
    memory = GlobalMemory()
    address = memory.allocate("p0", np.full(65, 3, np.uint32).view(np.uint8))

    def before() -> None:
        memory.contents(address, 260).view(np.uint32)[:] = 5

    text = entry(
        f"""
        {AT}
    POLL:
        ld.acquire.gpu.global.u32 %r1, [%rd0+256];
        setp.ne.u32 %p0, %r1, {polled};
        @%p0 bra POLL;
        ld.global.u32 %r2, [%rd9];
        griddepcontrol.wait;
        st.global.u32 [%rd9], %r2;
        """,
        params=1,
    )
    place = Launch((1, 1, 1), (64, 1, 1), [struct.pack("<Q", address)], (1, 1, 1))
    Machine(parse(text), place, memory, seed, before=before).run()
    assert (memory.contents(address, 256).view(np.uint32) == polled).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("griddepcontrol.launch_dependents; griddepcontrol.wait;", "releases dependents before it has waited"),
        ("setp.eq.u32 %p0, %r0, 5; @!%p0 griddepcontrol.wait; griddepcontrol.launch_dependents;", "releases dep"),
        ("st.global.u32 [%rd9], %r0; griddepcontrol.wait;", "p0 is written before the previous kernel has ended"),
        ("ld.global.u32 %r1, [%rd9];", "no thread has waited"),
    ],
)
def test_misuse_of_griddepcontrol(body: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        launch(entry(f"{AT} {body}", params=1), zeros(32), before=lambda: None)


STORE_AHEAD = f"{AT} add.s64 %rd9, %rd1, %rd8; st.global.u32 [%rd9], %r0; griddepcontrol.wait;"


def test_what_the_kernel_before_does_not_access_may_be_written() -> None:
    _, got = launch(entry(STORE_AHEAD), zeros(32), zeros(32), before=lambda: None, accessed_before={1})
    assert got.tolist() == list(range(32))
    with pytest.raises(EmulationError, match="p1 is written before the previous kernel has ended"):
        launch(entry(STORE_AHEAD), zeros(32), zeros(32), before=lambda: None, accessed_before={1, 2})


@pytest.mark.parametrize("access", ["ld.global.u32 %r1, [%rd9];", "st.global.u32 [%rd9], %r0;"])
def test_which_allocations_are_accessed(access: str) -> None:
    memory = GlobalMemory()
    params = [struct.pack("<Q", memory.allocate(f"p{i}", zeros(32).view(np.uint8))) for i in range(3)]
    text = entry(f"{AT} add.s64 %rd9, %rd1, %rd8; {access}", params=3)
    machine = Machine(parse(text), Launch((1, 1, 1), (32, 1, 1), params), memory)
    machine.run()
    assert machine.accessed == {2}


def test_vector_registers() -> None:
    """Check that a vector register and its members can be operands, and that its name belongs to its scope."""
    body = f"""
    {AT} shl.b32 %r8, %r0, 4; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8;
    {{ .reg .v4 .s32 some; .reg .v2 .b32 pair;
    mov.s32 some.x, %r0; mov.s32 some.y, 7; mov.s32 some.z, 8; mov.s32 some.w, 9;
    st.shared.v4.s32 [%r9], some; ld.shared.v2.b32 pair, [%r9]; }}
    {{ .reg .v2 .b32 some; ld.shared.v2.b32 some, [%r9+8]; add.u32 %r1, some.x, some.y; }}
    add.u32 %r1, %r1, pair.x; add.u32 %r1, %r1, pair.y; st.global.u32 [%rd9], %r1;
    """
    scoped = body.replace("add.u32 %r1, %r1, pair.x; add.u32 %r1, %r1, pair.y;", "")
    (out,) = launch(entry(scoped, 512, 1), zeros(32))
    assert (out == 17).all()
    with pytest.raises(NotImplementedError):
        launch(entry(body, 512, 1), zeros(32))
