"""Asynchronous copies: ``cp.async``, ``cp.async.bulk`` and ``st.async``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.decoder import Decoder, Step, acts, effect, modifiers, unknown
from ptx_emulator.instructions.accesses import SPACES
from ptx_emulator.memory import REGION_SHIFT, WRITTEN, EmulationError, Fault, Misaligned, OutOfBounds
from ptx_emulator.parser import Instruction, Reg, Vec
from ptx_emulator.values import TYPES, UNSIGNED, Array, of_each, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


@effect("cp.async.ca cp.async.cg")
def _cp_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    mods, _ = modifiers(ins, parts, "shared shared::cta global L2::64B L2::128B L2::256B L2::cache_hint")
    target, source, size, *rest = ins.operands
    if size.value not in ((16,) if ".cg." in ins.opcode else (4, 8, 16)):
        raise unknown(ins)
    if "L2::cache_hint" in mods:
        rest.pop()
    # The optional operand is the number of bytes to read, or a predicate. A true predicate makes the copy write zeros.
    (count,) = rest or (size,)
    ignores = isinstance(count, Reg) and count.width == 1
    m = d.machine

    def run(threads: Array, target: Array, source: Array, count: Array) -> tuple:
        counts = np.where(count, 0, size.value) if ignores else count.astype(np.int64)
        target, source, counts = (of_each(x, threads) for x in (target, source, counts))
        m.under_way.start_group(threads, _some_cp_async(m, threads, target, source, size.value, counts))
        return ()

    sources = [d.address(target), d.address(source), d.source(count, TYPES["pred" if ignores else "u32"])]
    return Step(ins, sources, [], run)


def _some_cp_async(
    m: Machine, threads: Array, target: Array, source: Array, size: int, counts: Array
) -> Callable[[], None]:
    """Check the addresses, and return a function that executes the copy later. Bytes that are not read become zeros."""
    bad = positions((counts > size) | (source % size != 0))
    if len(bad):
        kind = EmulationError if counts[bad[0]] > size else Misaligned
        raise Fault(kind, bad[0], f"{counts[bad[0]]} of {size} bytes at {source[bad[0]]:#x}")
    width = 1 if (counts % 4).any() else 4
    rows, columns = np.nonzero(np.arange(0, size, width) < counts[:, None])
    places: Any = []
    if len(rows):
        places = m.checked(rows, m.places, "global", threads[rows], source[rows] + width * columns)
    for subset, memory, bank, offset in places:
        m.checked(rows[subset], memory.load, bank, offset, width, 1)
    ctas, offsets = m.shared_place("shared", threads, target)
    words = np.zeros((len(threads), size // 4), np.uint32)
    m.shared.store(ctas, offsets, 4, list(words.T))
    # In FlashInfer's FP8 kernels, all lanes of a warp copy the same scale to the same address. In lenient mode, equal
    # copies of one instruction count as a single access.
    writers = np.arange(len(threads))
    if m.lenient:
        _, writers = np.unique([m.warp[threads], target, source, counts], axis=1, return_index=True)
    m.races.write(threads[writers], ctas[writers], offsets[writers], size, m.under_way.committed[threads[writers]])
    # While the copy is in flight, its target bytes count as uninitialised, even if they were initialised before.
    for i in range(0, size, 4):
        m.shared.forget(ctas, offsets + i, 4)

    def execute() -> None:
        data = words.view(UNSIGNED[8 * width])
        for subset, memory, bank, offset in places:
            data[rows[subset], columns[subset]] = memory.load(bank, offset, width, 1)[0][0]
        m.shared.store(ctas, offsets, 4, list(words.T))

    return execute


@effect("cp.async.commit_group")
def _commit_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    machine = d.machine

    def run(threads: Array) -> tuple:
        machine.under_way.committed[threads] += 1
        return ()

    return Step(ins, [], [], run)


@effect("cp.async.wait_group cp.async.wait_all")
def _wait_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    most = ins.operands[0].value if ins.operands else None
    machine = d.machine
    return Step(ins, [], [], lambda threads: machine.under_way.wait_async(threads, most), "block")


@effect("cp.async.mbarrier.arrive")
def _arrive_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode an arrival at an mbarrier that takes place when the thread's earlier ``cp.async`` copies are complete.

    Without ``noinc``, the current phase expects one more arrival, so that the arrival leaves the number of missing
    arrivals unchanged.
    """
    mods, types = modifiers(ins, parts, "noinc shared shared::cta")
    # The emulator starts a new group of copies here, so that it can tell later copies from the copies that arrive.
    groups = ("cp.async.commit_group", "cp.async.wait_group")
    if types != [TYPES["b64"]] or any(i.opcode.startswith(groups) for i in d.machine.program.instructions):
        raise unknown(ins)
    m = d.machine

    def run(threads: Array, address: Array) -> tuple:
        ctas, offsets = m.shared_place("shared", threads, address)
        m.barriers.expect_copies(threads, ctas, offsets, 0 if "noinc" in mods else 1)
        m.under_way.arrive_after_copies(threads, ctas, offsets)
        return ()

    return Step(ins, [d.address(ins.operands[0])], [], run)


@effect("cp.async.bulk")
def _bulk(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    known = "mbarrier::complete_tx::bytes bulk_group L2::cache_hint"
    modifiers(ins, parts, known + " " + " ".join(SPACES))
    target, source = parts[:2]
    if target.startswith("shared") and source == "global":
        return _bulk_to_shared(d, ins, target)
    if target == "shared::cluster" and source == "shared::cta" and "bulk_group" not in parts:
        return _bulk_between_ctas(d, ins)
    if target == "global" and source.startswith("shared") and "bulk_group" in parts:
        return _bulk_to_global(d, ins)
    raise unknown(ins)


def _bulk_to_shared(d: Decoder, ins: Instruction, space: str) -> Step:
    m = d.machine

    def run(threads: Array, target: Array, source: Array, size: Array, barrier: Array) -> tuple:
        source, size = (of_each(x, threads) for x in (source, size))

        def bytes_of(i: int) -> Bytes:
            return int(size[i]), global_bytes(m, threads[i : i + 1], source[i : i + 1], int(size[i]))

        return _start_to_shared(m, space, threads, target, barrier, bytes_of)

    target, source, size, barrier = ins.operands[:4]
    sources = [d.address(target), d.address(source), d.source(size, TYPES["u32"]), d.address(barrier)]
    return Step(ins, sources, [], run)


def _bulk_between_ctas(d: Decoder, ins: Instruction) -> Step:
    m = d.machine

    def run(threads: Array, target: Array, source: Array, size: Array, barrier: Array) -> tuple:
        source, size = (of_each(x, threads) for x in (source, size))
        ctas, offsets = m.shared_place("shared", threads, source)

        def bytes_of(i: int) -> Bytes:
            cta, offset, count = int(ctas[i]), int(offsets[i]), int(size[i])
            here = m.shared.span(cta, offset, count, True)
            agent = m.races.begin(int(threads[i]))
            rows = m.races.copy_reads(agent, cta, offset, count)

            def read() -> Array:
                m.races.copy_has_read(agent, rows)
                return m.shared.data[here]

            return count, read

        return _start_to_shared(m, "shared::cluster", threads, target, barrier, bytes_of, ctas)

    target, source, size, barrier = ins.operands[:4]
    sources = [d.address(target), d.address(source), d.source(size, TYPES["u32"]), d.address(barrier)]
    return Step(ins, sources, [], run)


Bytes = tuple[int, Callable[[], Array]]
"""Size of a copy in bytes, and a function that reads these bytes when the copy is executed."""


def global_bytes(m: Machine, thread: Array, address: Array, size: int) -> Callable[[], Array]:
    """Check that ``size`` bytes of global memory may be read, and return a function that reads them later."""
    ((_, memory, bank, start),) = m.places("global", thread, address)
    there = memory.span(int(bank[0]), int(start[0]), size, True)
    return lambda: memory.data[there]


def _start_to_shared(
    m: Machine,
    space: str,
    threads: Array,
    target: Array,
    barrier: Array,
    bytes_of: Callable[[int], Bytes],
    sources: Array | None = None,
) -> tuple:
    """Start a copy to shared memory for each thread. Addresses are checked now, and the copy is executed later.

    ``bytes_of(i)`` describes the bytes that thread i copies. If these bytes are in shared memory, ``sources`` are the
    CTAs whose shared memory contains the bytes.
    """
    target, barrier = (of_each(x, threads) for x in (target, barrier))
    ctas, offsets = m.shared_place(space, threads, target)
    barrier_ctas, barriers = m.shared_place(space, threads, barrier)
    for i, thread in enumerate(threads.tolist()):
        cta = int(ctas[i])
        try:
            if barrier_ctas[i] != cta:
                raise Fault(EmulationError, 0, "the mbarrier is in another CTA than the target")
            copy = one_to_shared(m, thread, cta, int(offsets[i]), cta, int(barriers[i]), *bytes_of(i))
            m.under_way.start(thread, copy, (cta,) if sources is None else (cta, int(sources[i])))
        except Fault as fault:
            fault.position = i
            raise
    return ()


def one_to_shared(
    m: Machine,
    thread: int,
    cta: int,
    offset: int,
    barrier_cta: int,
    barrier: int,
    size: int,
    read: Callable[[], Array],
    counted: int | None = None,
) -> Callable[[], None]:
    """Return a function that stores the ``size`` bytes that ``read()`` returns, and then arrives at an mbarrier. The
    mbarrier may belong to another CTA. It counts ``counted`` bytes, or ``size`` bytes if ``counted`` is None."""
    here = m.shared.span(cta, offset, size, False)
    agent = m.races.begin(thread)
    if barrier_cta == int(m.cta[thread]):
        m.races.read(np.array([thread]), np.array([barrier_cta]), np.array([barrier]), 8)

    def execute() -> None:
        m.shared.data[here] = read()
        m.shared.flags[here] |= WRITTEN
        m.races.copy_writes(agent, cta, offset, size)
        m.races.copy_arrives(agent, barrier_cta, barrier, tells=False)
        m.barriers.complete(barrier_cta, barrier, size if counted is None else counted)

    # While the copy is in flight, its target bytes count as uninitialised, even if they were initialised before.
    m.shared.flags[here] &= np.uint8(0xFF ^ WRITTEN)
    return execute


@effect("cp.async.bulk.prefetch")
def _bulk_prefetch(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Check and record a prefetch into L2. The race detector does not count the prefetch as a read, because threads may
    write the prefetched bytes at the same time."""
    modifiers(ins, parts, "L2 global L2::cache_hint")
    m = d.machine

    def run(threads: Array, source: Array, size: Array) -> tuple:
        source, size = (of_each(x, threads) for x in (source, size))
        for i, (address, count) in enumerate(zip(source.tolist(), size.tolist(), strict=True)):
            number, offset = address >> REGION_SHIFT, address & ((1 << REGION_SHIFT) - 1)
            if not 1 <= number <= len(m.global_memory.regions):
                raise Fault(OutOfBounds, i, f"address {address:#x} is in no allocation")
            if not count:
                raise Fault(EmulationError, i, "a prefetch of no bytes")
            m.checked([i], m.global_memory.regions[number - 1].span, 0, offset, count, False)
            m.prefetched.append((address, count))
        return ()

    source, size = ins.operands[:2]
    return Step(ins, [d.address(source), d.source(size, TYPES["u32"])], [], run)


def _bulk_to_global(d: Decoder, ins: Instruction) -> Step:
    m = d.machine

    def run(threads: Array, target: Array, source: Array, size: Array) -> tuple:
        target, source, size = (of_each(x, threads) for x in (target, source, size))
        ctas, offsets = m.shared_place("shared", threads, source)
        for i, thread in enumerate(threads.tolist()):
            cta, offset, count = int(ctas[i]), int(offsets[i]), int(size[i])
            try:
                ((_, memory, bank, start),) = m.places("global", threads[i : i + 1], target[i : i + 1])
                there = memory.span(int(bank[0]), int(start[0]), count, False)
                here = m.shared.span(cta, offset, count, True)
                reads = m.races.copy_reads(m.races.begin(thread), cta, offset, count)
            except Fault as fault:
                fault.position = i
                raise

            def execute(memory=memory, there=there, here=here) -> None:
                memory.data[there] = m.shared.data[here]

            m.under_way.start(thread, execute, (cta,), reads)
        return ()

    target, source, size = ins.operands[:3]
    return Step(ins, [d.address(target), d.address(source), d.source(size, TYPES["u32"])], [], run)


@effect("cp.async.bulk.commit_group")
def _commit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return acts(ins, [], d.machine.under_way.commit_group)


@effect("cp.async.bulk.wait_group")
def _wait_group(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, "read")
    most = ins.operands[0].value
    machine = d.machine
    return Step(ins, [], [], lambda threads: machine.under_way.wait_group(threads, most), "block")


@effect("st.async")
def _st_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _, (type,) = modifiers(ins, parts, "weak shared::cluster mbarrier::complete_tx::bytes v2 v4")
    address, value, barrier = ins.operands
    items = value.items if isinstance(value, Vec) else (value,)
    bits = TYPES[f"b{type.bits}"]
    m, width = d.machine, type.bits // 8

    def run(threads: Array, address: Array, barrier: Array, *values: Array) -> tuple:
        values = [of_each(value, threads) for value in values]
        ctas, offsets = m.shared_place("shared::cluster", threads, address)
        barrier_ctas, barriers = m.shared_place("shared::cluster", threads, barrier)
        m.shared.locate(ctas, offsets, width, len(values))
        # Count ``st.async`` as a read of the mbarrier, because the sender must know that the mbarrier is initialised.
        m.races.read(threads, barrier_ctas, barriers, 8)
        for i, thread in enumerate(threads.tolist()):
            if barrier_ctas[i] != ctas[i]:
                raise Fault(EmulationError, i, "the mbarrier is in another CTA than the target")
            sent = [value[i : i + 1] for value in values]
            copy = _one_st_async(m, thread, ctas[i : i + 1], offsets[i : i + 1], width, sent, int(barriers[i]))
            m.under_way.start(thread, copy, (int(ctas[i]),))
        return ()

    sources = [d.address(address), d.address(barrier), *(d.source(item, bits) for item in items)]
    return Step(ins, sources, [], run)


def _one_st_async(
    m: Machine, thread: int, cta: Array, offset: Array, width: int, values: list[Array], barrier: int
) -> Callable[[], None]:
    agent = m.races.begin(thread)
    where, size = int(cta[0]), width * len(values)

    def execute() -> None:
        m.shared.store(cta, offset, width, values)
        m.races.copy_writes(agent, where, int(offset[0]), size)
        # Let the arrival also order the sender's earlier accesses. Kernels that reduce over a cluster rely on this.
        m.races.copy_arrives(agent, where, barrier, tells=True)
        m.barriers.complete(where, barrier, size)

    return execute
