"""Tensor memory (PTX ISA, "tcgen05"): allocation of columns, contents, and order of accesses.

The memory of each CTA is (128 lanes, 512 columns) of 32-bit words. A record covers one column in one quarter of the
lanes, because one warp can access only one quarter. A record stores three accesses to these words: the last write, the
last MMA that read scales from them, and the last load by a warp. Each access is stored as a column of the vector clocks
of ``races``, and the clock in this column. MMAs and copies to tensor memory (``cp``) use the column of their *pipe*,
which stands for the issuing thread. The clock in a pipe's column counts the thread's operations. Loads and stores use
the column of their warp's first thread. Before ``tcgen05.wait``, no thread knows the clocks of loads and stores.

An operation must know of all conflicting operations. The section "Memory Consistency Model for 5th generation of
TensorCore operations" gives the rules:

- Within one thread, an MMA is ordered after earlier copies, and after earlier MMAs with the same accumulator and shape.
  No other operations are ordered. For example, a copy after an MMA needs a commit and a wait for its mbarrier.
- A thread learns of operations through barriers. This knowledge takes effect at the thread's next
  ``tcgen05.fence::after_thread_sync``.
- Other threads know of a load or store if its thread executed ``tcgen05.wait``, and then
  ``tcgen05.fence::before_thread_sync``, before the barrier. A commit implies the fence ``before_thread_sync``.

``lenient`` relaxes these rules, because NVIDIA's own kernels break them. All operations of a thread are then ordered,
without fences or waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptx_emulator.memory import EmulationError, Fault, OutOfBounds, Race
from ptx_emulator.races import PIPES, mbarrier_key
from ptx_emulator.values import Array, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine
    from ptx_emulator.under_way import Copy

LANES, COLUMNS = 128, 512
NOT_YET = np.iinfo(np.int32).max
"""Clock of an operation that no thread can know of yet, because nothing has waited for it."""
COPIED = 0
"""Kind of a write by a copy. The kind of an MMA's write is its accumulator and shape."""


class Part(NamedTuple):
    """Indices of records: some columns, in some quarters of a CTA's lanes."""

    cta: int
    quarters: slice
    columns: slice


@dataclass
class Pipe:
    """Tensor-core operations of one thread: the thread's column in the clocks, the number of its operations, and the
    operations in flight.

    ``saw`` contains the clocks of the writes to shared memory that preceded these operations.
    """

    column: int
    saw: Array
    issued: int = 0
    under_way: deque[Copy] = field(default_factory=deque)


class Records:
    """The last access of one kind in each record: its column and clock. For loads and stores, also a flag, True after a
    fence."""

    def __init__(self, ctas: int):
        self.column = np.zeros((ctas, 4, COLUMNS), np.int32)
        self.clock = np.zeros((ctas, 4, COLUMNS), np.int32)
        self.fenced = np.ones((ctas, 4, COLUMNS), bool)

    def set(self, part: Part, column: int, clock: int) -> None:
        self.column[part], self.clock[part], self.fenced[part] = column, clock, True

    def complete(self, part: Part, column: int, clock: int, fenced: bool) -> None:
        """Record that a thread has waited for its accesses. ``fenced`` is True if the thread has also executed a
        fence."""
        own = self.column[part] == column
        self.clock[part] = np.where(own, clock, self.clock[part])
        self.fenced[part] = np.where(own, fenced, self.fenced[part])


class TensorMemory:
    """Tensor memory of one launch. The object holds no data if the program contains no ``tcgen05`` instructions."""

    def __init__(self, machine: Machine):
        self.machine = machine
        exists = any(i.opcode.startswith("tcgen05") for i in machine.program.instructions)
        ctas = machine.ctas if exists else 0
        self.data = np.full((ctas, LANES, COLUMNS), 0xA5A5A5A5, np.uint32)
        self.there = np.zeros((ctas, LANES, COLUMNS), bool)
        self.allocation = np.zeros((ctas, COLUMNS), np.int32)  # cta_group that allocated each column, or 0
        self.allocations = 0
        self.relinquished = np.zeros(ctas, bool)
        self.written, self.used, self.loaded = Records(ctas), Records(ctas), Records(ctas)
        self.how = np.zeros((ctas, 4, COLUMNS), np.int64)
        self.pipes: dict[int, Pipe] = {}
        # ``pending`` contains loads and stores for which the warp has not waited yet. ``unfenced`` contains loads and
        # stores for which the warp has waited, but not yet executed a fence. The key is the warp's first thread.
        self.pending: dict[tuple[int, str], list[Part]] = {}
        self.unfenced: dict[int, list[tuple[Records, Part]]] = {}
        # For each thread, its vector clock at the last ``tcgen05.fence::after_thread_sync`` that it executed.
        self.knew = np.zeros_like(machine.races.clocks[: machine.threads if exists else 0])
        self.cta_group = 0

    # Allocation

    def group(self, size: int) -> None:
        """Record the ``cta_group`` of an instruction. Raise a fault if another instruction of the kernel used another
        ``cta_group``."""
        if self.cta_group not in (0, size):
            raise Fault(EmulationError, 0, "cta_group::1 and cta_group::2 in one kernel")
        self.cta_group = size

    def ctas_of(self, thread: int, group: int) -> list[int]:
        """Return the CTAs on which an instruction acts: the thread's own CTA, or its pair of CTAs with ranks 2 i and 2
        i + 1."""
        self.group(group)
        machine = self.machine
        if group == 1:
            return [int(machine.cta[thread])]
        if machine.cluster_ctas % 2:
            raise Fault(EmulationError, 0, "cta_group::2 in a cluster of an odd number of CTAs")
        first = int(machine.rank[thread]) & ~1
        return [int(cta) for cta in machine.cta_of_rank[machine.cluster[thread], first : first + 2]]

    def allocate(self, thread: int, columns: int, group: int) -> int:
        """Allocate columns, and return the first column.

        In the emulator, each CTA has an SM's tensor memory to itself, so an allocation never waits.
        """
        self.group(group)
        cta = int(self.machine.cta[thread])
        if columns not in (32, 64, 128, 256, 512):
            raise Fault(EmulationError, 0, f"allocation of {columns} columns")
        if self.relinquished[cta]:
            raise Fault(EmulationError, 0, "tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        for first in range(0, COLUMNS, columns):
            if not self.allocation[cta, first : first + columns].any():
                break
        else:
            raise Fault(EmulationError, 0, f"no {columns} columns are free: tcgen05.alloc waits for ever")
        self.allocations += 1
        self.allocation[cta, first : first + columns] = self.allocations
        self.there[cta, :, first : first + columns] = False
        return first

    def deallocate(self, thread: int, address: int, columns: int, group: int) -> None:
        self.group(group)
        cta, first = int(self.machine.cta[thread]), address
        number = self.allocation[cta, first] if first < COLUMNS else 0
        if not number or not np.array_equal(
            positions(self.allocation[cta] == number), np.arange(first, first + columns)
        ):
            raise Fault(EmulationError, 0, f"{columns} columns at {address:#x} are no allocation")
        part = Part(cta, slice(0, 4), slice(first, first + columns))
        known = self.machine.races.clocks[thread]
        for records, did in ((self.written, "written"), (self.used, "used by an MMA"), (self.loaded, "loaded")):
            self._demand(records, part, records.clock[part] <= known[records.column[part]], "tcgen05.dealloc", did)
        self.allocation[cta, first : first + columns] = 0

    def check_end(self, cta: int) -> None:
        if len(self.allocation) and self.allocation[cta].any():
            raise Fault(EmulationError, 0, f"CTA {cta} ended with tensor memory allocated")

    def part(self, cta: int, address: int, columns: int, quarter: int | None = None) -> Part:
        """Return the records of ``columns`` columns that start at an address, in one quarter of the lanes, or in all if
        None."""
        first = address & 0xFFFF
        there = self.allocation[cta, first : first + columns] != 0
        if len(there) < columns or not there.all():
            raise Fault(OutOfBounds, 0, f"tensor memory columns {first} to {first + columns - 1}: not all allocated")
        quarters = slice(0, 4) if quarter is None else slice(quarter, quarter + 1)
        return Part(cta, quarters, slice(first, first + columns))

    # Order

    def know(self, threads: Array) -> None:
        """Execute ``tcgen05.fence::after_thread_sync``: the threads' knowledge from barriers takes effect."""
        self.knew[threads] = self.machine.races.clocks[threads]

    def tell(self, threads: Array) -> None:
        """Execute ``tcgen05.fence::before_thread_sync``: let other threads learn of completed loads and stores."""
        clocks, column = self.machine.races.clocks, self.machine.races.column
        for thread in set(self.unfenced).intersection(threads.tolist()):
            for records, part in self.unfenced.pop(thread):
                records.complete(part, column[thread], clocks[thread, column[thread]], True)

    def _known(self, threads: Array) -> Array:
        """Return the vector clock of the accesses that are known to all of ``threads``, which execute one
        instruction."""
        races = self.machine.races
        known = (races.clocks if self.machine.lenient else self.knew)[threads].min(axis=0).astype(np.int32)
        own = races.column[threads]
        known[own] = races.clocks[threads, own]
        return known

    def _ordered(self, records: Records, part: Part, threads: Array) -> Array:
        """Return a mask of the recorded accesses that the threads know to be complete."""
        known = self._known(threads)
        complete = records.clock[part] <= known[records.column[part]]
        own = np.zeros(len(known), bool)
        own[self.machine.races.column[threads]] = True
        return complete & (records.fenced[part] | own[records.column[part]])

    def _demand(self, records: Records, part: Part, ordered: Array, what: str, did: str) -> None:
        if ordered.all():
            return
        quarter, column = np.argwhere(~ordered)[0]
        who = int(records.column[part][quarter, column])
        name = self.machine.races.name(int(positions(self.machine.cta == part.cta)[0]), who)
        where = f"lanes {32 * (part.quarters.start + quarter)}..., column {part.columns.start + column}"
        why = "unordered"
        if records.clock[part][quarter, column] == NOT_YET:
            why = "without tcgen05.wait since"
        elif not records.fenced[part][quarter, column]:
            why = "without tcgen05.fence::before_thread_sync since"
        elif records.clock[part][quarter, column] <= self.machine.races.clocks[:, who].max(initial=0):
            why = "unordered: without a barrier, or without tcgen05.fence::after_thread_sync behind it"
        raise Fault(Race, 0, f"{what} of tensor memory {where}, which was {did} by {name}, {why}")

    def check_read(self, threads: Array, part: Part, what: str, pipe: Pipe | None = None) -> None:
        """Check that ``threads`` may read a part of tensor memory.

        ``pipe`` is the pipe of an MMA. The hardware orders the MMA after earlier copies in the same pipe.
        """
        ordered = self._ordered(self.written, part, threads)
        if pipe is not None:
            ordered |= (self.written.column[part] == pipe.column) & (self.machine.lenient | (self.how[part] == COPIED))
        self._demand(self.written, part, ordered, what, "written")

    def check_write(
        self, threads: Array, part: Part, what: str, pipe: Pipe | None = None, follows: Sequence[int] = ()
    ) -> None:
        """Check that ``threads`` may write to a part of tensor memory.

        The hardware orders a write after earlier writes of the same pipe if their kinds are in ``follows``.
        """
        for records, did in ((self.used, "used by an MMA"), (self.written, "written"), (self.loaded, "loaded")):
            ordered = self._ordered(records, part, threads)
            if pipe is not None and records is not self.loaded:
                in_order = np.isin(self.how[part], follows) if records is self.written else np.bool_(False)
                ordered |= (records.column[part] == pipe.column) & (self.machine.lenient | in_order)
            self._demand(records, part, ordered, what, did)

    def mark_written(self, part: Part, column: int, clock: int, how: int = COPIED) -> None:
        self.written.set(part, column, clock)
        self.how[part] = how
        self.used.clock[part] = self.loaded.clock[part] = 0

    # Loads and stores of one warp

    def access(self, threads: Array, address: int, columns: int, kind: str) -> Part:
        """Check and record a warp's load (``ld``) or store (``st``) of columns in its quarter of the lanes."""
        machine, thread = self.machine, int(threads[0])
        quarter = int(machine.tid[thread]) // 32 % 4
        if address >> 16 & ~16 != 32 * quarter:
            raise Fault(EmulationError, 0, f"lane {address >> 16}: this warp accesses lanes from {32 * quarter} on")
        part = self.part(int(machine.cta[thread]), address, columns, quarter)
        column = int(machine.races.column[thread])
        clock = int(machine.races.clocks[thread, column]) if machine.lenient else NOT_YET
        if kind == "ld":
            self.check_read(threads, part, "tcgen05.ld")
            self.loaded.set(part, column, clock)
        else:
            self.check_write(threads, part, "tcgen05.st")
            self.mark_written(part, column, clock)
        if not machine.lenient:
            self.pending.setdefault((thread, kind), []).append(part)
        return part

    def wait(self, thread: int, kind: str) -> None:
        """Execute ``tcgen05.wait``: mark all earlier loads of the warp, or all earlier stores, as complete."""
        records = self.loaded if kind == "ld" else self.written
        column = int(self.machine.races.column[thread])
        for part in self.pending.pop((thread, kind), []):
            records.complete(part, column, int(self.machine.races.clocks[thread, column]), False)
            self.unfenced.setdefault(thread, []).append((records, part))

    # Operations of tensor cores

    def pipe_of(self, thread: int) -> Pipe:
        if thread not in self.pipes:
            cluster = self.machine.cluster[thread]
            number = sum(self.machine.cluster[other] == cluster for other in self.pipes)
            if number == PIPES:
                raise NotImplementedError(f"more than {PIPES} threads of a cluster issue to tensor cores")
            clocks = self.machine.races.clocks[thread]
            self.pipes[thread] = Pipe(self.machine.races.pipes + number, np.zeros_like(clocks))
        return self.pipes[thread]

    def next_operation(self, thread: int) -> tuple[Pipe, int]:
        """Return the pipe of a thread, and the number of its next operation."""
        pipe = self.pipe_of(thread)
        pipe.issued += 1
        if pipe.issued == 0xFFFF:
            raise NotImplementedError("a launch with so many operations of tensor cores")
        return pipe, pipe.issued

    def issue(self, thread: int, execute: Callable[[], None], ctas: Sequence[int]) -> None:
        """Schedule an operation of a tensor core. The operation runs after all earlier operations of the same
        thread."""
        self.machine.under_way.start_in_pipe(thread, self.pipe_of(thread).under_way, execute, tuple(ctas))

    def commit(self, thread: int, barriers: list[tuple[int, int]]) -> None:
        """Arrive at mbarriers, given as (CTA, offset), when all operations that the thread has issued are complete."""
        machine = self.machine
        pipe = self.pipe_of(thread)
        known = pipe.saw.copy()
        known[pipe.column] = pipe.issued
        if machine.lenient:
            known = np.maximum(known, machine.races.clocks[thread])

        def execute() -> None:
            for cta, offset in barriers:
                machine.races.pipe_arrives(known, mbarrier_key(cta, offset))
                machine.barriers.arrive_later(cta, offset)

        self.issue(thread, execute, [cta for cta, _ in barriers])
