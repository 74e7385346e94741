"""Asynchronous operations in flight: groups of copies, and reads of shared memory by warpgroup MMAs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.barriers import FOR_COPIES
from ptx_emulator.memory import EmulationError, Fault
from ptx_emulator.values import Array

if TYPE_CHECKING:
    from ptx_emulator.decoder import Step
    from ptx_emulator.machine import Machine

FAR = np.iinfo(np.int64).max


@dataclass
class Group:
    """A bulk group of a thread: the number of its copies in flight, and the records (see ``races``) of the bytes that
    these copies read."""

    under_way: int = 0
    reads: list[slice] = field(default_factory=list)


@dataclass(eq=False)
class Copy:
    """An asynchronous operation in flight. A ``cp.async`` instruction counts as a single operation of all ``threads``
    that execute it.

    Attributes:
        group: Bulk group to which a bulk copy belongs.
        groups: For ``cp.async``, array with the number of each thread's group.
        pipe: For tensor cores, queue of operations that are executed in order.
    """

    step: Step
    threads: Array
    execute: Callable[[], None]
    ctas: tuple[int, ...] = ()
    group: Group | None = None
    groups: Array | None = None
    pipe: deque[Copy] | None = None


@dataclass
class Arrival:
    """Arrival of a thread at an mbarrier of a CTA, as soon as its first ``groups`` groups of ``cp.async`` are
    complete."""

    thread: int
    groups: int
    cta: int
    offset: int


class UnderWay:
    """All asynchronous operations of one launch."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.copies: list[Copy] = []
        self.bulk_copies = 0
        self.held: list[Copy] = []
        # For each thread, its bulk group that is not committed yet.
        self.open: dict[int, Group] = {}
        self.groups: dict[int, list[Group]] = {}
        # For each thread: count of committed cp.async groups, count of groups waited for, and index of the newest
        # non-empty group.
        self.committed = np.zeros(machine.threads, np.int64)
        self.waited = np.zeros(machine.threads, np.int64)
        self.newest = np.full(machine.threads, -1)
        # Arrivals that wait for cp.async copies, and for each thread the number of groups for which these arrivals
        # wait.
        self.arrivals: list[Arrival] = []
        self.covered = np.zeros(machine.threads, np.int64)
        # Shared-memory reads by warpgroup MMAs: for each warp, keyed by its first thread, a list of groups. The last
        # group is not committed yet.
        self.products: dict[int, list[list[slice]]] = {}

    def check_end(self, threads: Array) -> None:
        """Check that threads that end have waited for their copies. Bulk copies must have read their source.
        ``cp.async`` copies must have written their target; alternatively, the thread may let them arrive at an mbarrier
        when they have.

        NVIDIA's cooperative kernel for sm_120a breaks this rule.
        """
        if self.machine.lenient:
            return
        for thread in {*self.groups, *self.open}.intersection(threads.tolist()):
            if any(group.reads for group in (*self.groups.get(thread, ()), self.open.get(thread, Group()))):
                raise self.machine.error(EmulationError, thread, "ended before it waited for its bulk copies")
        late = threads[self.newest[threads] >= np.maximum(self.waited[threads], self.covered[threads])]
        if len(late):
            raise self.machine.error(EmulationError, late[0], "ended before it waited for its cp.async")

    def start(
        self, thread: int, execute: Callable[[], None], ctas: tuple[int, ...], reads: slice | None = None
    ) -> None:
        """Schedule a copy. ``ctas`` are the CTAs whose shared memory the copy uses. ``reads`` are the records of the
        shared-memory bytes that the copy reads."""
        group = None
        if reads is not None:
            group = self.open.setdefault(thread, Group())
            group.under_way += 1
            group.reads.append(reads)
        copy = Copy(self.machine.step, np.array([thread]), execute, ctas, group)
        (self.held if self.bulk_copies in self.machine.held else self.copies).append(copy)
        self.bulk_copies += 1

    def release_held(self) -> None:
        """Execute one held copy, because nothing else can run."""
        self.copies, self.held = self.held, []

    def start_group(self, threads: Array, execute: Callable[[], None]) -> None:
        """Schedule a ``cp.async`` instruction of ``threads`` as one operation."""
        self.newest[threads] = self.committed[threads]
        self.copies.append(Copy(self.machine.step, threads, execute, groups=self.committed[threads]))

    def start_in_pipe(self, thread: int, pipe: deque[Copy], execute: Callable[[], None], ctas: tuple[int, ...]) -> None:
        """Schedule a tensor-core operation. The operation runs after all earlier operations of ``pipe``."""
        pipe.append(Copy(self.machine.step, np.array([thread]), execute, ctas, pipe=pipe))
        self.copies.append(pipe[-1])

    def execute_one(self) -> None:
        number = 0 if self.machine.random is None else int(self.machine.random.integers(len(self.copies)))
        copy = self.copies[number]
        if copy.pipe is not None:
            copy = copy.pipe.popleft()
        self.copies.remove(copy)
        self.machine.step = copy.step
        for cta in copy.ctas:
            if not (self.machine.lenient and copy.group) and not len(self.machine.living(self.machine.cta == cta)):
                raise self.machine.error(EmulationError, copy.threads[0], f"CTA {cta} ended before this copy")
        try:
            copy.execute()
        except Fault as fault:
            raise self.machine.error(fault.kind, copy.threads[fault.position], fault.message) from None
        if copy.group is not None:
            copy.group.under_way -= 1
        if copy.groups is not None:
            self._arrive()
        self.machine.retry_those(copy.threads, FOR_COPIES)

    def commit_group(self, threads: Array) -> None:
        for thread in threads.tolist():
            self.groups.setdefault(thread, []).append(self.open.pop(thread, Group()))

    def wait_group(self, threads: Array, most: int) -> Array:
        """Wait until at most the ``most`` newest bulk groups of each thread are incomplete."""
        done = np.ones(len(threads), bool)
        for i, thread in enumerate(threads.tolist()):
            groups = self.groups.get(thread, [])
            waited = groups[: max(len(groups) - most, 0)]
            done[i] = not any(group.under_way for group in waited)
            if done[i] and waited:
                self.machine.races.copies_have_read(thread, [rows for group in waited for rows in group.reads])
                del groups[: len(waited)]
        self.machine.wait(threads[~done], FOR_COPIES)
        return done

    def wait_async(self, threads: Array, most: int | None) -> Array:
        """Wait until at most the ``most`` newest ``cp.async`` groups of each thread are incomplete.

        If ``most`` is None, wait for all ``cp.async`` copies, committed or not.
        """
        if most is None:
            self.committed[threads] = np.maximum(self.committed[threads], self.newest[threads] + 1)
        until = np.maximum(self.committed[threads] - (most or 0), self.waited[threads])
        done = self._oldest()[threads] >= until
        self.waited[threads[done]] = until[done]
        self.machine.races.groups_are_done(threads[done], until[done])
        self.machine.wait(threads[~done], FOR_COPIES)
        return done

    def _oldest(self) -> Array:
        """Return for each thread the number of its oldest ``cp.async`` group that is incomplete."""
        oldest = np.full(self.machine.threads, FAR)
        for copy in self.copies:
            if copy.groups is not None:
                oldest[copy.threads] = np.minimum(oldest[copy.threads], copy.groups)
        return oldest

    def arrive_after_copies(self, threads: Array, ctas: Array, offsets: Array) -> None:
        """Let each thread arrive at an mbarrier when all of its ``cp.async`` copies up to now are complete."""
        self.committed[threads] = np.maximum(self.committed[threads], self.newest[threads] + 1)
        self.covered[threads] = self.committed[threads]
        where = zip(threads.tolist(), self.committed[threads].tolist(), ctas.tolist(), offsets.tolist(), strict=True)
        self.arrivals += [Arrival(*one) for one in where]
        self._arrive()

    def _arrive(self) -> None:
        """Execute the arrivals whose copies are complete."""
        if not self.arrivals:
            return
        oldest = self._oldest()
        due = [one for one in self.arrivals if oldest[one.thread] >= one.groups]
        self.arrivals = [one for one in self.arrivals if oldest[one.thread] < one.groups]
        for one in due:
            self.machine.races.groups_arrive(one.thread, one.groups, one.cta, one.offset)
            self.machine.barriers.arrive_later(one.cta, one.offset)

    # Warpgroup MMAs. An MMA counts as reading shared memory until the warp has waited for the MMA's group. The first
    # thread of a warp stands for the warp.

    def product_reads(self, thread: int, offset: int, size: int) -> None:
        cta = int(self.machine.cta[thread])
        reads = self.machine.races.copy_reads(self.machine.races.begin(thread), cta, offset, size)
        self.products.setdefault(thread, [[]])[-1].append(reads)

    def commit_products(self, threads: Array) -> None:
        for thread in threads[self.machine.lane[threads] == 0].tolist():
            self.products.setdefault(thread, [[]]).append([])

    def wait_for_products(self, threads: Array, most: int) -> None:
        """End the shared-memory reads of all MMA groups except the ``most`` newest groups."""
        for thread in threads[self.machine.lane[threads] == 0].tolist():
            groups = self.products.setdefault(thread, [[]])
            done = max(len(groups) - 1 - most, 0)
            self.machine.races.copies_have_read(thread, [reads for group in groups[:done] for reads in group])
            del groups[:done]
