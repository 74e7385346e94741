"""Static analysis of a program: basic blocks, live registers, and loads that may read shared memory."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import dataclass, field

from ptx_emulator.decoder import Decoder, Step
from ptx_emulator.parser import Program
from ptx_emulator.values import TYPES


@dataclass
class Block:
    """A basic block: its steps, and the registers that are live at its start and at its end.

    ``polls`` is True if the block contains ``ld.acquire``, by which a thread polls a value that another thread stores.
    """

    steps: list[Step]
    first: int
    live_in: list[int] = field(default_factory=list)
    live_out: list[int] = field(default_factory=list)
    next: int = 0
    target: int = 0
    polls: bool = False


def blocks_of(program: Program, decoder: Decoder) -> list[Block]:
    """Divide a program into basic blocks, in program order. The last block ends the thread that reaches it."""
    steps = [decoder.decode(instruction) for instruction in program.instructions]
    leaders = {0, *program.labels.values()}
    for i, step in enumerate(steps):
        if step.kind != "plain":
            leaders.add(i + 1)
        if step.kind in ("warp", "block"):
            leaders.add(i)
    leaders = sorted(at for at in leaders if at < len(steps))
    number = {at: i for i, at in enumerate(leaders)}
    blocks = []
    for i, (start, end) in enumerate(zip(leaders, [*leaders[1:], len(steps)], strict=True)):
        block = Block(steps[start:end], i, next=i + 1)
        if block.steps[-1].kind == "branch":
            block.target = number.get(block.steps[-1].target, len(leaders))
        block.polls = any(step.instruction.opcode.startswith("ld.acquire") for step in block.steps)
        blocks.append(block)
    # A thread that reaches the end of the program text ends, so add a step that ends it.
    blocks.append(Block([decoder.end()], len(blocks)))
    return blocks


@dataclass
class Flow:
    """Cached results of ``find_loads`` for each step of a program, and of ``find_live_registers`` for each block."""

    loads: int
    of_steps: list[tuple[int | None, list[int]]]
    of_blocks: list[tuple[list[int], list[int]]]


def find_flow(program: Program, blocks: list[Block], in_clusters: bool) -> int:
    """Annotate the steps and blocks of a program. Return the number of loads that may read shared memory.

    The analysis is cached for each program, because it takes longer than decoding. The analysis depends on the launch
    in two ways: in clusters, addresses of shared memory are read from registers, and while a previous kernel runs,
    ``griddepcontrol.wait`` ends a block.
    """
    key = in_clusters, *(len(block.steps) for block in blocks)
    flow = program.flows.get(key)
    steps = [step for block in blocks for step in block.steps]
    if flow is None:
        loads = find_loads(blocks)
        find_live_registers(blocks)
        of_steps = [(step.load, step.needs) for step in steps]
        program.flows[key] = Flow(loads, of_steps, [(block.live_in, block.live_out) for block in blocks])
        return loads
    for step, (load, needs) in zip(steps, flow.of_steps, strict=True):
        step.load, step.needs = load, needs
    for block, (live_in, live_out) in zip(blocks, flow.of_blocks, strict=True):
        block.live_in, block.live_out = live_in, live_out
    return flow.loads


def find_live_registers(blocks: list[Block]) -> None:
    """Find the registers that are live at the start and the end of each block. The result is stored as bit sets."""
    reads, writes = [], []
    for block in blocks:
        read = written = 0
        for step in block.steps:
            for slot in step.reads:
                read |= ~written & 1 << slot
            for target in step.targets:
                if target is not None:
                    if step.guard is not None:
                        read |= ~written & 1 << target.slot
                    written |= 1 << target.slot
        reads.append(read)
        writes.append(written)
    live_in = list(reads)
    changed = True
    after = [0] * len(blocks)
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            block = blocks[i]
            last = block.steps[-1]
            following = [block.target] if last.kind == "branch" else []
            if last.kind not in ("branch", "exit") or last.guard is not None:
                following.append(block.next)
            after[i] = 0
            for other in following:
                after[i] |= live_in[other]
            new = reads[i] | (after[i] & ~writes[i])
            changed |= new != live_in[i]
            live_in[i] = new
    for block, read, written, live in zip(blocks, reads, writes, after, strict=True):
        block.live_in = _numbers(read)
        block.live_out = _numbers(written & live)


def _numbers(bits: int) -> list[int]:
    """Return the indices of the bits that are set in ``bits``."""
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return numbers


ACCESSING = ("ld", "ldu", "st", "atom", "red", "cp", "mbarrier", "wgmma", "tcgen05")


def find_loads(blocks: list[Block]) -> int:
    """Number all loads that may read shared memory, and find the instructions that need their results.

    The compiler may move any instruction that does not synchronise, branch or access memory. All other instructions are
    *fixed*: when a fixed instruction runs, the loads that it needs must be complete. A fixed instruction needs a load
    if it uses the load's result, directly or through other instructions. ``mma`` is not fixed: ptxas 13 moved an
    ``mma`` past a later arrival at a barrier.
    """
    loads = 0
    origins: Counter[int] = Counter()  # for each register, a bit set of the loads on which its value depends
    passing, staying = [], []
    for step in (step for block in blocks for step in block.steps):
        name, *parts = step.instruction.opcode.split(".")
        if name in ("ld", "ldmatrix") and not {"global", "local", "const", "param"}.intersection(parts):
            step.load = loads
            for target in step.targets:
                if target is not None:
                    origins[target.slot] |= 1 << loads
            loads += 1
        passes = name == "mma" or (step.kind == "plain" and name not in ACCESSING)
        (passing if passes else staying).append(step)
    before = -1
    while before != sum(origins.values()):
        before = sum(origins.values())
        for step in passing:
            needed = _union(origins, step.reads)
            for target in step.targets:
                if target is not None:
                    origins[target.slot] |= needed
    for step in staying:
        needed = _union(origins, step.reads)
        step.needs = _numbers(needed)
    return loads


def _union(origins: Counter[int], slots: list[int]) -> int:
    return functools.reduce(operator.or_, (origins[slot] for slot in slots), 0)


def granule(program: Program) -> int:
    """Return the size in bytes of the smallest access to shared memory, at most 4."""
    smallest = 4
    for instruction in program.instructions:
        parts = instruction.opcode.split(".")
        if parts[0] in ("ld", "st", "atom", "red") and parts[-1] in TYPES and "global" not in parts:
            smallest = min(smallest, TYPES[parts[-1]].bits // 8)
    return smallest
