"""The PTX emulator, on small programs and single instructions."""

import re
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import spec
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ptx import (
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
    run_kernel,
)
from ptx.arithmetic import PURE, TYPES, Op
from ptx_model import Ptx

from torch_cute_ops.runtime.arch import ARCHS

SEEDS = range(4)


def entry(body: str, shared: int = 0, params: int = 2) -> str:
    """A kernel with pointers ``p0``, ``p1``, … in %rd0, %rd1, …; shared memory is ``buf``; tid in %r0."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    memory = f".shared .align 128 .b8 buf[{shared}];" if shared else ""
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.visible .entry kernel({names})
{{
    .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<40>; .reg .b64 %rd<40>;
    {memory}
    {loads}
    mov.u32 %r0, %tid.x;
    {body}
    ret;
}}
"""


def launch(
    text: str,
    *buffers: np.ndarray,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    seed: int | None = 0,
    **kwargs: Any,
) -> list[np.ndarray]:
    """Run a kernel on copies of the buffers: their contents afterwards."""
    memory = GlobalMemory()
    addresses = [memory.allocate(f"p{i}", b.view(np.uint8)) for i, b in enumerate(buffers)]
    params = [struct.pack("<Q", address) for address in addresses]
    shape = ((grid, 1, 1), (block, 1, 1), params, (cluster, 1, 1))
    Machine(parse(text), Launch(*shape), memory, seed, **kwargs).run()
    return [memory.contents(a, b.nbytes).view(b.dtype) for a, b in zip(addresses, buffers, strict=True)]


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.uint32)


AT = "mul.wide.u32 %rd8, %r0, 4; add.s64 %rd9, %rd0, %rd8;"
"""%rd9: the thread's word of p0."""
SLOT = "shl.b32 %r8, %r0, 2; mov.u32 %r9, buf; add.s32 %r9, %r9, %r8;"
"""%r9: the thread's word of ``buf``."""


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
    """Of 8 lanes; who would read another segment's gets its own value, and false."""
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
    with pytest.raises(NotImplementedError, match=r"wgmma\.fence"):
        launch(entry("wgmma.fence.sync.aligned;", params=0))
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
    # Subnormals are zeros of their sign in global memory, but not in shared memory.
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
    """What nobody wrote does not matter where the other operand of a logical operation settles the result."""
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
    """Every thread gets the word that thread ``tid ^ partner`` wrote."""
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


FENCE = "fence.proxy.async.shared::cta;"
READ = "cp.async.bulk.wait_group.read 0;"


def stored(before: str = FENCE, after: str = "", wait: str = READ, end: str = "") -> str:
    """Thread 0 copies what all wrote: ``before`` and ``after`` the barrier it is fenced; ``end`` is for all."""
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
        # By the thread that copies, or by one that the copy is after.
        stored("", FENCE),
        stored("", f"@!%p0 {FENCE}"),
        stored("", f"@%p1 {FENCE} bar.sync 0;"),
    ):
        (out,) = launch(program, zeros(64), block=64, seed=seed)
        assert out.tolist() == list(range(64))


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_stores_need_a_fence(seed: int | None) -> None:
    """After the stores, in all shared memory, and before the copy."""
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
    """Before anything is written where they read, and before their threads end."""
    again = "bar.sync 0; st.shared.u32 [%r9], %r0;"
    later = "mov.u32 %r4, 0; L: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 300; @%p2 bra L;"
    launch(stored(end=again), zeros(64), block=64, seed=seed)
    with pytest.raises(Race, match=r"a bulk copy of thread 0 of CTA 0 read"):
        launch(stored(wait="", end=again), zeros(64), block=64, seed=seed)
    for bad in (
        stored(wait="cp.async.bulk.wait_group.read 1;", end=again),
        # Who waits is another thread, or waits too late.
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
    # What no thread wrote needs no fence.
    unchanged = STREAM.replace("st.shared.u32 [%r9], %r5;", "").replace(FENCE, "")
    assert (launch(entry(unchanged, 264), zeros(192), data, block=64, seed=seed)[0] == data).all()


# cp.async


def gathered(
    copies: str = "cp.async.ca.shared.global [%r9], [%rd9], 4; cp.async.commit_group;",
    between: str = "cp.async.wait_group 0; bar.sync 0;",
    partner: int = 32,
    after: str = "",
) -> str:
    """Every thread gets the word that thread ``tid ^ partner`` copied."""
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
        # Within a warp, and for a thread itself, less is enough.
        (gathered(between="cp.async.wait_group 0; bar.warp.sync -1;", partner=1), 1),
        (gathered(between="cp.async.wait_group 0;", partner=0), 0),
        # An empty group is newer.
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
        # Of a group that is not committed, or where some threads do not wait.
        gathered(copy, f"{wait} bar.sync 0;"),
        gathered(between=f"@%p0 {wait} bar.sync 0;"),
    ):
        with pytest.raises(Race, match=r"read of .* a cp\.async of thread \d+ of CTA 0 wrote"):
            launch(program, WORDS, zeros(64), block=64, seed=seed)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_cp_async_must_not_overwrite(seed: int | None) -> None:
    """What others may still read; nor may anything be stored where it still writes."""
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


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_groups_of_cp_async(seed: int | None) -> None:
    """Of two groups, the older is there before the newer."""
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
    # A bulk copy reads what was fenced.
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
    """What ``copy`` brings each of 32 threads of its row, into bytes that were 0xFF."""
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
        # Who reads nothing may be out of bounds.
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
    """Each CTA sends a word to both."""
    (out,) = launch(entry(CLUSTER, 72, 1), zeros(128), grid=4, cluster=2, seed=seed)
    assert out.tolist() == [100101] * 128
    early = CLUSTER.replace("barrier.cluster.arrive.aligned;", "").replace("barrier.cluster.wait.aligned;", "")
    with pytest.raises(EmulationError):
        launch(entry(early, 72, 1), zeros(128), grid=4, cluster=2, seed=seed)


# Matrices


def lane_words(count: int, pointer: str = "%rd0") -> str:
    """%rd9: the thread's first of ``count`` words."""
    return f"mul.wide.u32 %rd8, %r0, {4 * count}; add.s64 %rd9, {pointer}, %rd8;"


def registers(first: int, end: int) -> str:
    return "{" + ", ".join(f"%r{i}" for i in range(first, end)) + "}"


STORE = f"st.global.v4.b32 [%rd9], {registers(30, 34)};"


def product(k: int, half: str, before: str = "", after: str = "", store: str = STORE) -> str:
    """Each warp multiplies: a lane's words of A, B and C are in p0, its result goes to p1."""
    b, c = 10 + k // 4, 10 + k // 4 + k // 8
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd9+{4 * i}];" for i in range(c - 6))
    body = f"""
    {lane_words(c - 6)} {loads}
    {before}
    mma.sync.aligned.m16n8k{k}.row.col.f32.{half}.{half}.f32
        {registers(30, 34)}, {registers(10, b)}, {registers(b, c)}, {registers(c, c + 4)};
    {after}
    {lane_words(4, "%rd1")}
    {store}
    """
    return entry(body, 128)


def fragments(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> np.ndarray:
    """The words of each lane, as the tables of the PTX ISA have them."""
    words = []
    for lane in range(32):
        group, pair = lane >> 2, lane % 4
        elements = []
        for i in range(a.shape[1] // 2):
            elements.append(a[group + 8 * (i % 4 >= 2), pair * 2 + (i & 1) + 8 * (i >= 4)])
        for i in range(b.shape[0] // 4):
            elements.append(b[pair * 2 + (i & 1) + 8 * (i >= 2), group])
        sums = [c[group + 8 * (i >= 2), pair * 2 + (i & 1)] for i in range(4)]
        words.append(torch.stack(elements).view(torch.int32))
        words.append(torch.stack(sums).view(torch.int32))
    return torch.cat(words).numpy().view(np.uint32)


def matrices(k: int, half: str) -> tuple[torch.Tensor, ...]:
    """Integers, so that every sum is exact."""
    dtype = HALVES[half][0]
    a, b = torch.randint(-100, 101, (16, k)).to(dtype), torch.randint(-100, 101, (k, 8)).to(dtype)
    return a, b, torch.randint(-(2**20), 2**20, (16, 8)).float()


def of_lanes(words: np.ndarray) -> torch.Tensor:
    """The 16×8 matrix of each warp from the lanes' results."""
    lanes = torch.from_numpy(words).view(torch.float32).reshape(-1, 8, 4, 2, 2)
    return lanes.permute(0, 3, 1, 2, 4).reshape(-1, 16, 8)


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("k", [8, 16])
def test_mma(k: int, half: str) -> None:
    warps = [matrices(k, half) for _ in range(3)]
    words = np.concatenate([fragments(*warp) for warp in warps])
    (_, out) = launch(product(k, half), words, zeros(3 * 128), block=96)
    assert torch.equal(of_lanes(out), torch.stack([a.float() @ b.float() + c for a, b, c in warps]))
    # Not only integers: rounded once, and infinities and NaN where they belong.
    a, b, c = (torch.randn_like(x) for x in warps[0])
    a[3, 2], c[5, 1] = torch.inf, torch.nan
    want = a.double() @ b.double() + c.double()
    (_, out) = launch(product(k, half), fragments(a, b, c), zeros(128))
    assert torch.equal(of_lanes(out)[0].nan_to_num(7.0), want.float().nan_to_num(7.0))
    assert out.view(np.float32)[np.isnan(out.view(np.float32))].view(np.uint32).tolist() == [0x7FFFFFFF]


def test_wrong_products() -> None:
    words = fragments(*matrices(16, "f16"))
    with pytest.raises(EmulationError, match=r"fewer than 32 threads; CTA 0, thread 32; .*mma\.sync"):
        launch(product(16, "f16"), np.tile(words, 2), zeros(256), block=48)
    with pytest.raises(Deadlock, match=r"31 threads .*mma\.sync"):
        launch(product(16, "f16", "setp.eq.u32 %p0, %r0, 5; @%p0 bra END;", "END:"), words, zeros(128))
    # Lanes at two instructions do not meet.
    mma = re.search(r"mma[^;]*;", product(16, "f16"))[0]
    with pytest.raises(Deadlock, match=r"16 threads .*mma\.sync.*\n.*16 threads .*mma\.sync"):
        two = product(16, "f16", "setp.lt.u32 %p0, %r0, 16; @%p0 bra OTHER;", f"bra END; OTHER: {mma} END:")
        launch(two, words, zeros(128))
    for form in ("m16n8k16.row.col.f16.f16.f16.f16", "m16n8k32.row.col.f32.e4m3.e4m3.f32", "m16n8k16.row.row.f32"):
        with pytest.raises(NotImplementedError, match=form):
            launch(product(16, "f16").replace("m16n8k16.row.col.f32.f16.f16.f32", form), words, zeros(128))


@pytest.mark.parametrize(
    ("register", "lane", "results", "lanes"), [(11, 13, (2, 3), range(12, 16)), (15, 9, (0, 2), range(1, 32, 4))]
)
def test_products_of_what_nobody_wrote(register: int, lane: int, results: tuple, lanes: range) -> None:
    """A word of A that is missing makes row 11 undefined, one of B column 2, and nothing else."""
    words = fragments(*matrices(16, "f16"))
    hole = f"{SLOT} setp.eq.u32 %p0, %r0, {lane}; @%p0 ld.shared.b32 %r{register}, [%r9];"
    for result in range(4):
        for reader in (0, 1, 5, 9, 11, 12, 13, 15, 16, 29):
            store = f"setp.eq.u32 %p1, %r0, {reader}; @%p1 st.global.b32 [%rd9], %r{30 + result};"
            program = product(16, "f16", hole, store=store)
            if result in results and reader in lanes:
                with pytest.raises(Uninitialised, match=f"thread {reader};"):
                    launch(program, words, zeros(128))
            else:
                launch(program, words, zeros(128))


def matrix_loads(form: str, between: str = "bar.warp.sync -1;", after: str = "", offset: int = 0) -> str:
    """Each warp stores 32 rows of 16 bytes and loads matrices; lane ``i`` has the address of row ``5 i + 3``."""
    count = int(form[1])
    body = f"""
    {lane_words(4)} ld.global.v4.b32 {registers(10, 14)}, [%rd9];
    mov.u32 %r9, buf; mad.lo.u32 %r9, %r0, 16, %r9;
    st.shared.v4.b32 [%r9], {registers(10, 14)};
    {between}
    mad.lo.u32 %r7, %r0, 5, 3; and.b32 %r7, %r7, 31; and.b32 %r6, %r0, 32; or.b32 %r7, %r7, %r6;
    shl.b32 %r7, %r7, 4; mov.u32 %r6, buf; add.u32 %r7, %r7, %r6; add.u32 %r7, %r7, {offset};
    mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
    ldmatrix.sync.aligned.m8n8.{form}.b16 {registers(20, 20 + count)}, [%r7];
    {after}
    {lane_words(4, "%rd1")} st.global.v4.b32 [%rd9], {registers(20, 24)};
    """
    return entry(body, 1024)


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("form", ["x1.shared", "x2.shared::cta", "x4.shared", "x1.trans.shared", "x4.trans.shared"])
def test_ldmatrix(form: str, seed: int | None) -> None:
    halves = np.arange(64 * 8, dtype=np.uint16) * 31
    (_, out) = launch(matrix_loads(form), halves, zeros(256), block=64, seed=seed, strict=True)
    rows = halves.reshape(2, 32, 8)[:, (5 * np.arange(32) + 3) % 32].reshape(2, 4, 8, 8)
    found = out.reshape(2, 32, 4).view(np.uint16).reshape(2, 8, 4, 4, 2)
    for i in range(4):
        want = rows[:, i].swapaxes(1, 2) if "trans" in form else rows[:, i]
        got = found[:, :, :, i].reshape(2, 8, 8)
        assert (got == (want if i < int(form[1]) else 0)).all()


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_ldmatrix_races(seed: int | None) -> None:
    data = np.arange(64 * 4, dtype=np.uint32)
    # Lanes that meet there, or at a product, do not know what others stored.
    product = f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {registers(20, 24)},"
    product += "{%r10, %r11}, {%r12}, {%r13, %r13, %r13, %r13};"
    for between in ("", product):
        with pytest.raises(Race, match=r"read of .*ldmatrix"):
            launch(matrix_loads("x4.shared", between), data, zeros(256), block=64, seed=seed)
    # Lane 0 has the address of row 3; lane 8, of row 11, which x1 does not read.
    again = "setp.ne.u32 %p0, %r0, LANE; @%p0 bra END; st.shared.u32 [%r9], %r0; END:"
    with pytest.raises(Race, match=r"write of .* thread 0 of CTA 0 read"):
        launch(matrix_loads("x1.shared", after=again.replace("LANE", "3")), data, zeros(256), block=64, seed=seed)
    launch(matrix_loads("x1.shared", after=again.replace("LANE", "11")), data, zeros(256), block=64, seed=seed)
    ordered = "bar.warp.sync -1;" + again.replace("LANE", "3")
    launch(matrix_loads("x1.shared", after=ordered), data, zeros(256), block=64, seed=seed)


def test_wrong_ldmatrix() -> None:
    data = np.arange(64 * 4, dtype=np.uint32)
    for offset, error in ((8, Misaligned), (512, OutOfBounds), (-4096, OutOfBounds)):
        with pytest.raises(error, match="ldmatrix"):
            launch(matrix_loads("x4.shared", offset=offset), data, zeros(256), block=64)
    with pytest.raises(EmulationError, match="fewer than 32 threads"):
        launch(matrix_loads("x1.shared"), data, zeros(256), block=16)
    with pytest.raises(Deadlock, match="ldmatrix"):
        skip = "setp.eq.u32 %p0, %r0, 31; @%p0 bra END;"
        launch(matrix_loads("x1.shared", "bar.warp.sync -1;" + skip, "END:"), data, zeros(256))
    for form in ("x1.shared.b8x16", "x2.m16n16.shared"):
        with pytest.raises(NotImplementedError, match="ldmatrix"):
            launch(matrix_loads(form), data, zeros(256))


@pytest.mark.parametrize(("form", "lanes"), [("x1.shared", range(12, 16)), ("x1.trans.shared", range(1, 32, 4))])
def test_matrices_that_nobody_wrote(form: str, lanes: range) -> None:
    """Row 3 of the matrix is missing; of the other lanes the results may be stored."""
    data = np.arange(32 * 4, dtype=np.uint32)
    program = matrix_loads(form).replace("st.shared.v4", "setp.ne.u32 %p1, %r0, 18; @%p1 st.shared.v4")
    for lane in (0, 1, 5, 11, 12, 15, 16, 30):
        only = f"setp.eq.u32 %p0, %r0, {lane}; @%p0 st.global.v4"
        one = program.replace("st.global.v4", only)
        if lane in lanes:
            with pytest.raises(Uninitialised, match=f"thread {lane};"):
                launch(one, data, zeros(128))
        else:
            launch(one, data, zeros(128))


def gemm(config: tuple, rows: int, seed: int | None, edit: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the small kernel of the DSL computes, and what torch does."""
    from ptx.gemm_kernel import Config, GemmKernel

    config = Config(*config)
    dtype = {"Float16": torch.float16, "BFloat16": torch.bfloat16}[config.dtype]
    a, b = torch.randint(-16, 17, (rows, config.k)).to(dtype), torch.randint(-16, 17, (config.k, 32)).to(dtype)
    out = torch.full((rows, 32), torch.nan)
    given = b.T.contiguous() if config.transposed else b
    run_kernel(GemmKernel(config), ARCHS["sm_90a"], a, given, out, seed=seed, strict=True, edit=edit)
    return out, a.float() @ b.float()


GEMMS = [("Float16", 64, True), ("BFloat16", 64, False)]


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("config", GEMMS)
def test_matrix_product_of_the_dsl(config: tuple, seed: int | None) -> None:
    for rows in (16, 23, 32):
        assert torch.equal(*gemm(config, rows, seed))


@pytest.mark.parametrize("config", GEMMS)
def test_wrong_matrix_products_of_the_dsl(config: tuple) -> None:
    def without(pattern: str, which: int) -> Any:
        def edit(text: str) -> str:
            at = list(re.finditer(pattern, text))[which]
            return text[: at.start()] + text[at.end() :]

        return edit

    wait, barrier, group = r"cp\.async\.wait_group\s+1;", r"bar\.sync\s+0;", r"cp\.async\.commit_group;"
    # The barriers: before a stage is read, and before it is filled again.
    for pattern, which in ((wait, 1), (barrier, 0), (barrier, 1), (barrier, 2), (barrier, 3), (group, 1)):
        for seed in (None, 0, 1):
            with pytest.raises(Race, match=r"cp\.async"):
                gemm(config, 32, seed, without(pattern, which))


# Arithmetic


def compute(opcode: str, *operands: Any) -> np.ndarray:
    """One instruction on arrays of its types."""
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
    """The nearest value of a format, ties to even; or the next towards zero."""
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


HALVES = {
    "bf16": (torch.bfloat16, (8, -126, 127), [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC1]),
    "f16": (torch.float16, (11, -14, 15), [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E01]),
}


@pytest.mark.parametrize("name", HALVES)
def test_packed_halves(name: str) -> None:
    """Sums and products as torch rounds them, of random bits and of all pairs of special ones; fma rounded once."""
    dtype, form, special = HALVES[name]
    some = np.array([*special, *(bits | 0x8000 for bits in special)], np.uint16)
    random = np.random.default_rng(0).integers(1 << 16, size=(3, 1 << 16), dtype=np.uint16)
    # Of similar size, too.
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
    x = np.concatenate([np.float32(spec.scale_value(np.arange(127), "e4m3")), [1e9, np.nan, np.inf, 1e-9]])
    middle = (x[:126].astype(np.float64) + x[1:127]) / 2
    x = np.concatenate([x, middle, np.nextafter(middle.astype(np.float32), np.float32(np.inf))]).astype(np.float32)
    got = compute("cvt.rn.satfinite.e4m3x2.f32", np.zeros_like(x), x)
    assert (got == spec.e4m3(x)).all()
    nonzero = ~np.isnan(x)
    negative = compute("cvt.rn.satfinite.e4m3x2.f32", -x, np.zeros_like(x))
    assert (negative[nonzero] == (spec.e4m3(x)[nonzero].astype(np.uint16) | 0x80) << 8).all()


def test_e4m3_to_halves() -> None:
    byte = np.arange(256, dtype=np.uint16)
    got = compute("cvt.rn.f16x2.e4m3x2", byte | (np.uint16(0x3C) << np.uint16(8)))
    values = (got & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
    want = spec.scale_value(byte & 0x7F, "e4m3") * np.where(byte & 0x80, -1, 1)
    assert np.array_equal(values, want.astype(np.float32), equal_nan=True)
    assert (np.signbit(values) == (byte >= 128))[(byte & 0x7F) != 0x7F].all()


def test_e2m1_to_halves() -> None:
    """Each byte of a word in turn, as weights are decoded."""
    body = f"""
    .reg .b8 %b<4>; {AT} ld.global.b32 %r1, [%rd9];
    mov.b32 {{%b0, %b1, %b2, %b3}}, %r1;
    cvt.rn.f16x2.e2m1x2 %r2, %b0; cvt.rn.f16x2.e2m1x2 %r3, %b1; mul.rn.f16x2 %r3, %r3, %r2;
    mul.wide.u32 %rd8, %r0, 8; add.s64 %rd9, %rd1, %rd8; st.global.v2.b32 [%rd9], {{%r2, %r3}};
    """
    bytes_ = np.arange(256, dtype=np.uint32)
    (_, out) = launch(entry(body), bytes_ | 0x2200, zeros(512), block=256)
    nibbles = np.stack([bytes_ & 15, bytes_ >> 4], 1)
    want = spec.e2m1_value(nibbles).astype(np.float16)
    # The second byte holds two ones.
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
    """Every combination of bits picks its bit of the table."""
    given = f"{AT} ld.global.b32 %r1, [%rd9];"
    body = f"{given} lop3.b32 %r2, %r1, 0xCCCCCCCC, 0xAAAAAAAA, {table}; st.global.b32 [%rd9], %r2;"
    (out,) = launch(entry(body, params=1), np.uint32([0xF0F0F0F0, 0x0F0F0F0F]), block=2)
    assert out.view(np.uint8).tolist() == [table] * 4 + [(table << 4 | table >> 4) & 0xFF] * 4


words = st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).map(lambda v: np.array(v, np.uint32))


@given(words, words, st.integers(0, 0x7777))
@settings(max_examples=50, deadline=None)
def test_bytes_and_bits(a: np.ndarray, b: np.ndarray, selector: int) -> None:
    selector &= 0x7777
    assert (compute("prmt.b32", a, b, np.uint32(selector)) == Ptx.prmt(a, b, selector)).all()
    assert (compute("lop3.b32", a, b, a >> 3, np.uint32(0xCA)) == Ptx.select_bits(a, b, a >> 3)).all()
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
