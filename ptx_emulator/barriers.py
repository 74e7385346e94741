"""State of the barriers of CTAs and clusters, and of mbarriers: arrivals and waiting threads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.memory import ALLOCATED, BARRIER, RANK_SHIFT, WRITTEN, EmulationError, Fault, OutOfBounds
from ptx_emulator.races import mbarrier_key
from ptx_emulator.values import Array, distinct, of_each, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

AT_WARP, AT_CLUSTER, FOR_COPIES, FOR_KERNEL = -1, -2, -3, -4
"""Numbers that say why a thread waits (``Machine.wait``). A positive number is the number of an instruction that the
lanes of a warp execute together."""


@dataclass
class Mbarrier:
    """An mbarrier: the arrivals and bytes that the current phase still expects."""

    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    waiters: list[Array] = field(default_factory=list)


class Barriers:
    """State of all barriers during one launch."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.arrived: dict[tuple[int, int], tuple[int, list[Array]]] = {}
        self.arrived_counts: Counter[tuple[int, int]] = Counter()
        self.cluster_arrived = np.zeros(machine.threads, bool)
        self.cluster_phase = np.zeros(machine.threads, np.int32)
        self.cluster_phases = np.zeros(machine.clusters, np.int32)
        self.mbarriers: dict[tuple[int, int], Mbarrier] = {}
        # Each thread's mbarrier.try_wait times out at most once per mbarrier and phase. ``timed_out`` contains the
        # (thread, CTA, offset, phase) of each time-out.
        self.random = None if machine.random is None else machine.random.spawn(1)[0]
        self.timed_out: set[tuple[int, int, int, int]] = set()
        self.times_out = np.zeros(machine.threads, bool)

    # CTA barriers

    def arrive_at_cta(self, threads: Array, number: Array, count: Array | None, waits: bool) -> Array:
        """Execute ``bar.sync`` or ``bar.arrive``. Waiting threads resume when the last thread arrives.

        Return a mask of the threads that continue at once: all threads for ``bar.arrive``, no threads for ``bar.sync``
        (``waits``).
        """
        number = of_each(number, threads).astype(np.int64)
        expected = of_each(self.machine.cta_threads if count is None else count, threads).astype(np.int64)
        if waits:
            self.machine.wait(threads)
        key = self.machine.cta[threads] * 16 + number
        for one in distinct(key):
            at = positions(key == one)
            name = divmod(one, 16)
            wanted = int(expected[at[0]])
            before, groups = self.arrived.get(name, (wanted, []))
            if before != wanted or (expected[at] != wanted).any():
                raise Fault(EmulationError, at[0], f"barrier {name[1]} with {wanted} threads; earlier: {before}")
            groups.append(threads[at] if waits else threads[at][:0])
            self.machine.races.arrive(("bar", *name), threads[at])
            self.arrived_counts[name] += len(at)
            self.arrived[name] = (wanted, groups)
            if self.arrived_counts[name] > wanted:
                raise Fault(EmulationError, at[0], f"barrier {name[1]}: more than {wanted} threads arrived")
            if self.arrived_counts[name] == wanted:
                everyone = np.concatenate(groups)
                del self.arrived[name], self.arrived_counts[name]
                self.machine.races.publish(("bar", *name))
                self.machine.races.leave(("bar", *name), everyone)
                self.machine.races.forget(("bar", *name))
                self.machine.resume(everyone)
        return np.zeros(len(threads), bool) if waits else np.ones(len(threads), bool)

    # Cluster barriers

    def arrive_at_cluster(self, threads: Array) -> None:
        again = positions(self.cluster_arrived[threads])
        if len(again):
            raise Fault(EmulationError, again[0], "barrier.cluster.arrive twice without wait")
        self.cluster_arrived[threads] = True
        for cluster in distinct(self.machine.cluster[threads]):
            self.machine.races.arrive(("cluster", int(cluster)), threads[self.machine.cluster[threads] == cluster])
            self.check_cluster(cluster)

    def check_cluster(self, cluster: int) -> None:
        members = self.machine.living(self.machine.cluster == cluster)
        if len(members) and self.cluster_arrived[members].all():
            self.cluster_phases[cluster] += 1
            self.cluster_arrived[members] = False
            self.machine.races.publish(("cluster", int(cluster)))
            self.machine.retry_those(members, AT_CLUSTER)

    def wait_for_cluster(self, threads: Array) -> Array:
        done = self.cluster_phases[self.machine.cluster[threads]] > self.cluster_phase[threads]
        early = positions(~done & ~self.cluster_arrived[threads])
        if len(early):
            raise Fault(EmulationError, early[0], "barrier.cluster.wait without arrive")
        self.cluster_phase[threads[done]] += 1
        for cluster in distinct(self.machine.cluster[threads[done]]):
            at = threads[done & (self.machine.cluster[threads] == cluster)]
            self.machine.races.leave(("cluster", int(cluster)), at)
        self.machine.wait(threads[~done], AT_CLUSTER)
        return done

    # mbarriers

    def init(self, threads: Array, address: Array, count: Array) -> None:
        ctas, offsets = self.machine.shared_place("shared", threads, address)
        counts = of_each(count, threads)
        self.machine.shared.locate(ctas, offsets, 8, 1)
        for i, (cta, offset) in enumerate(zip(ctas.tolist(), offsets.tolist(), strict=True)):
            if (cta, offset) in self.mbarriers:
                raise Fault(EmulationError, i, f"mbarrier at {offset:#x} is initialised twice")
            self.machine.races.write(threads[i : i + 1], ctas[i : i + 1], offsets[i : i + 1], 8)
            where = cta * self.machine.shared.stride + offset
            if (self.machine.shared.flags[where : where + 8] & ALLOCATED == 0).any():
                raise Fault(OutOfBounds, i, f"shared memory offset {offset:#x}")
            self.machine.shared.flags[where : where + 8] = ALLOCATED | WRITTEN | BARRIER
            self.mbarriers[cta, offset] = Mbarrier(int(counts[i]), int(counts[i]))

    def inval(self, threads: Array, address: Array) -> None:
        ctas, offsets = self.machine.shared_place("shared", threads, address)
        for i, (cta, offset) in enumerate(zip(ctas.tolist(), offsets.tolist(), strict=True)):
            self._found(i, cta, offset)
            del self.mbarriers[cta, offset]
            where = cta * self.machine.shared.stride + offset
            self.machine.shared.flags[where : where + 8] = ALLOCATED

    def _found(self, position: int, cta: int, offset: int) -> Mbarrier:
        found = self.mbarriers.get((cta, offset))
        if found is None:
            raise Fault(EmulationError, position, f"no mbarrier at {offset:#x} of CTA {cta}")
        return found

    def arrive(
        self,
        space: str,
        threads: Array,
        address: Array,
        count: Array | int,
        expected: Array | int,
        relaxed: bool = False,
        cluster: bool = False,
    ) -> Array:
        """Let threads arrive at an mbarrier: expect ``expected`` more bytes, then arrive ``count`` times. Return the
        number of the phase.

        ``relaxed`` is True for a relaxed operation, and ``cluster`` for an operation at cluster scope.
        """
        ctas, offsets = self.machine.shared_place(space, threads, address)
        counts, bytes_ = of_each(count, threads), of_each(expected, threads)
        phases = np.zeros(len(threads), np.uint64)
        for i, (cta, offset) in enumerate(zip(ctas.tolist(), offsets.tolist(), strict=True)):
            barrier = self._found(i, cta, offset)
            visits = not (counts[i] and self.machine.scoped)
            self.machine.races.read(threads[i : i + 1], ctas[i : i + 1], offsets[i : i + 1], 8, visits=visits)
            phases[i] = barrier.phase
            barrier.bytes += int(bytes_[i])
            barrier.pending -= int(counts[i])
            if barrier.pending < 0:
                raise Fault(EmulationError, i, f"mbarrier at {offset:#x}: more than {barrier.expected} arrivals")
            if counts[i] and self.machine.scoped:
                self.machine.races.arrive_scoped(cta, offset, int(threads[i]), relaxed, cluster)
            elif counts[i]:
                self.machine.races.arrive(mbarrier_key(cta, offset), threads[i : i + 1])
            self._check(cta, offset, barrier)
        return phases

    def expect_copies(self, threads: Array, ctas: Array, offsets: Array, more: int) -> None:
        """Let each thread's current phase of an mbarrier expect ``more`` arrivals, because copies will arrive."""
        for i, (cta, offset) in enumerate(zip(ctas.tolist(), offsets.tolist(), strict=True)):
            barrier = self._found(i, cta, offset)
            self.machine.races.read(threads[i : i + 1], ctas[i : i + 1], offsets[i : i + 1], 8)
            barrier.pending += more

    def arrive_later(self, cta: int, offset: int) -> None:
        """Arrive once at the mbarrier at ``offset`` of a CTA, because an asynchronous operation has completed."""
        barrier = self._found(0, cta, offset)
        barrier.pending -= 1
        if barrier.pending < 0:
            raise Fault(EmulationError, 0, f"mbarrier at {offset:#x}: more than {barrier.expected} arrivals")
        self._check(cta, offset, barrier)

    def complete(self, cta: int, offset: int, size: int) -> None:
        barrier = self._found(0, cta, offset)
        barrier.bytes -= size
        self._check(cta, offset, barrier)

    def _check(self, cta: int, offset: int, barrier: Mbarrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.expected
            self.machine.races.publish(mbarrier_key(cta, offset))
            self.machine.races.publish(mbarrier_key(cta, offset, True))
            for waiters in barrier.waiters:
                self.machine.retry(waiters)
            barrier.waiters = []

    def test(
        self,
        threads: Array,
        address: Array,
        wanted: Array,
        parity: bool,
        waits: bool,
        relaxed: bool = False,
        cluster: bool = False,
    ) -> tuple[Array, Array]:
        """Test whether a phase of an mbarrier is complete. The phase is given by its parity or by its number.

        If ``waits``, a thread waits for an incomplete phase, unless its wait times out, which happens at most once per
        thread and phase. ``arrive`` describes ``relaxed`` and ``cluster``.

        Returns:
            Masks of the threads that continue, and of the threads whose phase is complete.
        """
        ctas, offsets = self.machine.shared_place("shared", threads, address)
        wanted = of_each(wanted, threads)
        key = ctas * (1 << RANK_SHIFT) + offsets
        done, complete = np.zeros(len(threads), bool), np.zeros(len(threads), bool)
        for one in distinct(key):
            at = positions(key == one)
            cta, offset = int(ctas[at[0]]), int(offsets[at[0]])
            barrier = self._found(at[0], cta, offset)
            self.machine.races.read(threads[at], ctas[at], offsets[at], 8)
            complete[at] = (barrier.phase & 1) != (wanted[at] & 1) if parity else barrier.phase > wanted[at]
            if self.machine.scoped:
                self.machine.races.leave_scoped(cta, offset, threads[at][complete[at]], relaxed, cluster)
            else:
                self.machine.races.leave(mbarrier_key(cta, offset), threads[at][complete[at]])
            done[at] = complete[at]
            if waits and not complete[at].all():
                at = at[~complete[at]]
                done[at] = self._time_out(threads[at], cta, offset, barrier.phase)
                left = threads[at][~done[at]]
                if len(left):
                    self.machine.wait(left)
                    barrier.waiters.append(left)
        self.times_out[threads] = False
        return done, complete

    def _time_out(self, threads: Array, cta: int, offset: int, phase: int) -> Array:
        """Return a mask of the threads whose wait times out. These threads continue although the phase is not
        complete."""
        goes_on = self.times_out[threads]
        if self.random is not None and self.random.random() < 0.1:
            goes_on = np.ones(len(threads), bool)
        for i in positions(goes_on):
            name = (int(threads[i]), cta, offset, phase)
            goes_on[i] = name not in self.timed_out
            self.timed_out.add(name)
        return goes_on

    def time_out(self) -> bool:
        """If nothing else can run, time out each wait that did not time out before. Return True if a wait timed out."""
        found = False
        for (cta, offset), barrier in self.mbarriers.items():
            if not barrier.waiters:
                continue
            waiting = np.concatenate(barrier.waiters)
            may = np.array([(int(t), cta, offset, barrier.phase) not in self.timed_out for t in waiting], bool)
            self.times_out[waiting[may]] = True
            self.machine.retry(waiting[may])
            barrier.waiters = [waiting[~may]] if not may.all() else []
            found = found or bool(may.any())
        return found

    def waited_for(self) -> list[str]:
        """Return a text about each mbarrier at which threads wait: phase, missing arrivals and missing bytes."""
        return [
            f"mbarrier at {offset:#x} of CTA {cta}: phase {b.phase} wants {b.pending} arrivals, {b.bytes} bytes"
            for (cta, offset), b in self.mbarriers.items()
            if b.waiters
        ]
