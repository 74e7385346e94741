"""A detector of data races in shared memory, by vector clocks.

Each thread has a vector clock with one column per thread of its cluster, and one column for all asynchronous copies. A
thread *knows of* an access if its clock shows that the access happened before the thread's current point. For each
byte, the detector records the last writer and each warp's last reader, with the clocks of their accesses. An access
races with an earlier conflicting access if the accessing thread does not know of the earlier access. The order in which
the emulator executed the two accesses does not matter. A thread learns of another thread's accesses through barriers
(``arrive``, ``publish``, ``leave``) and warp synchronisation. A thread learns of a copy by waiting for the copy's
mbarrier. Only the last reader in each warp is recorded, so some races are missed, but every reported race is real.

Loads. A barrier does not wait for loads. A load has been *performed* when its thread has executed a fence, or when an
instruction that synchronises, branches or accesses memory needs the result of this load or of a later load of the
thread. A use of the result in arithmetic or ``mma`` does not count, because such instructions may complete after the
barrier. A bulk copy may overwrite a byte only if the issuing thread knows that earlier loads of the byte have been
performed. Each thread has a separate clock for this knowledge.

Copies. All copies share one column: a thread that knows of a copy knows of all copies that were started earlier.
Therefore, if a thread overwrites the source of a copy to another CTA, the race is not always found.

Scopes. With ``scoped``, an mbarrier orders memory between two threads only if the scopes of the arrival and of the wait
include both threads. If a thread waits at CTA scope, it does not learn of arrivals and copies from other CTAs. If a
thread arrives at CTA scope, other CTAs learn nothing from its arrival. So each mbarrier collects clocks under two keys:
one key for the CTA that contains the mbarrier, and a ``far`` key for other CTAs. A relaxed arrival passes on the
knowledge that the thread had at its last release fence. A relaxed wait takes effect at the thread's next acquire fence.
Commits of tensor cores have no scope.

Clusters. An access to another CTA's shared memory must complete before the other CTA ends: a thread of the other CTA
must know of the access.

``cp.async``. One more column per thread represents the thread's ``cp.async`` copies. The clock in this column counts
groups. No thread knows of the writes, not even the issuing thread, until the issuing thread has waited for the group.

``tcgen05``. Each thread that issues tensor-core operations has one more column, for these operations (see
``tensor_memory``, whose records have the same structure). An operation counts as reading shared memory until some
thread has waited for a later commit.

Proxy fences. A bulk copy to global memory counts as reading shared memory until the issuing thread has waited for the
copy's group. After a thread has written bytes, a ``fence.proxy.async`` must precede the copy that reads these bytes. A
separate clock of each thread records the fenced accesses. Barriers pass on all three clocks of a thread.

``lenient`` relaxes three rules, because NVIDIA's own kernels break them. First, a bulk copy may overwrite bytes before
loads of the bytes have been performed. Second, a lane may arrive for its whole warp, as in kernels for sm_120a that
release a stage between ``ldmatrix`` and ``mma``. Third, a commit passes on the earlier accesses of its thread. In this
way, a CTA of a pair learns that the mbarriers of the other CTA are initialised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.memory import Fault, Race
from ptx_emulator.values import Array, any_true, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

Key = tuple
READING = 0xFFFF
"""Clock of a copy's read for which no thread has waited. It is later than any clock."""
PIPES = 8
"""Largest number of threads in a cluster that issue tensor-core operations."""
PERFORMED = 0xFFFF
"""Start time of a load that has been performed."""


@dataclass
class Agent:
    """An asynchronous copy: the thread that issued it, the accesses that this thread knew of at the start (as a vector
    clock), and the copy's number in the clock of all copies."""

    thread: int
    knows: Array
    clock: int


def mbarrier_key(cta: int, offset: int, is_far: bool = False) -> Key:
    """Return the key of the clocks that an mbarrier collects for its own CTA or, if ``is_far``, for other CTAs."""
    return ("far mbarrier" if is_far else "mbarrier", cta, offset)


class Races:
    """Vector clocks of all threads, and records of all accesses to shared memory, in one launch.

    Args:
        machine: Machine that runs the launch.
        granule: Number of bytes that share a record. No access may be smaller.
        loads: Number of instructions that load from shared memory.
    """

    def __init__(self, machine: Machine, granule: int, loads: int):
        self.machine = machine
        self.granule = granule
        columns = machine.cluster_ctas * machine.cta_threads
        self.agent = columns
        # If the program uses cp.async, each thread gets one more column, which counts the thread's cp.async groups.
        self.grouped = columns + 1
        grouped = any(i.opcode.startswith(("cp.async.ca", "cp.async.cg")) for i in machine.program.instructions)
        self.column = (machine.rank * machine.cta_threads + machine.tid).astype(np.int64)
        self.fenced = self.grouped + grouped * columns
        self.performed = 2 * self.fenced
        self.pipes = self.performed + columns
        pipes = PIPES * any(i.opcode.startswith("tcgen05") for i in machine.program.instructions)
        self.clocks = np.zeros((machine.threads, self.pipes + pipes), np.uint16)
        self.clocks[np.arange(machine.threads), self.column] = 1
        self.per_cta = machine.shared.stride // granule
        records = machine.ctas * self.per_cta
        self.writer = np.zeros(records, np.int64)
        self.written = np.zeros(records, np.uint16)
        # The last readers of a byte: one column per warp of the cluster, and one column for bulk copies.
        self.cluster_warps = machine.cluster_ctas * (machine.warps // machine.ctas)
        self.warp = machine.rank * (machine.warps // machine.ctas) + machine.tid // 32
        self.reader = np.zeros((records, self.cluster_warps + 1), np.int16 if self.pipes < 1 << 15 else np.int32)
        self.was_read = np.zeros((records, self.cluster_warps + 1), np.uint16)
        self.gathered: dict[Key, Array] = {}
        self.published: dict[Key, Array] = {}
        # ``released`` contains the clocks at each thread's last release fence. ``pending`` contains clocks that take
        # effect at the next acquire fence. The key is True for other CTAs, and False for the thread's own CTA.
        self.released: dict[bool, Array] = {}
        self.pending: dict[bool, Array] = {}
        self.copies = 0
        # Three arrays that are needed only if bulk copies write to shared memory: the time when each thread last
        # started each load, the position of this load among the thread's loads, and the number of loads in flight.
        writes = ("cp.async.bulk.shared", "cp.async.bulk.tensor", "st.async")
        self.has_copies = any(i.opcode.startswith(writes) for i in machine.program.instructions)
        self.started = np.full((loads if self.has_copies else 0, machine.threads), PERFORMED, np.uint16)
        self.place = np.zeros(self.started.shape, np.int32)
        self.places = 0
        self.under_way = np.zeros(machine.threads, np.int32)
        self.was_load = np.zeros((records, self.cluster_warps), bool)
        # For each CTA, the times when threads of other CTAs last accessed its shared memory.
        self.visited = np.zeros((machine.ctas, columns), np.uint16)
        self.dirty = np.zeros(machine.warps, bool)
        self.full_warps = machine.cta_threads % 32 == 0

    # Order

    def arrive(self, key: Key, threads: Array) -> None:
        """Add the clocks of ``threads`` to a barrier's clocks, so that their accesses happen before accesses after the
        barrier."""
        if self.machine.lenient:
            threads = positions(np.isin(self.machine.warp, self.machine.warp[threads]))
        self._settle(threads)
        self._gather(key, self.clocks[threads].max(axis=0))
        self._tick(threads)

    def publish(self, key: Key) -> None:
        """Complete a phase of a barrier: publish the clocks that the arrivals of this phase added."""
        if key in self.gathered:
            self.published[key] = self.gathered[key].copy()

    def leave(self, key: Key, threads: Array) -> None:
        """Merge the published clocks of a barrier into the clocks of ``threads``, which have waited for the barrier."""
        known = self.published.get(key)
        if known is not None and len(threads):
            self.clocks[threads] = np.maximum(self.clocks[threads], known)
            self.dirty[self.machine.warp[threads]] = True

    # Scopes and memory fences

    def arrive_scoped(self, cta: int, offset: int, thread: int, relaxed: bool, cluster: bool) -> None:
        """Let a thread arrive at an mbarrier of CTA ``cta``. ``cluster`` is True if the scope of the arrival is the
        cluster."""
        is_far = cta != int(self.machine.cta[thread])
        threads, key = np.array([thread]), mbarrier_key(cta, offset, is_far)
        reaches = cluster or not is_far
        released = self.released.get(is_far) if relaxed and reaches else None
        if is_far:
            # The arrival itself accesses the other CTA's memory, so a thread that learns of the released accesses also
            # learns of the arrival.
            clocks = self.clocks if released is None else released
            column = self.column[thread]
            self.visited[cta, column] = max(self.visited[cta, column], clocks[thread, column])
        if released is not None:
            self._gather(key, released[thread].copy())
        elif relaxed or not reaches:
            self._tick(threads)
        else:
            self.arrive(key, threads)

    def leave_scoped(self, cta: int, offset: int, threads: Array, relaxed: bool, cluster: bool) -> None:
        """Merge an mbarrier's clocks into the clocks of ``threads``. These threads belong to the mbarrier's CTA, and
        have waited for the mbarrier.

        ``relaxed`` and ``cluster`` describe the wait: ``cluster`` is True if its scope is the cluster.
        """
        for is_far in (False, True)[: 1 + cluster]:
            key = mbarrier_key(cta, offset, is_far)
            if not relaxed:
                self.leave(key, threads)
            elif key in self.published:
                pending = self.pending.setdefault(is_far, np.zeros_like(self.clocks))
                pending[threads] = np.maximum(pending[threads], self.published[key])

    def fence_memory(self, threads: Array, acquires: bool, releases: bool, cluster: bool) -> None:
        """Execute a memory fence. ``cluster`` is True if the scope is the cluster or larger."""
        for is_far in (False, True)[: 1 + cluster]:
            if acquires and is_far in self.pending:
                self.clocks[threads] = np.maximum(self.clocks[threads], self.pending[is_far][threads])
                self.dirty[self.machine.warp[threads]] = True
        if releases:
            self._settle(threads)
            for is_far in (False, True)[: 1 + cluster]:
                released = self.released.setdefault(is_far, np.zeros_like(self.clocks))
                released[threads] = self.clocks[threads]
            self._tick(threads)

    def forget(self, key: Key) -> None:
        self.gathered.pop(key, None)
        self.published.pop(key, None)

    def join_warps(self, threads: Array) -> None:
        """Synchronise the lanes of each warp, so that every lane knows of all lanes' accesses. ``threads`` must be
        sorted."""
        threads = threads[self.dirty[self.machine.warp[threads]]]
        if not len(threads):
            return
        self._settle(threads)
        warps, first, counts = np.unique(self.machine.warp[threads], return_index=True, return_counts=True)
        if self.full_warps and len(threads) == 32 * len(warps):
            clocks = self.clocks[threads].reshape(len(warps), 32, -1)
            joined = np.broadcast_to(clocks.max(axis=1, keepdims=True), clocks.shape)
            self.clocks[threads] = joined.reshape(len(threads), -1)
            self.dirty[warps] = False
        else:
            for start, count in zip(first.tolist(), counts.tolist(), strict=True):
                group = threads[start : start + count]
                self.clocks[group] = self.clocks[group].max(axis=0)
        self._tick(threads)

    def fence(self, threads: Array) -> None:
        """Mark all accesses that ``threads`` know of as fenced, so that bulk copies may read the written bytes."""
        self.clocks[threads, self.fenced : self.performed] = self.clocks[threads, : self.fenced]
        self.started[:, threads] = PERFORMED
        self.under_way[threads] = 0
        self._tick(threads)
        self.dirty[self.machine.warp[threads]] = True

    def _tick(self, threads: Array) -> None:
        columns = self.column[threads]
        clocks = self.clocks[threads, columns] + np.uint16(1)
        self.clocks[threads, columns] = clocks
        if any_true(clocks == 0xFFFF):
            raise NotImplementedError("a launch with so many barriers")

    # Loads

    def _start_load(self, load: int, threads: Array) -> None:
        self.under_way[threads] += self.started[load, threads] == PERFORMED
        self.started[load, threads] = self.clocks[threads, self.column[threads]]
        self.places += 1
        self.place[load, threads] = self.places

    def need_loads(self, loads: list[int], threads: Array) -> None:
        """Mark ``loads``, and all loads of ``threads`` before them, as performed, because the threads need the
        results."""
        if self.has_copies and any_true(self.under_way[threads]):
            for load in loads:
                some = threads[self.started[load, threads] != PERFORMED]
                if len(some):
                    until_here = self.place[:, some] <= self.place[load, some]
                    self.started[:, some] = np.where(until_here, PERFORMED, self.started[:, some])
                    self.under_way[some] = (self.started[:, some] != PERFORMED).sum(axis=0)
                    self.dirty[self.machine.warp[some]] = True
                    # Advance the clocks, so that later loads get a later start time than these performed loads.
                    self._tick(some)

    def _settle(self, threads: Array) -> None:
        """Update the time up to which all loads have been performed, for each of ``threads``."""
        if self.has_copies:
            until = self.clocks[threads, self.column[threads]]
            late = positions(self.under_way[threads])
            if len(late):
                until[late] = self.started[:, threads[late]].min(axis=0) - 1
            self.clocks[threads, self.performed + self.column[threads]] = until

    # Accesses

    def _records(self, bank: Array, offset: Array, size: int) -> Array:
        """Return the indices of the records that cover the accessed bytes, one row per access."""
        count = -(-size // self.granule)
        first = bank * self.per_cta + offset // self.granule
        return first[:, None] + np.arange(count)

    def _rows(self, cta: int, offset: int, size: int) -> slice:
        """Return the indices of the records of the bytes that a copy accesses, as a slice."""
        first = cta * self.per_cta + offset // self.granule
        return slice(first, first + -(-size // self.granule))

    def read(
        self, threads: Array, bank: Array, offset: Array, size: int, load: int | None = None, visits: bool = True
    ) -> None:
        """Check and record reads of shared memory.

        ``load`` is the number of the load instruction, or None for other reads. ``visits`` is False if the caller
        itself records the accesses to other CTAs.
        """
        records = self._records(bank, offset, size)
        writer, written = self.writer.take(records), self.written.take(records)
        late = written > self.clocks[threads[:, None], writer]
        if any_true(late):
            i, j = np.argwhere(late)[0]
            raise self._race(i, offset[i] + j * self.granule, "read", self.name(threads[i], writer[i, j]), "wrote")
        columns = self.column[threads]
        warps = self.warp[threads][:, None]
        self.reader[records, warps] = columns[:, None]
        self.was_read[records, warps] = self.clocks[threads, columns][:, None]
        if visits:
            self._visit(threads, bank)
        if self.has_copies:
            self.was_load[records, warps] = load is not None
            if load is not None:
                self._start_load(load, threads)
        self.dirty[self.machine.warp[threads]] = True

    def write(self, threads: Array, bank: Array, offset: Array, size: int, groups: Array | None = None) -> None:
        """Check and record writes to shared memory. ``groups`` contains the number of each thread's ``cp.async`` group,
        or is None for other writes."""
        records = self._records(bank, offset, size)
        self._check_write(threads, self.clocks, threads, records, offset)
        self._visit(threads, bank)
        columns = self.column[threads]
        clocks = self.clocks[threads, columns]
        if groups is not None:
            columns, clocks = self.grouped + columns, groups + 1
        self.writer[records] = columns[:, None]
        self.written[records] = clocks[:, None]
        self.was_read[records] = 0
        # If a record now names another writer, two threads write the same byte in this instruction.
        twice = self.writer[records] != columns[:, None]
        if any_true(twice):
            i, j = np.argwhere(twice)[0]
            raise self._race(
                i, offset[i] + j * self.granule, "write", self.name(threads[i], self.writer[records[i, j]]), "wrote"
            )
        self.dirty[self.machine.warp[threads]] = True

    def _visit(self, threads: Array, bank: Array) -> None:
        """Record that ``threads`` access the shared memory of the CTAs ``bank``. Accesses to a thread's own CTA are
        ignored."""
        if self.machine.cluster_ctas > 1:
            away = positions(bank != self.machine.cta[threads])
            columns = self.column[threads[away]]
            self.visited[bank[away], columns] = self.clocks[threads[away], columns]

    def end(self, cta: int) -> None:
        """End a CTA. Check that its threads know of all accesses of other CTAs to its shared memory."""
        known = self.clocks[self.machine.cta == cta].max(axis=0)
        bad = positions(self.visited[cta] > known[: self.agent])
        if len(bad):
            who = self.name(positions(self.machine.cta == cta)[0], bad[0])
            raise Fault(Race, 0, f"CTA {cta} may end before {who} has accessed its shared memory")

    def _check_write(self, threads: Array, clocks: Array, rows: Array, records: Array, offset: Array) -> None:
        """Raise a fault if a write races with a recorded access. Row ``rows[i]`` of ``clocks`` is the vector clock of
        ``threads[i]``."""
        writer, written = self.writer.take(records), self.written.take(records)
        late = written > clocks[rows[:, None], writer]
        if any_true(late):
            i, j = np.argwhere(late)[0]
            raise self._race(i, offset[i] + j * self.granule, "write", self.name(threads[i], writer[i, j]), "wrote")
        reader, was_read = self.reader.take(records, axis=0), self.was_read.take(records, axis=0)
        late = was_read > clocks[rows[:, None, None], reader]
        if any_true(late):
            i, j, k = np.argwhere(late)[0]
            who = self.name(threads[i], reader[i, j, k])
            if k == self.cluster_warps and reader[i, j, k] < self.pipes:
                who = f"a bulk copy of {who}"
            raise self._race(i, offset[i] + j * self.granule, "write", who, "read")

    def name(self, thread: int, column: int) -> str:
        if column >= self.pipes:
            return f"a tensor core's operation (pipe {column - self.pipes})"
        if column == self.agent:
            return "an asynchronous copy"
        if column > self.agent:
            return f"a cp.async of {self.name(thread, column - self.grouped)}"
        rank, tid = divmod(int(column), self.machine.cta_threads)
        cta = self.machine.cta_of_rank[self.machine.cluster[thread], rank]
        return f"thread {tid} of CTA {cta}"

    def _race(self, position: int, offset: int, what: str, who: str, did: str) -> Fault:
        return Fault(Race, int(position), f"{what} of shared memory offset {offset:#x}, which {who} {did} unordered")

    # Asynchronous copies

    def begin(self, thread: int) -> Agent:
        """Create the ``Agent`` of a copy that ``thread`` starts."""
        self.copies += 1
        self._settle(np.array([thread]))
        agent = Agent(thread, self.clocks[thread].copy(), self.copies)
        self._tick(np.array([thread]))
        return agent

    def copy_writes(self, agent: Agent, cta: int, offset: int, size: int) -> None:
        rows = self._rows(cta, offset, size)
        records = np.arange(rows.start, rows.stop)[None]
        self._check_write(np.array([agent.thread]), agent.knows[None], np.array([0]), records, np.array([offset]))
        reader, was_read = self.reader[rows, :-1], self.was_read[rows, :-1]
        late = self.was_load[rows] & (was_read > agent.knows[self.performed + reader])
        if any_true(late) and not self.machine.lenient:
            j, k = np.argwhere(late)[0]
            who = self.name(agent.thread, reader[j, k])
            place = offset + j * self.granule
            raise Fault(Race, 0, f"copy to shared memory offset {place:#x}, which {who} may not have loaded yet")
        self.writer[rows] = self.agent
        self.written[rows] = agent.clock
        self.was_read[rows] = 0

    def copy_reads(self, agent: Agent, cta: int, offset: int, size: int) -> slice:
        """Record that a bulk copy begins to read, and return the records of the bytes."""
        rows = self._rows(cta, offset, size)
        self._check_read(agent, rows, lambda i: offset + i * self.granule)
        self.reader[rows, -1] = self.column[agent.thread]
        self.was_read[rows, -1] = READING
        return rows

    def copy_has_read(self, agent: Agent, rows: slice) -> None:
        """Record that a bulk copy has read its bytes. A thread that knows of the copy, or of its write, also knows of
        these reads."""
        own = (self.reader[rows, -1] == self.column[agent.thread]) & (self.was_read[rows, -1] == READING)
        self.reader[rows, -1][own] = self.agent
        self.was_read[rows, -1][own] = agent.clock

    def _check_read(self, agent: Agent, rows: Any, offset_of: Callable[[int], int]) -> None:
        """Check that the reads of an asynchronous operation race with no write, and that a fence follows each write."""
        writer, written = self.writer[rows], self.written[rows]
        bad = positions(written > agent.knows[writer])
        if len(bad):
            at, who = offset_of(bad[0]), self.name(agent.thread, writer[bad[0]])
            raise self._race(0, at, "copy", who, "wrote")
        bad = positions((written > agent.knows[self.fenced + writer]) & (writer != self.agent))
        if len(bad):
            at, who = offset_of(bad[0]), self.name(agent.thread, writer[bad[0]])
            raise Fault(Race, 0, f"copy of shared memory offset {at:#x}: no fence.proxy.async since {who} wrote it")

    def pipe_reads(self, agent: Agent, cta: int, chunks: Array, column: int, number: int, saw: Array) -> None:
        """Check and record that a tensor-core operation reads 16-byte chunks of shared memory. The operation has this
        ``number`` in the pipe with this ``column``."""
        offsets = (chunks[:, None] + np.arange(0, 16, self.granule)).reshape(-1)
        rows = cta * self.per_cta + offsets // self.granule
        self._check_read(agent, rows, lambda i: int(offsets[i]))
        self.reader[rows, -1] = column
        self.was_read[rows, -1] = number
        # A thread that knows of this operation also knows of the writes before it, so add their clocks to ``saw``.
        np.maximum.at(saw, self.writer[rows], self.written[rows])

    def pipe_arrives(self, known: Array, key: Key) -> None:
        """Let a commit arrive at an mbarrier: add the clocks ``known`` to the mbarrier's clocks."""
        self._gather(key, known)

    def copies_have_read(self, thread: int, reads: list[slice]) -> None:
        """Record that copies have read their bytes, because ``thread`` has waited for the copies."""
        column = self.column[thread]
        for rows in reads:
            own = self.reader[rows, -1] == column
            self.was_read[rows, -1][own] = self.clocks[thread, column]
        self.dirty[self.machine.warp[thread]] = True

    def groups_are_done(self, threads: Array, groups: Array) -> None:
        """Record for ``threads`` the number of their ``cp.async`` groups that they have waited for."""
        if self.fenced > self.grouped:
            self.clocks[threads, self.grouped + self.column[threads]] = groups
            self.dirty[self.machine.warp[threads]] = True

    def groups_arrive(self, thread: int, groups: int, cta: int, offset: int) -> None:
        """Let a thread's first ``groups`` groups of ``cp.async`` arrive at an mbarrier of its CTA.

        Threads that wait for the mbarrier learn of these copies, and of no other access of the thread.
        """
        known = np.zeros(self.clocks.shape[1], self.clocks.dtype)
        if self.fenced > self.grouped:
            known[self.grouped + self.column[thread]] = groups
        self._gather(mbarrier_key(cta, offset), known)

    def copy_arrives(self, agent: Agent, cta: int, offset: int, tells: bool) -> None:
        """Let a copy arrive at an mbarrier of CTA ``cta``, so that threads that wait for the mbarrier know of the copy.

        If ``tells``, these threads also learn of the accesses that the copy's thread knew of when it started the copy.
        """
        known = agent.knows.copy() if tells else np.zeros_like(agent.knows)
        known[self.agent] = max(known[self.agent], agent.clock)
        is_far = self.machine.scoped and cta != int(self.machine.cta[agent.thread])
        self._gather(mbarrier_key(cta, offset, is_far), known)

    def _gather(self, key: Key, known: Array) -> None:
        self.gathered[key] = np.maximum(self.gathered[key], known) if key in self.gathered else known
