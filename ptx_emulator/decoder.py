"""Decode instructions into steps. Functions in ``ptx_emulator.instructions`` use the types that are defined here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ptx_emulator.arithmetic import IGNORED, PURE, Op, type_of
from ptx_emulator.memory import RANK_SHIFT
from ptx_emulator.parser import Imm, Instruction, Mem, Operand, Reg, Symbol, Vec
from ptx_emulator.values import TYPES, UNSIGNED, Array, Type

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


@dataclass
class Source:
    """An operand: its register (None for a constant), and a function that computes its array from all registers."""

    slot: int | None
    value: Callable[[dict[int, Array]], Array]

    def __call__(self, values: dict[int, Array]) -> Array:
        return self.value(values)


@dataclass
class Target:
    """A register to which an instruction writes its result, with the result's type."""

    slot: int
    width: int
    signed: bool

    def __post_init__(self) -> None:
        self.dtype: np.dtype = UNSIGNED[self.width]

    def store(self, value: Array) -> Array:
        """Convert a result to the bits that are stored in the register."""
        if value.dtype is self.dtype or value.dtype == self.dtype:
            return value
        bits = 8 * value.itemsize
        if bits == self.width:
            return value.view(self.dtype)
        if self.signed:
            return value.view(f"i{bits // 8}").astype(f"i{self.width // 8}").view(UNSIGNED[self.width])
        return value.view(UNSIGNED[bits]).astype(UNSIGNED[self.width])


@dataclass
class Guard:
    slot: int
    negated: bool


@dataclass
class Step:
    """One decoded instruction.

    Attributes:
        kind: ``"warp"`` if the step runs only when all lanes of ``mask`` have arrived. ``"block"`` if the step may make
            threads wait, and returns a mask of the threads that may continue.
        run: Function ``run(threads, *sources)`` that returns one array for each target.
        undefined: Name of the rule for sources that depend on uninitialised memory. For example, ``load`` and ``store``
            need a defined address, and a store to global memory needs a defined value.
        orders: True if a ``warp`` step orders the memory accesses of its lanes (see ``Machine``).
        load: Number of this load, if the step is a load that may read shared memory.
        needs: Numbers of the loads whose results the step needs (see ``blocks.find_loads``).
        simple: True if the step is unguarded and depends only on registers.
    """

    instruction: Instruction
    sources: list[Source]
    targets: list[Target | None]
    run: Callable[..., Any]
    kind: Literal["plain", "branch", "exit", "warp", "block"] = "plain"
    mask: Source | None = None
    target: int = 0
    guard: Guard | None = None
    reads: list[int] = field(default_factory=list)
    values: list[Callable[[dict[int, Array]], Array]] = field(default_factory=list)
    undefined: Literal["pass", "select", "and", "or", "load", "store", "shuffle", "nan", "error"] = "error"
    orders: bool = True
    load: int | None = None
    needs: list[int] = field(default_factory=list)
    simple: bool = False

    def compute(self, threads: Array, values: dict[int, Array]) -> None:
        """Run a simple step, and store its results in ``values``."""
        results = self.run(threads, *[value(values) for value in self.values])
        for target, result in zip(self.targets, results, strict=True):
            if target is not None:
                values[target.slot] = target.store(result)


Effect = Callable[["Decoder", Instruction, list[str]], Step]
EFFECTS: dict[str, Effect] = {}


def effect(names: str) -> Callable[[Effect], Effect]:
    def enter(function: Effect) -> Effect:
        for name in names.split():
            EFFECTS[name] = function
        return function

    return enter


class Decoded:
    """Cache of register numbers, and of decoded steps that do not depend on a launch. The decoders of a program and of
    its edited copies share one cache.

    Without the cache, decoding took a tenth of the tests' time.
    """

    def __init__(self) -> None:
        self.slots: dict[tuple[str, int], int] = {}
        self.widths: list[int] = []
        self.steps: dict[tuple[int, int], Step] = {}


def _is_register_or_constant(operand: Operand) -> bool:
    if isinstance(operand, Vec):
        return all(map(_is_register_or_constant, operand.items))
    return isinstance(operand, (Reg, Imm)) or operand == Symbol("_")


@functools.cache
def _op(opcode: str, name: str, parts: tuple[str, ...]) -> Op | None:
    """Return the ``Op`` of an opcode for ``PURE[name]``, or None if ``PURE[name]`` does not support the opcode."""
    operation = PURE[name]
    types = tuple(TYPES[part] for part in parts if part in TYPES)
    mods = frozenset(part for part in parts if part not in TYPES)
    # Most functions support only a single type.
    mixed = len(types) > 1 and "d" not in (operation.out, *operation.ins)
    return None if mods - operation.mods or not types or mixed else Op(opcode, mods, types)


class Decoder:
    """Decoder for one machine. Constants of the launch, such as addresses, become part of the steps."""

    def __init__(self, machine: Machine):
        self.machine = machine
        if machine.program.decoded is None:
            machine.program.decoded = Decoded()
        self.decoded: Decoded = machine.program.decoded
        self.widths = self.decoded.widths
        self.reads: list[int] = []
        self.shared_symbols: dict[int, Array] = {}

    def decode(self, instruction: Instruction) -> Step:
        """Decode an instruction into a step. Raise NotImplementedError if the instruction is unknown."""
        key = instruction.line, id(instruction.statement)
        step = self.decoded.steps.get(key)
        if step is None:
            step = self._decode(instruction)
            name = instruction.opcode.split(".")[0]
            if (name in PURE or name == "mov") and all(map(_is_register_or_constant, instruction.operands)):
                step.simple = step.guard is None
                self.decoded.steps[key] = step  # the entry also keeps the statement alive, so that its id stays unique
        return step

    def _decode(self, instruction: Instruction) -> Step:
        self.reads = []
        parts = instruction.opcode.split(".")
        step = None
        for count in range(len(parts), 0, -1):
            name = ".".join(parts[:count])
            if name in EFFECTS:
                step = EFFECTS[name](self, instruction, parts[count:])
                break
            if name in PURE:
                step = self._pure(instruction, name, parts[count:])
                break
        if step is None:
            raise unknown(instruction)
        if instruction.guard is not None:
            step.guard = Guard(self._slot(instruction.guard), instruction.guard.negated)
            self.reads.append(step.guard.slot)
        step.reads = self.reads
        step.values = [source.value for source in step.sources]
        return step

    def end(self) -> Step:
        """Return the step after the last instruction. The step ends a thread."""
        return Step(
            Instruction("exit", [], None, "end of the kernel", 0),
            [],
            [],
            lambda threads: None,
            "exit",
            undefined="pass",
        )

    def _slot(self, register: Reg) -> int:
        key = register.name, register.width
        slots = self.decoded.slots
        if key not in slots:
            slots[key] = len(self.widths)
            self.widths.append(register.width)
        return slots[key]

    def _pure(self, instruction: Instruction, name: str, parts: list[str]) -> Step:
        op = _op(instruction.opcode, name, tuple(parts))
        if op is None:
            raise unknown(instruction)
        operation = PURE[name]
        first, *rest = instruction.operands
        result = type_of(op, operation.out)
        pair = isinstance(first, Vec)
        targets = [self.target(one, result) for one in (first.items if pair else (first,))]
        sources = []
        for i, operand in enumerate(rest):
            sources.append(self.source(operand, type_of(op, operation.ins[min(i, len(operation.ins) - 1)])))
        function = operation.function

        def run(threads: Array, *values: Array) -> tuple[Array, ...]:
            value = function(op, *values)
            return (value, ~value) if pair else (value,)

        undefined: Any = {"selp": "select", "and": "and", "or": "or"}.get(name, "pass")
        return Step(instruction, sources, targets, run, undefined=undefined)

    # Operands

    def target(self, operand: Operand, type: Type) -> Target | None:
        if isinstance(operand, Symbol) and operand.name == "_":
            return None
        if not isinstance(operand, Reg):
            raise NotImplementedError(f"target {operand}")
        return Target(self._slot(operand), operand.width, type.is_signed)

    def source(self, operand: Operand, type: Type) -> Source:
        """Return a source that reads an operand as an array of ``type``, with one element per thread, or with one
        element for all threads."""
        if isinstance(operand, Reg):
            return self._register(operand, type)
        if isinstance(operand, Symbol) and operand.name in self.machine.symbols:
            space, address = self.machine.symbols[operand.name]
            if space == "shared" and self.machine.cluster_ctas > 1:
                return self._shared_symbol(address, type)
            operand = Imm(address)
        if not isinstance(operand, Imm):
            raise NotImplementedError(f"operand {operand}")
        value = self._constant(operand, type)
        return Source(None, lambda values: value)

    def _shared_symbol(self, offset: int, type: Type) -> Source:
        """Return a source for the address of a symbol in the thread's own CTA of a cluster. The address is in a
        read-only register."""
        slot = self._slot(Reg(f"%shared+{offset}.{type.bits}", type.bits))
        address = (self.machine.rank.astype(np.int64) << RANK_SHIFT) + offset
        self.shared_symbols[slot] = address.astype(UNSIGNED[type.bits])
        self.reads.append(slot)
        return Source(slot, lambda values: values[slot].view(type.dtype))

    def _constant(self, operand: Imm, type: Type) -> Array:
        if type.name == "pred":
            return np.array([bool(operand.value)])
        bits = operand.value
        if operand.float_width == 64 and type.name == "f32":
            return np.array([bits], np.uint64).view(np.float64).astype(np.float32)
        if operand.float_width and operand.float_width != type.bits:
            raise NotImplementedError(f"{operand} as {type.name}")
        if not operand.float_width and type.name in ("f32", "f64"):
            raise NotImplementedError(f"{operand} as {type.name}")
        raw = np.array([bits % (1 << type.bits)], dtype=np.uint64).astype(UNSIGNED[type.bits])
        return raw.view(type.dtype)

    def _register(self, operand: Reg, type: Type) -> Source:
        slot = self._slot(operand)
        self.reads.append(slot)
        if type.name == "pred" or operand.width == 1:
            if (type.name == "pred") != (operand.width == 1):
                raise NotImplementedError(f"{operand} as {type.name}")
            return Source(slot, (lambda values: ~values[slot]) if operand.negated else (lambda values: values[slot]))
        if operand.width == type.bits:
            dtype = type.dtype
            if dtype == UNSIGNED[type.bits]:
                return Source(slot, lambda values: values[slot])
            return Source(slot, lambda values: values[slot].view(dtype))
        if operand.width > type.bits:
            return Source(slot, lambda values: values[slot].astype(UNSIGNED[type.bits]).view(type.dtype))
        raise NotImplementedError(f"{operand} as {type.name}")

    def address(self, operand: Operand) -> Source:
        """Return a source that reads an operand as int64 addresses."""
        if not isinstance(operand, Mem):
            raise NotImplementedError(f"address {operand}")
        offset = np.int64(operand.offset)
        if isinstance(operand.base, Reg):
            type = TYPES["u32" if operand.base.width == 32 else "u64"]
            base = self.source(operand.base, type)
            mask = np.int64(0xFFFFFFFF if type.bits == 32 else -1)
            return Source(base.slot, lambda values: (base(values).astype(np.int64) + offset) & mask)
        base = self.source(operand.base, TYPES["u64"])
        if base.slot is not None:
            return Source(base.slot, lambda values: base(values).astype(np.int64) + offset)
        value = base({}).astype(np.int64) + offset
        return Source(None, lambda values: value)


def unknown(instruction: Instruction) -> NotImplementedError:
    return NotImplementedError(f"no model of {instruction}")


def modifiers(instruction: Instruction, parts: list[str], known: str) -> tuple[set[str], list[Type]]:
    """Split the parts of an opcode into modifiers and types. Raise NotImplementedError for a modifier that is not in
    ``known``."""
    types = [TYPES[part] for part in parts if part in TYPES]
    mods = {part for part in parts if part not in TYPES}
    if mods - set(known.split()) - IGNORED:
        raise unknown(instruction)
    return mods, types


def acts(ins: Instruction, sources: list[Source], act: Callable[..., None]) -> Step:
    """Return a step without results, which calls ``act(threads, *sources)``."""

    def run(threads: Array, *values: Array) -> tuple:
        act(threads, *values)
        return ()

    return Step(ins, sources, [], run)


def nothing(threads: Array, *sources: Array) -> tuple:
    return ()
