"""Execution of one launch: threads, scheduling and memory. ``barriers`` contains the barriers, and ``under_way`` the
asynchronous operations.

All threads of all CTAs exist at the same time. In each step, some warps are chosen at random. Among the threads of
these warps, only the threads at the lowest program address run one basic block, so that diverged threads reconverge as
early as possible. ``seed`` determines the order in which warps run. An asynchronous copy is executed at a random time
after its start, at the latest when no thread can run.

Each of these faults raises an error that names the instruction, the thread and the address:

- an access that is out of bounds or misaligned, or that reaches shared memory of a CTA that may have ended;
- an address, or a value stored to global memory, that depends on uninitialised shared or local memory;
- two accesses to the same byte of shared memory that no barrier orders;
- bulk copies from shared memory, and warpgroup MMAs, that read data stored without ``fence.proxy.async``;
- bulk copies to shared memory from which loads may still be in flight (see ``races``);
- an access to unallocated tensor memory, or an unordered access to tensor memory (see ``tensor_memory``);
- a thread that ends before its bulk copies have read their source, or before its ``cp.async`` copies have been written;
- misuse of barriers, and threads that wait forever;
- errors of programmatic dependent launch: dependents that are released before the wait for the previous kernel, a
  launch in which no thread waits, and stores to global memory that the previous kernel may still access.

The emulator does not model any other memory ordering: other fences have no effect, no other proxies exist, and accesses
to global memory are not ordered. The emulator does not model caches or timing, nor the register contents of a warpgroup
MMA or a ``tcgen05.ld`` before the operation has completed. ``mbarrier.try_wait`` blocks until it can succeed, but may
time out once per thread and phase: if nothing else can run, and with a ``seed`` also at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

import ptx_emulator.instructions  # noqa: F401  (makes the instructions known)
from ptx_emulator.barriers import AT_WARP, FOR_KERNEL, Barriers
from ptx_emulator.blocks import Block, blocks_of, find_flow, granule
from ptx_emulator.decoder import Decoder, Step
from ptx_emulator.layout import GlobalMemory, Launch, Layout
from ptx_emulator.memory import (
    LOCAL_WINDOW,
    RANK_SHIFT,
    REGION_SHIFT,
    SHARED_WINDOW,
    Deadlock,
    EmulationError,
    Fault,
    Memory,
    OutOfBounds,
    Uninitialised,
)
from ptx_emulator.parser import Program
from ptx_emulator.races import Races
from ptx_emulator.tensor_cores import TensorCores
from ptx_emulator.tensor_memory import TensorMemory
from ptx_emulator.under_way import UnderWay
from ptx_emulator.values import F32_NAN, UNSIGNED, Array, any_true, distinct, of_each, positions

RUNNING, WAITING, ENDED = 0, 1, 2
FAR = np.iinfo(np.int32).max


def _slice_of(threads: Array) -> Any:
    """Return sorted ``threads`` as a slice if they are consecutive, because NumPy is faster with slices."""
    first, last = int(threads[0]), int(threads[-1])
    return slice(first, last + 1) if last - first < len(threads) else threads


class Machine(Layout):
    """One launch of ``program``.

    After ``run``, ``steps`` is the number of executed instructions (an instruction that many threads execute together
    counts once), and ``accessed`` contains the numbers of the allocations that the launch read or wrote.

    Args:
        program: Program to run.
        launch: Grid, block and parameters.
        memory: Global memory.
        seed: Seed of the order in which warps and copies are executed. With None, all warps run in lockstep, and copies
            are executed as late as possible. Threads that poll (``ld.acquire``) then continue only when no other thread
            can run, after one pending copy.
        max_steps: Number of executed instructions after which the launch is aborted.
        strict: True if only ``bar.warp.sync`` orders memory within a warp, as PTX specifies. If False, shuffles, votes
            and elections order it too, because lanes that execute an instruction together have issued all earlier
            instructions.
        scoped: True if the scope of an mbarrier operation limits the CTAs for which the operation orders memory, as PTX
            specifies (see ``races``). If False, each operation orders memory for the whole cluster.
        lenient: True to allow omissions in NVIDIA's kernels that the PTX specification forbids (see ``races``,
            ``tensor_memory``). The calibration tool sets ``lenient``; kernels of torch_cute_ops run without it.
        before: Function that performs the remaining writes of the previous kernel, or None if that kernel has ended.
            The previous kernel ends as late as possible: when all threads wait at ``griddepcontrol.wait`` or poll.
        accessed_before: Numbers of the allocations that the previous kernel accesses (see ``accessed``). Before the
            previous kernel has ended, this launch may store only to other allocations. With None, the previous kernel
            may access all allocations.
        held: Numbers of bulk copies that are executed only when nothing else can run. Copies are numbered in the order
            of their start.
        starved: Numbers of warps of the launch that run only when nothing else can run, one block at a time.
    """

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        seed: int | None = 0,
        max_steps: int = 1_000_000,
        strict: bool = False,
        lenient: bool = False,
        before: Callable[[], None] | None = None,
        accessed_before: Collection[int] | None = None,
        held: Collection[int] = (),
        starved: Collection[int] = (),
        scoped: bool = False,
    ):
        super().__init__(program, launch, memory)
        self.before, self.overlaps = before, before is not None
        # Contents of the allocations that this launch must not change before the previous kernel has ended.
        self.contents: dict[int, Array] = {}
        if before is not None:
            for number, region in enumerate(memory.regions, 1):
                if accessed_before is None or number in accessed_before:
                    self.contents[number] = region.data.copy()
        self.accessed: set[int] = set()
        self.prefetched: list[tuple[int, int]] = []  # (address, size) of each bulk prefetch, in order
        self.has_waited = np.zeros(self.threads, bool)
        self.random = None if seed is None else np.random.default_rng(seed)
        self.max_steps = max_steps
        self.strict, self.lenient, self.held = strict, lenient, held
        self.scoped = scoped and self.cluster_ctas > 1
        self.steps = 0
        self.fed = ~np.isin(self.warp, list(starved))
        self.barriers, self.under_way = Barriers(self), UnderWay(self)
        decoder = Decoder(self)
        self.blocks = blocks_of(program, decoder)
        loads = find_flow(program, self.blocks, self.cluster_ctas > 1)
        self.registers = [np.zeros(self.threads, UNSIGNED[width]) for width in decoder.widths]
        for slot, address in decoder.shared_symbols.items():
            self.registers[slot][:] = address
        self.block = np.zeros(self.threads, np.int32)
        self.state = np.full(self.threads, RUNNING, np.int8)
        # Threads that polled, and do not run again until all running threads polled. Used only without a seed.
        self.polled = np.zeros(self.threads, bool)
        self.reason = np.zeros(self.threads, np.int32)  # why a thread waits, or 0 if another array records it
        self.step: Step | None = None
        # For each register, a mask of the threads whose value depends on uninitialised memory.
        self.undefined: dict[int, Array] = {}
        self.unwritten: list[Array] | None = None
        self.undefined_values: list[Array | None] | None = None
        self.races = Races(self, granule(program), loads)
        self.tensor = TensorMemory(self)
        self.tensor_cores = TensorCores(self)

    # Scheduling

    def run(self) -> None:
        """Execute the launch until every thread has ended.

        Raises:
            EmulationError: see ``memory``.
            NotImplementedError: for instructions that the emulator does not know.
        """
        with np.errstate(all="ignore"):
            while True:
                running = self.state == RUNNING
                if not any_true(running):
                    if self.under_way.copies:
                        self.under_way.execute_one()
                        continue
                    if self.under_way.held:
                        self.under_way.release_held()
                        continue
                    if self.before is not None:
                        self._end_kernel_before()
                        continue
                    if (self.state == ENDED).all():
                        self._check_waits()
                        return
                    if not self.barriers.time_out():
                        raise self._deadlock()
                    continue
                if self.random is None and not any_true(running & ~self.polled):
                    self.polled[:] = False
                    if self.under_way.copies:
                        self.under_way.execute_one()
                        continue
                if self.before is not None and not self.under_way.copies and self._all_poll(running):
                    self._end_kernel_before()
                if not any_true(running & self.fed):
                    if self.under_way.copies:
                        self.under_way.execute_one()
                    else:
                        self._run_blocks(running, 1)
                    continue
                self._run_some(running & self.fed)

    def _all_poll(self, running: Array) -> bool:
        """Return True if all threads in ``running`` are polling."""
        return all(self.blocks[block].polls for block in distinct(self.block[running]))

    def _run_some(self, running: Array) -> None:
        """Choose warps at random, and run them for some blocks."""
        blocks = FAR
        if self.random is not None:
            if self.under_way.copies and self.random.random() < 0.3:
                self.under_way.execute_one()
                running = (self.state == RUNNING) & self.fed
            share = self.random.choice([0.2, 0.6, 1.0, 1.0])
            chosen = self.random.random(self.warps) < share
            chosen[self.random.choice(self.warp[running])] = True
            among = chosen[self.warp]
            blocks = int(self.random.integers(1, 60))
        else:
            among = ~self.polled
        self._run_blocks(among & self.fed, blocks)

    def _run_blocks(self, among: Array, blocks: int) -> None:
        """Run ``blocks`` basic blocks, with the threads of the mask ``among`` that can run."""
        while blocks:
            blocks -= 1
            address = np.where(among & (self.state == RUNNING), self.block, FAR)
            lowest = int(address.min())
            if lowest == FAR:
                return
            threads = positions(address == lowest)
            self._run_block(self.blocks[lowest], threads)
            if self.blocks[lowest].polls:
                among[threads] = False  # otherwise these threads, at the lowest address, would poll until `blocks` is 0
                self.polled[threads] = self.random is None
            if self.steps > self.max_steps:
                raise EmulationError(f"more than {self.max_steps} steps: {self._where()}")

    def _run_block(self, block: Block, threads: Array) -> None:
        steps = block.steps
        self.steps += len(steps)
        kind = steps[0].kind
        if kind == "warp":
            threads = self._meet(block, threads)
            if not len(threads):
                return
        where = _slice_of(threads)
        registers = self.registers
        if where is threads:
            values = {slot: registers[slot].take(where) for slot in block.live_in}
        else:
            values = {slot: registers[slot][where].copy() for slot in block.live_in}
        unknown = {}
        if self.undefined:
            unknown = {slot: self.undefined[slot][where].copy() for slot in block.live_in if slot in self.undefined}
        following: Any = block.next
        for step in steps:
            self.step = step
            if step.needs:
                self.races.need_loads(step.needs, threads)
            try:
                if step.simple and not unknown:
                    step.compute(threads, values)
                    continue
                done = self._execute(step, threads, values, unknown)
            except Fault as fault:
                raise self.error(fault.kind, int(threads[fault.position]), fault.message) from None
            if step.kind == "branch":
                following = np.where(done, block.target, block.next) if step.guard else block.target
            elif step.kind == "exit":
                self._end(threads if done is None else threads[done])
            elif step.kind == "block":
                # Only the threads in ``done`` continue. All other threads that execute this step wait.
                where = threads = threads[done]
                values = {slot: value if len(value) == 1 else value[done] for slot, value in values.items()}
        self.block[where] = following
        for slot in block.live_out:
            registers[slot][where] = values[slot]
            if slot in unknown or slot in self.undefined:
                self._keep_unknown(slot, where, unknown.get(slot))

    def _keep_unknown(self, slot: int, where: Any, unknown: Array | None) -> None:
        if slot not in self.undefined:
            self.undefined[slot] = np.zeros(self.threads, bool)
        self.undefined[slot][where] = False if unknown is None else unknown
        if not any_true(self.undefined[slot]):
            del self.undefined[slot]

    def _execute(self, step: Step, threads: Array, values: dict[int, Array], unknown: dict[int, Array]) -> Any:
        """Run one step, and store its results in ``values``. If the step is a branch, return the value that decides the
        branch."""
        if step.guard is not None:
            guard = values[step.guard.slot]
            taken = of_each(~guard if step.guard.negated else guard, threads)
            if step.kind in ("branch", "exit"):
                return taken
        elif step.kind == "branch":
            return None
        arguments = [value(values) for value in step.values]
        if step.guard is None:
            results, strange = self._call(step, threads, arguments, unknown)
            if step.kind == "block" and step.targets:
                done, result = results
                if step.targets[0] is not None:
                    values[step.targets[0].slot] = result
                return done
            if step.kind in ("exit", "block"):
                return results
            for i, (target, result) in enumerate(zip(step.targets, results, strict=True)):
                if target is not None:
                    values[target.slot] = target.store(result)
                    if strange is not None and strange[i] is not None:
                        unknown[target.slot] = strange[i]
                    else:
                        unknown.pop(target.slot, None)
            return None
        subset = positions(taken)
        part = {slot: which[subset] for slot, which in unknown.items()}
        arguments = [a if len(a) == 1 else a[subset] for a in arguments]
        if step.kind == "block":
            if step.targets:
                raise NotImplementedError(f"guard: {step.instruction}")
            done = ~taken
            if len(subset):
                done[subset] = self._call(step, threads[subset], arguments, part)[0]
            return done
        if not len(subset):
            return None
        try:
            results, strange = self._call(step, threads[subset], arguments, part)
        except Fault as fault:
            fault.position = subset[fault.position]
            raise
        for i, (target, result) in enumerate(zip(step.targets, results, strict=True)):
            if target is not None:
                merged = np.array(of_each(values[target.slot], threads))
                merged[subset] = target.store(result)
                values[target.slot] = merged
                if target.slot in unknown or (strange is not None and strange[i] is not None):
                    which = np.array(unknown.get(target.slot, np.zeros(len(threads), bool)))
                    which[subset] = False if strange is None or strange[i] is None else strange[i]
                    unknown[target.slot] = which
        return None

    def _call(
        self, step: Step, threads: Array, arguments: list[Array], unknown: dict[int, Array]
    ) -> tuple[Any, list[Array | None] | None]:
        """Call a step's function. Return its results, and for each target a mask of the values that depend on
        uninitialised memory."""
        self.unwritten = None
        if not unknown:
            return step.run(threads, *arguments), self.unwritten
        strange = [unknown.get(source.slot) for source in step.sources]
        strange = [which if which is not None and any_true(which) else None for which in strange]
        known = all(which is None for which in strange)
        if not known and step.undefined in ("load", "store", "error"):
            for which in strange[: None if step.undefined == "error" else 1]:
                if which is not None:
                    raise Fault(Uninitialised, positions(which)[0], "depends on uninitialised memory")
        if step.undefined == "store" and not known:
            self.undefined_values = strange[1:]
        results, unwritten = step.run(threads, *arguments), self.unwritten
        if known or step.undefined == "load":
            return results, unwritten
        if step.undefined in ("store", "error"):
            return results, None
        if step.undefined == "shuffle":
            if any(which is not None for which in strange[1:]):
                raise Fault(Uninitialised, 0, "depends on uninitialised memory")
            moved = step.run(threads, strange[0].astype(np.uint32), *arguments[1:])[0]
            return results, [moved != 0, None]
        if step.undefined == "nan":
            # Run the step again with NaN for undefined values and zero for defined values, and unchanged predicates. If
            # a result is NaN, it depends on an undefined value.
            no = np.zeros(len(threads), np.uint32)
            marks = [no if which is None else np.where(which, F32_NAN, no) for which in strange]
            marks = [value if value.dtype == bool else mark for value, mark in zip(arguments, marks, strict=True)]
            spread = [np.isnan(result) for result in step.run(threads, *marks)]
            return results, [a | b for a, b in zip(spread, unwritten or spread, strict=True)]
        if step.undefined == "select":
            no = np.zeros(len(threads), bool)
            a, b, c = (no if which is None else which for which in strange)
            return results, [np.where(arguments[2], a, b) | c]
        if step.undefined in ("and", "or"):
            # If a defined operand alone determines the result, as 0 does in an AND, the result is defined.
            no = np.zeros(len(threads), bool)
            a, b = (no if which is None else which for which in strange)
            decides = arguments[0].dtype.type(0)
            decides = ~decides if step.undefined == "or" else decides
            first, second = arguments
            return results, [(a & b) | (a & (second != decides)) | (b & (first != decides))]
        either = np.logical_or.reduce([which for which in strange if which is not None])
        return results, [either] * len(step.targets)

    # The previous kernel

    def wait_for_kernel(self, threads: Array) -> Array:
        """Let threads wait until the previous kernel has ended."""
        if self.before is not None:
            self.wait(threads, FOR_KERNEL)
            return np.zeros(len(threads), bool)
        self.has_waited[threads] = True
        return np.ones(len(threads), bool)

    def release_dependents(self, threads: Array) -> None:
        early = positions(~self.has_waited[threads])
        if len(early) and not self.lenient:
            raise Fault(EmulationError, early[0], "releases dependents before it has waited for the previous kernel")

    def _check_waits(self) -> None:
        """Check that some thread has waited for the previous kernel.

        Later kernels start when every CTA of this launch has released its dependents or has ended. If a thread of this
        launch has waited, the previous kernel has ended by then.
        """
        if self.overlaps and not any_true(self.has_waited):
            raise EmulationError("ended, but no thread has waited for the previous kernel")

    def _end_kernel_before(self) -> None:
        for number, contents in self.contents.items():
            region = self.global_memory.regions[number - 1]
            if not np.array_equal(region.data, contents):
                raise EmulationError(f"{region.name} is written before the previous kernel has ended")
        before, self.before = self.before, None
        assert before is not None
        before()
        self.retry(positions((self.state == WAITING) & (self.reason == FOR_KERNEL)))

    def _end(self, threads: Array) -> None:
        self.under_way.check_end(threads)
        self.state[threads] = ENDED
        for cta in distinct(self.cta[threads]):
            if not len(self.living(self.cta == cta)):
                self._end_cta(cta)
        # A cluster barrier does not expect threads that have ended, so it may be complete now.
        for cluster in distinct(self.cluster[threads]):
            self.barriers.check_cluster(cluster)

    def _end_cta(self, cta: int) -> None:
        try:
            self.races.end(cta)
            self.tensor.check_end(cta)
        except Fault as fault:
            thread = int(positions(self.cta == cta)[fault.position])
            raise self.error(fault.kind, thread, fault.message) from None

    def living(self, among: Array) -> Array:
        """Return the threads of the mask ``among`` that have not ended."""
        return positions(among & (self.state != ENDED))

    def wait(self, threads: Array, reason: int = 0) -> None:
        """Let threads wait until ``retry`` or ``resume`` is called. ``reason`` selects the threads for
        ``retry_those``."""
        self.state[threads] = WAITING
        self.reason[threads] = reason

    def retry(self, threads: Array) -> None:
        """Let waiting threads execute their instruction again."""
        self.state[threads] = RUNNING

    def retry_those(self, among: Array, reason: int) -> None:
        """Let the threads of the mask ``among`` that wait for ``reason`` execute their instruction again."""
        waiting = among[(self.state[among] == WAITING) & (self.reason[among] == reason)]
        self.reason[waiting] = 0
        self.retry(waiting)

    def resume(self, threads: Array) -> None:
        """Let waiting threads continue after the instruction at which they wait."""
        self.state[threads] = RUNNING
        for block in distinct(self.block[threads]):
            at = threads[self.block[threads] == block]
            self.block[at] = self.blocks[block].next

    def _meet(self, block: Block, threads: Array) -> Array:
        """Let lanes arrive at an instruction that the lanes of a warp must execute together. Return the lanes whose
        partners have all arrived."""
        step = block.steps[0]
        self.step = step
        if step.guard is not None:
            raise NotImplementedError(f"guard: {step.instruction}")
        mask = step.mask({slot: self.registers[slot][threads] for slot in block.live_in}).astype(np.int64)
        needed = of_each(mask, threads) & self.warp_mask[threads]
        absent = positions(needed >> self.lane[threads] & 1 == 0)
        if len(absent):
            raise self.error(EmulationError, threads[absent[0]], f"lane not in mask {needed[absent[0]]:#x}")
        # A bar.warp.sync may synchronise with a bar.warp.sync elsewhere in the program. At other instructions, all
        # lanes must arrive at the same instruction.
        reason = AT_WARP if step.instruction.opcode.startswith(("bar.warp", "barrier.warp")) else block.first + 1
        self.wait(threads, reason)
        concerned = np.zeros(self.warps, bool)
        concerned[self.warp[threads]] = True
        candidates = positions((self.state == WAITING) & (self.reason == reason) & concerned[self.warp])
        arrived = np.bincount(self.warp[candidates], 2.0 ** self.lane[candidates], self.warps).astype(np.int64)
        wanted = needed if len(candidates) == len(threads) else self._masks(block, candidates)
        ready = candidates[(arrived[self.warp[candidates]] & wanted) == wanted]
        self.state[ready] = RUNNING
        self.reason[ready] = 0
        elsewhere = ready[self.block[ready] != block.first]
        if len(elsewhere):
            # For lanes that wait at another bar.warp.sync, all partners have arrived too, so let these lanes continue.
            self.races.join_warps(ready)
            self.resume(elsewhere)
            return ready[self.block[ready] == block.first]
        if (step.orders or self.lenient) and (reason == AT_WARP or not self.strict):
            self.races.join_warps(ready)
        return ready

    def _masks(self, block: Block, threads: Array) -> Array:
        """Return, for each waiting lane, the lane mask (``membermask``) of its instruction."""
        masks = np.zeros(len(threads), np.int64)
        for number in distinct(self.block[threads]):
            at = self.block[threads] == number
            other = self.blocks[number]
            mask = other.steps[0].mask({slot: self.registers[slot][threads[at]] for slot in other.live_in})
            masks[at] = mask.astype(np.int64)
        return masks & self.warp_mask[threads]

    # Errors

    def error(self, kind: type[EmulationError], thread: int, message: str) -> EmulationError:
        cta, tid = int(self.cta[thread]), int(self.tid[thread])
        return kind(f"{message}; CTA {cta}, thread {tid}; {self.step.instruction if self.step else ''}")

    def _where(self) -> str:
        alive = positions(self.state != ENDED)
        at = Counter(int(block) for block in self.block[alive])
        lines = []
        for block, count in sorted(at.items()):
            some = [int(t) for t in alive[self.block[alive] == block][:4]]
            names = ", ".join(f"{self.cta[t]}:{self.tid[t]}" for t in some)
            lines.append(f"{count} threads (CTA:thread {names}...) at {self.blocks[block].steps[0].instruction}")
        return "\n  ".join(lines)

    def _deadlock(self) -> Deadlock:
        return Deadlock("\n  ".join(["no thread can run:", self._where(), *self.barriers.waited_for()]))

    # Memory

    def places(
        self, space: str, threads: Array, address: Array, what: str = ""
    ) -> Iterable[tuple[Any, Memory, Array, Array]]:
        """Divide accesses by memory. For each memory that is accessed, yield (positions in ``threads``, memory, banks,
        offsets)."""
        address = of_each(address, threads).astype(np.int64)
        if space.startswith("shared"):
            return [(slice(None), self.shared, *self.shared_place(space, threads, address))]
        if space == "local":
            return [(slice(None), self.local, threads, address)]
        number = address >> REGION_SHIFT
        first = int(number[0])
        every = not any_true(number != first)
        found = []
        for region in [first] if every else distinct(number):
            subset: Any = slice(None) if every else positions(number == region)
            offset = address[subset] & ((1 << REGION_SHIFT) - 1)
            chosen = threads[subset]
            if 1 <= region <= len(self.global_memory.regions):
                self.accessed.add(int(region))
                found.append((subset, self.global_memory.regions[region - 1], np.zeros(len(chosen), np.int64), offset))
            elif space == "" and region == SHARED_WINDOW >> REGION_SHIFT:
                found.append((subset, self.shared, *self.shared_place("shared::cluster", chosen, offset)))
            elif space == "" and region == LOCAL_WINDOW >> REGION_SHIFT:
                found.append((subset, self.local, chosen, offset))
            else:
                position = 0 if every else subset[0]
                raise Fault(OutOfBounds, position, f"address {address[position]:#x} is in no allocation")
        return found

    def shared_place(self, space: str, threads: Array, address: Array) -> tuple[Array, Array]:
        """Return the CTA and the offset that each shared-memory address names."""
        address = of_each(address, threads).astype(np.int64)
        rank = address >> RANK_SHIFT
        own = self.cta[threads]
        bad = positions((rank < 0) | (rank >= self.cluster_ctas))
        if len(bad):
            raise Fault(OutOfBounds, bad[0], f"shared address {address[bad[0]]:#x}")
        if self.cluster_ctas == 1:
            return own, address
        cta = self.cta_of_rank[self.cluster[threads], rank]
        if space != "shared::cluster" and (cta != own).any():
            bad = positions(cta != own)[0]
            raise Fault(OutOfBounds, bad, f"address {address[bad]:#x} belongs to another CTA: not shared::cta")
        remote = distinct(cta[cta != own])
        for other in remote:
            if (self.state[self.cta == other] == ENDED).all():
                bad = positions(cta == other)[0]
                raise Fault(OutOfBounds, bad, f"address {address[bad]:#x} belongs to CTA {other}, which has ended")
        return cta, address & ((1 << RANK_SHIFT) - 1)

    def ctas_of_mask(self, thread: int, mask: int) -> list[int]:
        """Return the CTAs whose ranks are set in a multicast mask."""
        ctas = self.cta_of_rank[self.cluster[thread]]
        if not mask or mask >> len(ctas):
            raise Fault(EmulationError, 0, f"mask {mask:#x} in a cluster of {len(ctas)} CTAs")
        return [int(cta) for rank, cta in enumerate(ctas) if mask >> rank & 1]

    def load(self, space: str, threads: Array, address: Array, width: int, count: int) -> list[Array]:
        """Load ``count`` elements of ``width`` bytes, and set ``self.unwritten`` to masks of the uninitialised
        elements."""
        places = self.places(space, threads, address)
        results = [np.zeros(len(threads), UNSIGNED[8 * width]) for _ in range(count)]
        unwritten = [np.zeros(len(threads), bool) for _ in range(count)]
        for subset, memory, bank, offset in places:
            found, missing = self.checked(subset, memory.load, bank, offset, width, count)
            if memory is self.shared:
                self.races.read(threads[subset], bank, offset, width * count, self.step and self.step.load)
            if len(places) == 1:
                self.unwritten = missing
                return found
            for i in range(count):
                results[i][subset] = found[i]
                if missing is not None:
                    unwritten[i][subset] = missing[i]
        self.unwritten = unwritten if any(any_true(one) for one in unwritten) else None
        return results

    def store(self, space: str, threads: Array, address: Array, width: int, values: list[Array]) -> None:
        undefined, self.undefined_values = self.undefined_values, None
        values = [of_each(value, threads) for value in values]
        for subset, memory, bank, offset in self.places(space, threads, address):
            self.checked(subset, memory.store, bank, offset, width, [value[subset] for value in values])
            if memory is self.shared:
                self.races.write(threads[subset], bank, offset, width * len(values))
            for i, which in enumerate(undefined or ()):
                if which is not None and which[subset].any():
                    at = positions(which[subset])
                    if memory is not self.shared and memory is not self.local:
                        position = at[0] if isinstance(subset, slice) else subset[at[0]]
                        raise Fault(Uninitialised, position, "stores a value that depends on uninitialised memory")
                    memory.forget(bank[at], offset[at] + i * width, width)

    @staticmethod
    def checked(subset: Any, function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Fault as fault:
            if not isinstance(subset, slice):
                fault.position = subset[fault.position]
            raise
