"""Instructions to steps: arithmetic from ``arithmetic.PURE``, everything else from the functions here.

To add an instruction that only computes, add a function to ``arithmetic``. Otherwise add one here under ``effect``: it
gets a ``Decoder``, the ``Instruction`` and its modifiers, and returns a ``Step``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ptx.arithmetic import (
    IGNORED,
    PURE,
    TINY,
    TYPES,
    UNSIGNED,
    Array,
    Op,
    Type,
    canonical,
    flush,
    from_bf16,
    type_of,
)
from ptx.memory import (
    LOCAL_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WRITTEN,
    EmulationError,
    Fault,
    Misaligned,
    OutOfBounds,
    Uninitialised,
)
from ptx.parser import Imm, Instruction, Mem, Operand, Reg, Symbol, Vec

if TYPE_CHECKING:
    from ptx.machine import Machine


@dataclass
class Source:
    """An operand: the register that it is from, if any, and how its array is had from all registers'."""

    slot: int | None
    value: Callable[[dict[int, Array]], Array]

    def __call__(self, values: dict[int, Array]) -> Array:
        return self.value(values)


@dataclass
class Target:
    """A register that a result goes to."""

    slot: int
    width: int
    signed: bool

    def store(self, value: Array) -> Array:
        """The register's bits."""
        if self.width == 1:
            return value
        bits = 8 * value.dtype.itemsize
        if bits == self.width:
            return value.view(UNSIGNED[bits])
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

    ``kind``: ``warp`` steps run when all lanes of ``mask`` are there; ``block`` steps return which threads may go on.
    ``run(threads, *sources)`` returns one array for each target. ``undefined``: what is done about sources that come
    from memory that nobody wrote; ``load`` and ``store`` must know their address, and a store to global memory what it
    stores. ``orders``: of a ``warp`` step, whether lanes that met there know what the others did; see ``Machine``.
    ``load``: the number of a load that may be from shared memory; ``needs``: of those whose results the step needs.
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


Effect = Callable[["Decoder", Instruction, list[str]], Step]
EFFECTS: dict[str, Effect] = {}


def effect(names: str) -> Callable[[Effect], Effect]:
    def enter(function: Effect) -> Effect:
        for name in names.split():
            EFFECTS[name] = function
        return function

    return enter


class Decoder:
    """Decodes for one machine: constants are in the steps."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.slots: dict[str, int] = {}
        self.widths: list[int] = []
        self.reads: list[int] = []

    def decode(self, instruction: Instruction) -> Step:
        """Raises NotImplementedError for what is unknown."""
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
        """What is behind the last instruction."""
        return Step(
            Instruction("exit", [], None, "end of the kernel", 0),
            [],
            [],
            lambda threads: None,
            "exit",
            undefined="pass",
        )

    def _slot(self, register: Reg) -> int:
        if register.name not in self.slots:
            self.slots[register.name] = len(self.widths)
            self.widths.append(register.width)
        return self.slots[register.name]

    def _pure(self, instruction: Instruction, name: str, parts: list[str]) -> Step:
        operation = PURE[name]
        types = tuple(TYPES[part] for part in parts if part in TYPES)
        mods = frozenset(part for part in parts if part not in TYPES)
        # Most functions know a single type.
        mixed = len(types) > 1 and "d" not in (operation.out, *operation.ins)
        if mods - operation.mods or not types or mixed:
            raise unknown(instruction)
        op = Op(instruction.opcode, mods, types)
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
        """Arrays of ``type``, with one element a thread or a single one."""
        if isinstance(operand, Reg):
            return self._register(operand, type)
        if isinstance(operand, Symbol) and operand.name in self.machine.symbols:
            operand = Imm(self.machine.symbols[operand.name][1])
        if not isinstance(operand, Imm):
            raise NotImplementedError(f"operand {operand}")
        value = self._constant(operand, type)
        return Source(None, lambda values: value)

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
        """Addresses as int64."""
        if not isinstance(operand, Mem):
            raise NotImplementedError(f"address {operand}")
        offset = np.int64(operand.offset)
        if isinstance(operand.base, Reg):
            type = TYPES["u32" if operand.base.width == 32 else "u64"]
            base = self.source(operand.base, type)
            mask = np.int64(0xFFFFFFFF if type.bits == 32 else -1)
            return Source(base.slot, lambda values: (base(values).astype(np.int64) + offset) & mask)
        base = self.source(operand.base, TYPES["u64"])
        value = base({}).astype(np.int64) + offset
        return Source(None, lambda values: value)


def unknown(instruction: Instruction) -> NotImplementedError:
    return NotImplementedError(f"no model of {instruction}")


def _parts(instruction: Instruction, parts: list[str], known: str) -> tuple[set[str], list[Type]]:
    """Modifiers and types; a modifier that is not known makes the instruction unknown."""
    types = [TYPES[part] for part in parts if part in TYPES]
    mods = {part for part in parts if part not in TYPES}
    if mods - set(known.split()) - IGNORED:
        raise unknown(instruction)
    return mods, types


def _acts(ins: Instruction, sources: list[Source], act: Callable[..., None]) -> Step:
    """A step without results: ``act(threads, *sources)``."""

    def run(threads: Array, *values: Array) -> tuple:
        act(threads, *values)
        return ()

    return Step(ins, sources, [], run)


def _nothing(threads: Array, *sources: Array) -> tuple:
    return ()


# Moves


@effect("mov")
def _mov(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (type,) = (TYPES[part] for part in parts)
    target, source = ins.operands
    if isinstance(target, Vec):
        return _unpack(d, ins, type, target, source)
    if isinstance(source, Vec):
        return _pack(d, ins, type, target, source)
    if isinstance(source, Symbol) and source.name.startswith("%"):
        value = special_register(d.machine, source.name)
        if value is None:
            raise unknown(ins)
        dtype = UNSIGNED[type.bits]
        return Step(ins, [], [d.target(target, type)], lambda threads: (value[threads].astype(dtype),))
    return Step(
        ins, [d.source(source, type)], [d.target(target, type)], lambda threads, value: (value,), undefined="pass"
    )


def _unpack(d: Decoder, ins: Instruction, type: Type, target: Vec, source: Operand) -> Step:
    width = type.bits // len(target.items)
    part = TYPES[f"b{width}"]

    def run(threads: Array, value: Array) -> list[Array]:
        dtype = value.dtype.type
        return [(value >> dtype(width * i)).astype(part.dtype) for i in range(len(target.items))]

    return Step(ins, [d.source(source, type)], [d.target(item, part) for item in target.items], run, undefined="pass")


def _pack(d: Decoder, ins: Instruction, type: Type, target: Operand, source: Vec) -> Step:
    width = type.bits // len(source.items)
    part = TYPES[f"b{width}"]

    def run(threads: Array, *values: Array) -> tuple[Array]:
        result = values[0].astype(type.dtype)
        for i, value in enumerate(values[1:], 1):
            result = result | (value.astype(type.dtype) << type.dtype.type(width * i))
        return (result,)

    return Step(ins, [d.source(item, part) for item in source.items], [d.target(target, type)], run, undefined="pass")


def special_register(m: Machine, name: str) -> Array | None:
    """The value in each thread."""
    base, _, axis = name[1:].partition(".")
    if axis:
        i = "xyz".index(axis)
        per_thread = {"tid": m.tid3, "ctaid": m.ctaid, "cluster_ctaid": m.cluster_ctaid, "clusterid": m.clusterid}
        uniform = {
            "ntid": m.launch.block,
            "nctaid": m.launch.grid,
            "cluster_nctaid": m.launch.cluster,
            "nclusterid": m.nclusterid,
        }
        if base in per_thread:
            return per_thread[base][i]
        return np.full(m.threads, uniform[base][i]) if base in uniform else None
    values = {"laneid": m.lane, "warpid": m.tid // 32, "cluster_ctarank": m.rank}
    for kind, compare in (("eq", np.equal), ("lt", np.less), ("le", np.less_equal), ("gt", np.greater)):
        lanes = np.array([sum(1 << j for j in range(32) if compare(j, i)) for i in range(32)])
        values[f"lanemask_{kind}"] = lanes[m.lane]
    constants = {
        "nwarpid": -(-m.cta_threads // 32),
        "cluster_nctarank": m.cluster_ctas,
        "dynamic_smem_size": m.launch.dynamic_shared,
        "total_smem_size": m.shared_bytes,
        "is_explicit_cluster": m.cluster_ctas > 1,
    }
    if base in constants:
        return np.full(m.threads, constants[base])
    return values.get(base)


# Control


@effect("bra")
def _bra(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [], _nothing, "branch", target=ins.operands[0].value, undefined="pass")


@effect("ret exit")
def _exit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [], lambda threads: None, "exit", undefined="pass")


@effect("trap")
def _trap(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    def run(threads: Array) -> tuple:
        raise Fault(EmulationError, 0, "trap")

    return Step(ins, [], [], run)


@effect(
    "griddepcontrol.wait griddepcontrol.launch_dependents fence membar prefetch prefetchu nanosleep setmaxnreg"
    " cp.async.bulk.prefetch discard applypriority pragma wgmma.fence"
)
def _no_effect(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [], _nothing)


@effect("fence.proxy.async")
def _fence_proxy_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, "global shared::cta shared::cluster")
    machine = d.machine

    def run(threads: Array) -> tuple:
        if parts != ["global"]:
            machine.races.fence(threads)
        return ()

    return Step(ins, [], [], run)


@effect("createpolicy")
def _createpolicy(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [d.target(ins.operands[0], TYPES["b64"])], lambda threads: (np.zeros(1, np.uint64),))


# Loads and stores

_ACCESS = (
    "volatile relaxed acquire release gpu cta sys cluster nc v2 v4 v8 weak L1::no_allocate L1::evict_last"
    " L1::evict_first L1::evict_normal L1::evict_unchanged L2::64B L2::128B L2::256B L2::evict_first L2::evict_last"
    " L2::cache_hint ca cg cs cv wb wt lu"
)
SPACES = ("shared", "shared::cta", "shared::cluster", "global", "local", "const", "param")


def _space(parts: list[str]) -> tuple[str, list[str]]:
    found = [part for part in parts if part in SPACES or part == "param::entry"]
    space = found[0] if found else ""
    rest = [part for part in parts if part not in found]
    return {"const": "global", "param::entry": "param"}.get(space, space), rest


@effect("ld ldu")
def _ld(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, parts = _space(parts)
    _, (type,) = _parts(ins, parts, _ACCESS)
    first = ins.operands[0]
    items = first.items if isinstance(first, Vec) else (first,)
    width = type.bits // 8
    targets = [d.target(item, type) for item in items]
    if space == "param":
        return _ld_param(d, ins, targets, width, len(items))
    machine, count = d.machine, len(items)

    def run(threads: Array, address: Array) -> list[Array]:
        return machine.load(space, threads, address, width, count)

    return Step(ins, [d.address(ins.operands[1])], targets, run, undefined="load")


def _ld_param(d: Decoder, ins: Instruction, targets: list[Target | None], width: int, count: int) -> Step:
    memory = ins.operands[1]
    param = d.machine.params[memory.base.name]
    if memory.offset < 0 or memory.offset + width * count > len(param) or memory.offset % (width * count):
        raise OutOfBounds(f"parameter of {len(param)} bytes: {ins}")
    values = [np.frombuffer(param, UNSIGNED[8 * width], 1, memory.offset + i * width) for i in range(count)]
    return Step(ins, [], targets, lambda threads: values)


@effect("st")
def _st(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, parts = _space(parts)
    _, (type,) = _parts(ins, parts, _ACCESS)
    value = ins.operands[1]
    items = value.items if isinstance(value, Vec) else (value,)
    bits = TYPES[f"b{type.bits}"]
    machine, width = d.machine, type.bits // 8
    sources = [d.source(item, type if isinstance(item, Imm) else bits) for item in items]

    def run(threads: Array, address: Array, *values: Array) -> tuple:
        machine.store(space, threads, address, width, [value.view(bits.dtype) for value in values])
        return ()

    return Step(ins, [d.address(ins.operands[0]), *sources], [], run, undefined="store")


_ATOMIC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda old, a, b: old + a,
    "min": lambda old, a, b: min(old, a),
    "max": lambda old, a, b: max(old, a),
    "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a,
    "xor": lambda old, a, b: old ^ a,
    "exch": lambda old, a, b: a,
    "cas": lambda old, a, b: b if old == a else old,
    "inc": lambda old, a, b: type(old)(0) if old >= a else old + type(old)(1),
}


def _atomic_sum(a: np.float32, b: np.float32, flushes: bool) -> np.float32:
    total = flush(flush(a) + flush(b)) if flushes else a + b
    return canonical(np.float32([total]))[0]


@effect("atom red")
def _atom(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """One thread after the other, in an order that is not random. Sums of fp32 in global memory flush subnormals."""
    space, parts = _space(parts)
    mods, (type,) = _parts(ins, parts, _ACCESS + " acq_rel " + " ".join(_ATOMIC))
    (name,) = mods & set(_ATOMIC)
    reduces = ins.opcode.startswith("red")
    operands = list(ins.operands)
    targets = [] if reduces else [d.target(operands.pop(0), type)]
    bits = TYPES[f"b{type.bits}"].dtype
    function, machine = _ATOMIC[name], d.machine

    def run(threads: Array, address: Array, a: Array, b: Array | None = None) -> tuple:
        address, a = np.broadcast_to(address, len(threads)), np.broadcast_to(a, len(threads))
        old = np.zeros(len(threads), type.dtype)
        for i in range(len(threads)):
            one = threads[i : i + 1]
            ((_, memory, bank, offset),) = machine.places(space, one, address[i : i + 1])
            try:
                (value,), unwritten = memory.load(bank, offset, type.bits // 8, 1)
                if unwritten is not None:
                    raise Fault(Uninitialised, 0, f"{memory.name} offset {offset[0]:#x}")
                old[i] = value.view(type.dtype)[0]
                if type.name == "f32" and name == "add":
                    new = _atomic_sum(old[i], a[i], memory is not machine.shared)
                else:
                    new = function(old[i], a[i], None if b is None else b[min(i, len(b) - 1)])
                memory.store(bank, offset, type.bits // 8, [np.array([new], type.dtype).view(bits)])
            except Fault as fault:
                fault.position = i
                raise
        return () if reduces else (old,)

    return Step(ins, [d.address(operands[0]), *(d.source(x, type) for x in operands[1:])], targets, run)


# Addresses


@effect("cvta")
def _cvta(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, rest = _space(parts)
    mods, (type,) = _parts(ins, rest, "to")
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space.split("::")[0], 0)
    delta = np.uint64((-window if "to" in mods else window) % (1 << 64))
    source = d.source(ins.operands[1], type)
    return Step(ins, [source], [d.target(ins.operands[0], type)], lambda threads, value: (value + delta,))


@effect("mapa")
def _mapa(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, rest = _space(parts)
    _, (type,) = _parts(ins, rest, "")
    window = 0 if space else SHARED_WINDOW

    def run(threads: Array, address: Array, rank: Array) -> tuple:
        # Compilers compute addresses before they know whether there is such a CTA: only accesses check the rank.
        number = np.minimum(rank, 254).astype(np.int64) + 1
        offset = (address.astype(np.int64) - window) & ((1 << RANK_SHIFT) - 1)
        return (((number << RANK_SHIFT) + offset + window).astype(type.dtype),)

    sources = [d.source(ins.operands[1], type), d.source(ins.operands[2], TYPES["u32"])]
    return Step(ins, sources, [d.target(ins.operands[0], type)], run)


# Warps


def _warp_step(
    d: Decoder, ins: Instruction, sources: list[Source], targets: list, run: Callable, mask: Operand
) -> Step:
    return Step(ins, sources, targets, run, "warp", d.source(mask, TYPES["u32"]))


@effect("bar.warp.sync barrier.warp.sync")
def _bar_warp(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return _warp_step(d, ins, [], [], _nothing, ins.operands[0])


@effect("shfl.sync")
def _shfl(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (mode,), _ = _parts(ins, parts, "up down bfly idx")
    first, a, b, c, mask = ins.operands
    value, valid = first.items if isinstance(first, Vec) else (first, Symbol("_"))
    machine = d.machine
    b32, u32 = TYPES["b32"], TYPES["u32"]

    def run(threads: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        a, b, c = (np.broadcast_to(x, len(threads)).astype(np.int64) for x in (a, b, c))
        lane = machine.lane[threads]
        clamp, segment = c & 31, c >> 8 & 31
        most = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            source = lane - (b & 31)
            inside = source >= most
        else:
            base = (lane & segment) | (b & ~segment & 31)
            source = {"down": lane + (b & 31), "bfly": lane ^ (b & 31), "idx": base}[mode]
            inside = source <= most
        source = np.where(inside, source, lane)
        machine.position[threads] = np.arange(len(threads))
        other = machine.warp_first[threads] + source
        there = np.zeros(machine.threads + 32, bool)
        there[threads] = True
        absent = np.flatnonzero(~there[other])
        if len(absent):
            raise Fault(EmulationError, absent[0], f"reads lane {source[absent[0]]}, which takes no part")
        return a[machine.position[other]].astype(np.uint32), inside

    sources = [d.source(a, b32), d.source(b, u32), d.source(c, u32)]
    step = _warp_step(d, ins, sources, [d.target(value, b32), d.target(valid, TYPES["pred"])], run, mask)
    step.undefined = "shuffle"
    return step


def _per_warp(machine: Machine, threads: Array, function: Callable[[Array], Any], dtype: Any) -> Array:
    """``function`` of the positions of each warp's threads."""
    result = np.zeros(len(threads), dtype)
    for warp in np.unique(machine.warp[threads]):
        at = np.flatnonzero(machine.warp[threads] == warp)
        result[at] = function(at)
    return result


@effect("vote.sync")
def _vote(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (mode,), (type,) = _parts(ins, parts, "all any uni ballot")
    target, value, mask = ins.operands
    machine = d.machine

    def run(threads: Array, value: Array) -> tuple[Array]:
        value = np.broadcast_to(value, len(threads))

        def ballot(at: Array) -> int:
            return int((value[at].astype(np.int64) << machine.lane[threads[at]]).sum())

        functions = {
            "all": lambda at: value[at].all(),
            "any": lambda at: value[at].any(),
            "uni": lambda at: value[at].all() or not value[at].any(),
            "ballot": ballot,
        }
        return (_per_warp(machine, threads, functions[mode], UNSIGNED[type.bits]),)

    return _warp_step(d, ins, [d.source(value, TYPES["pred"])], [d.target(target, type)], run, mask)


@effect("redux.sync")
def _redux(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (mode,), (type,) = _parts(ins, parts, "add min max and or xor")
    functions = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    target, value, mask = ins.operands
    machine = d.machine

    def run(threads: Array, value: Array) -> tuple[Array]:
        value = np.broadcast_to(value, len(threads))
        return (_per_warp(machine, threads, lambda at: functions[mode].reduce(value[at]), type.dtype),)

    return _warp_step(d, ins, [d.source(value, type)], [d.target(target, type)], run, mask)


@effect("elect.sync")
def _elect(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """The lowest lane."""
    first, mask = ins.operands
    lane, elected = first.items
    machine = d.machine

    def run(threads: Array) -> tuple[Array, Array]:
        lowest = _per_warp(machine, threads, lambda at: machine.lane[threads[at]].min(), np.uint32)
        return lowest, machine.lane[threads] == lowest

    return _warp_step(d, ins, [], [d.target(lane, TYPES["b32"]), d.target(elected, TYPES["pred"])], run, mask)


# Matrices


def _whole_warps(machine: Machine, threads: Array) -> int:
    """How many warps; each must have all lanes."""
    partial = np.flatnonzero(machine.warp_mask[threads] != 0xFFFFFFFF)
    if len(partial):
        raise Fault(EmulationError, partial[0], "a warp of fewer than 32 threads")
    return len(threads) // 32


def _matrix_step(
    d: Decoder, ins: Instruction, sources: list[Source], targets: list, run: Callable, undefined: Any
) -> Step:
    """All lanes take part, but do not learn what others stored."""
    step = _warp_step(d, ins, sources, targets, run, Imm(-1))
    step.undefined, step.orders = undefined, False
    return step


@effect("ldmatrix.sync.aligned")
def _ldmatrix(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, rest = _space(parts)
    mods, types = _parts(ins, rest, "m8n8 x1 x2 x4 trans")
    first = ins.operands[0]
    items = first.items if isinstance(first, Vec) else (first,)
    count = len(items)
    if types != [TYPES["b16"]] or not {"m8n8", f"x{count}"} <= mods:
        raise unknown(ins)
    machine = d.machine

    def run(threads: Array, address: Array) -> list[Array]:
        warps = _whole_warps(machine, threads)

        def spread(words: list[Array]) -> list[Array]:
            """Lane 4 i + j gets word j of row i, or of column i, of each matrix."""
            rows = np.stack(words, -1).reshape(warps, count, 8, 4)
            if "trans" in mods:
                rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
            return [rows[:, i].reshape(-1) for i in range(count)]

        # Lane 8 i + j has the address of row j of matrix i.
        at = np.flatnonzero(machine.lane[threads] < 8 * count)
        address = np.broadcast_to(address, len(threads))[at]
        words = machine.checked(at, machine.load, space, threads[at], address, 4, 4)
        if machine.unwritten is not None:
            marks = [np.where(which, np.uint32(0xFFFFFFFF), np.uint32(0)) for which in machine.unwritten]
            machine.unwritten = [mark != 0 for mark in spread(marks)]
        return spread(words)

    targets = [d.target(item, TYPES["b32"]) for item in items]
    return _matrix_step(d, ins, [d.address(ins.operands[1])], targets, run, "load")


def _numbers(kind: str, words: Array) -> Array:
    """The numbers that words hold: a last axis for the two halves of each, or the four bytes."""
    words = np.ascontiguousarray(words)[..., None]
    if kind == "e4m3":
        return TINY["e4m3x2"].decode(words.view(np.uint8)).astype(np.float64)
    halves = words.view(np.uint16)
    return (halves.view(np.float16) if kind == "f16" else from_bf16(halves)).astype(np.float64)


# Registers of products have the axes: register, warp, g, t; lane 4 g + t has the t-th neighbours of a row g of A, and
# of the sums, then of row g + 8, then of the next columns: 8, or 16 of bytes.


def _rows(kind: str, words: Array) -> Array:
    """A, (warps, 16, k), of its registers."""
    blocks, warps = len(words) // 2, words.shape[1]
    numbers = _numbers(kind, words).reshape(blocks, 2, warps, 8, 4, -1)
    return numbers.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, -1)


def _sums(words: Array) -> Array:
    """C, (warps, 16, columns), of its registers."""
    blocks, warps = len(words) // 4, words.shape[1]
    numbers = np.ascontiguousarray(words).view(np.float32).reshape(blocks, 2, 2, warps, 8, 4)
    return numbers.transpose(3, 1, 4, 0, 5, 2).reshape(warps, 16, 8 * blocks)


def _registers(sums: Array) -> Array:
    """The registers of sums, rounded to float32."""
    warps, _, columns = sums.shape
    rounded = canonical(sums.astype(np.float32)).reshape(warps, 2, 8, columns // 8, 4, 2)
    return rounded.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, 32 * warps)


_MMA = {f"m16n8k{k}.row.col.f32.{half}.{half}.f32": (k, half) for k in (8, 16) for half in ("f16", "bf16")}
_MMA |= {f"m16n8k{k}.row.col.f32.e4m3.e4m3.f32": (k, "e4m3") for k in (16, 32)}


@effect("mma.sync.aligned")
def _mma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """``A @ B + C``. Lane 4 g + t holds neighbours 2 t and 2 t + 1, or of bytes 4 t and three more: of row g of A and
    C, of column g of B.

    In which order the hardware adds, and how it rounds between, NVIDIA does not say: here the products, which are
    exact, and C are added in float64, and the sum is rounded once.
    """
    if ".".join(parts) not in _MMA:
        raise unknown(ins)
    k, kind = _MMA[".".join(parts)]
    blocks = k // (16 if kind == "e4m3" else 8)
    machine = d.machine

    def run(threads: Array, *registers: Array) -> Array:
        warps = _whole_warps(machine, threads)
        words = np.stack([np.broadcast_to(register, len(threads)) for register in registers])
        # The axes: registers (columns on, 8 rows on), warp, g, t, part of the word.
        words = words.reshape(-1, warps, 8, 4)
        a, b, c = np.split(words, [2 * blocks, 3 * blocks])
        b = _numbers(kind, b).transpose(1, 0, 3, 4, 2).reshape(warps, k, 8)
        return _registers(_rows(kind, a) @ b + _sums(c))

    target, *operands = (operand.items for operand in ins.operands)
    if [len(items) for items in operands] != [2 * blocks, blocks, 4]:
        raise unknown(ins)
    sources = [d.source(item, TYPES["b32"]) for items in operands for item in items]
    return _matrix_step(d, ins, sources, [d.target(item, TYPES["f32"]) for item in target], run, "nan")


_WGMMA = re.compile(r"m64n(\d+)(?:k16\.f32\.(f16|bf16)\.(f16|bf16)|k32\.f32\.(e4m3)\.(e4m3))")


def _operand_rows(descriptor: int, rows: int) -> Array:
    """Addresses in shared memory of 32 bytes of each row, as pieces of 16 bytes: (rows, 2).

    K-major, with the 128-byte swizzle (PTX ISA, "Matrix-descriptor").
    """
    start, pitch = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 != 1:
        raise NotImplementedError(f"an operand without the 128-byte swizzle: {descriptor:#x}")
    row = np.arange(rows)[:, None]
    return _swizzled(start + row // 8 * pitch + row % 8 * 128 + np.array([0, 16]))


def _swizzled(address: Array, bits: int = 3) -> Array:
    """Where a swizzle puts what would lie at these addresses of shared memory: that of 128 bytes, or with fewer bits
    of 64, 32, or none."""
    return address ^ (address >> 7 & (1 << bits) - 1) << 4


@effect("wgmma.mma_async.sync.aligned")
def _wgmma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """A quarter of the product for each of the four warps, each at its time: ``A @ B + D``, or ``A @ B``; A in
    registers or in shared memory.

    The sum is there at once; but the atoms that hold an operand count as being read until the warp has waited for the
    group. That registers are still in use is not noticed.
    """
    match = _WGMMA.fullmatch(".".join(parts))
    target, a, descriptor, predicate, *signs = ins.operands
    if match is None:
        raise unknown(ins)
    columns, kinds = int(match[1]), [kind for kind in match.groups()[1:] if kind]
    in_registers = isinstance(a, Vec)
    # Signs; and of 16 bits, whether operands are transposed: those that have descriptors.
    wanted = [1, 1] + ([] if kinds[0] == "e4m3" else [0] * (1 if in_registers else 2))
    if kinds[0] != kinds[1] or [sign.value for sign in signs] != wanted:
        raise unknown(ins)
    kind = kinds[0]
    a_words = len(a.items) if in_registers else 0
    machine = d.machine

    def operand(thread: int, descriptor: int, rows: int, first: int, count: int) -> Array:
        """``count`` rows of an operand in shared memory from row ``first`` on; the thread stands for its warp."""
        address = _operand_rows(descriptor, rows)[first : first + count].reshape(-1)
        readers = np.full(len(address), thread)
        words = np.stack(machine.load("shared", readers, address.astype(np.uint32), 4, 4), -1)
        machine.product_reads(thread, int(address[0]) & ~1023, count * 128)
        return _numbers(kind, words.reshape(count, 8)).reshape(count, -1)

    def run(threads: Array, accumulates: Array, *registers: Array) -> Array:
        warps = _whole_warps(machine, threads)
        descriptors = [np.broadcast_to(one, len(threads)) for one in registers[: 1 if in_registers else 2]]
        words = np.stack([np.broadcast_to(register, len(threads)) for register in registers[len(descriptors) :]])
        # The axes: registers, warp, g, t.
        words = words.reshape(-1, warps, 8, 4)
        products = np.zeros((warps, 16, columns))
        rows = _rows(kind, words[:a_words]) if in_registers else None
        for warp in range(warps):
            thread = int(threads[32 * warp])
            starts = [int(one[32 * warp]) for one in descriptors]
            if not all(starts):
                # What is asked is how NaN in registers spreads.
                if rows is not None:
                    products[warp] = rows[warp] @ np.zeros((rows.shape[2], columns))
                continue
            if rows is None:
                quarter = int(machine.tid[thread]) // 32 % 4 * 16
                left = operand(thread, starts[0], 64, quarter, 16)
            else:
                left = rows[warp]
            products[warp] = left @ operand(thread, starts[-1], columns, 0, columns).T
        adds = np.broadcast_to(accumulates, len(threads)).reshape(warps, 32)[:, :1, None]
        return _registers(products + np.where(adds, _sums(words[a_words:]), 0.0))

    if len(target.items) != columns // 2 or (in_registers and a_words != 4):
        raise unknown(ins)
    operands = [descriptor] if in_registers else [a, descriptor]
    sources = [
        d.source(predicate, TYPES["pred"]),
        *(d.source(one, TYPES["b64"]) for one in operands),
        *(d.source(item, TYPES["b32"]) for item in (*(a.items if in_registers else ()), *target.items)),
    ]
    return _matrix_step(d, ins, sources, [d.target(item, TYPES["f32"]) for item in target.items], run, "nan")


@effect("wgmma.commit_group.sync.aligned")
def _wgmma_commit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return _acts(ins, [], d.machine.commit_products)


@effect("wgmma.wait_group.sync.aligned")
def _wgmma_wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return _acts(ins, [], partial(d.machine.wait_for_products, most=ins.operands[0].value))


@effect("movmatrix.sync.aligned.m8n8.trans.b16")
def _movmatrix(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Lane 4 i + j has elements 2 j and 2 j + 1 of row i, and gets those of column i."""
    machine = d.machine

    def run(threads: Array, word: Array) -> list[Array]:
        warps = _whole_warps(machine, threads)
        halves = np.ascontiguousarray(np.broadcast_to(word, len(threads))).view(np.uint16).reshape(warps, 8, 8)
        return [np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)]

    target, source = ins.operands
    sources, targets = [d.source(source, TYPES["b32"])], [d.target(target, TYPES["b32"])]
    return _matrix_step(d, ins, sources, targets, run, "shuffle")


# Barriers of a CTA and of a cluster


@effect(
    "bar.sync barrier.sync bar.cta.sync barrier.cta.sync bar.arrive barrier.arrive bar.cta.arrive barrier.cta.arrive"
)
def _bar(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, "aligned")
    waits = ".sync" in ins.opcode
    sources = [d.source(operand, TYPES["u32"]) for operand in ins.operands]
    machine = d.machine

    def run(threads: Array, number: Array, count: Array | None = None) -> Array:
        return machine.arrive(threads, number, count, waits)

    return Step(ins, sources, [], run, "block")


@effect("barrier.cluster.arrive")
def _cluster_arrive(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, "aligned release relaxed")
    return _acts(ins, [], d.machine.cluster_arrive)


@effect("barrier.cluster.wait")
def _cluster_wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, "aligned acquire")
    return Step(ins, [], [], d.machine.cluster_wait, "block")


# mbarriers

_MBARRIER = "b64 shared::cta shared::cluster shared release acquire relaxed cta cluster parity noComplete"


@effect("mbarrier.init")
def _mbarrier_init(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    sources = [d.address(ins.operands[0]), d.source(ins.operands[1], TYPES["u32"])]
    return _acts(ins, sources, d.machine.mbarrier_init)


@effect("mbarrier.inval")
def _mbarrier_inval(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return _acts(ins, [d.address(ins.operands[0])], d.machine.mbarrier_inval)


@effect("mbarrier.arrive mbarrier.arrive.expect_tx mbarrier.expect_tx")
def _mbarrier_arrive(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, _MBARRIER)
    space = next((part for part in parts if part.startswith("shared")), "shared")
    operands = list(ins.operands)
    targets = [] if isinstance(operands[0], Mem) else [d.target(operands.pop(0), TYPES["b64"])]
    amount = d.source(operands[1], TYPES["u32"]) if len(operands) > 1 else d.source(Imm(1), TYPES["u32"])
    expects, arrives = "expect_tx" in ins.opcode, "arrive" in ins.opcode
    machine = d.machine

    def run(threads: Array, address: Array, amount: Array) -> tuple:
        count = 0 if not arrives else 1 if expects else amount
        phases = machine.mbarrier_arrive(space, threads, address, count, amount if expects else 0)
        return (phases,) if targets else ()

    return Step(ins, [d.address(operands[0]), amount], targets, run)


@effect("mbarrier.complete_tx")
def _mbarrier_complete_tx(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, _MBARRIER)
    machine = d.machine

    def run(threads: Array, address: Array, amount: Array) -> tuple:
        ctas, offsets = machine.shared_place("shared::cluster", threads, address)
        for cta, offset, size in zip(ctas, offsets, np.broadcast_to(amount, len(threads)), strict=True):
            machine.mbarrier_complete(int(cta), int(offset), int(size))
        return ()

    return Step(ins, [d.address(ins.operands[0]), d.source(ins.operands[1], TYPES["u32"])], [], run)


@effect("mbarrier.try_wait mbarrier.test_wait")
def _mbarrier_wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    mods, _ = _parts(ins, parts, _MBARRIER)
    parity = "parity" in mods
    blocks = "try_wait" in ins.opcode
    target, address, wanted = ins.operands[:3]
    machine = d.machine

    def run(threads: Array, address: Array, wanted: Array) -> Any:
        done = machine.mbarrier_test(threads, address, wanted, parity, blocks)
        return done if blocks else (done,)

    sources = [d.address(address), d.source(wanted, TYPES["u32" if parity else "b64"])]
    return Step(ins, sources, [d.target(target, TYPES["pred"])], run, "block" if blocks else "plain")


# Asynchronous copies


@effect("cp.async.ca cp.async.cg")
def _cp_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    mods, _ = _parts(ins, parts, "shared shared::cta global L2::64B L2::128B L2::256B L2::cache_hint")
    target, source, size, *rest = ins.operands
    if size.value not in ((16,) if ".cg." in ins.opcode else (4, 8, 16)):
        raise unknown(ins)
    if "L2::cache_hint" in mods:
        rest.pop()
    # How many bytes to read; or a predicate: whether to read none.
    (count,) = rest or (size,)
    ignores = isinstance(count, Reg) and count.width == 1
    m = d.machine

    def run(threads: Array, target: Array, source: Array, count: Array) -> tuple:
        counts = np.where(count, 0, size.value) if ignores else count.astype(np.int64)
        target, source, counts = (np.broadcast_to(x, len(threads)) for x in (target, source, counts))
        m.start_group(threads, _some_cp_async(m, threads, target, source, size.value, counts))
        return ()

    sources = [d.address(target), d.address(source), d.source(count, TYPES["pred" if ignores else "u32"])]
    return Step(ins, sources, [], run)


def _some_cp_async(
    m: Machine, threads: Array, target: Array, source: Array, size: int, counts: Array
) -> Callable[[], None]:
    """Check everything now; copy later, and zeros in place of what is not read."""
    bad = np.flatnonzero((counts > size) | (source % size != 0))
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
    m.races.write(threads, ctas, offsets, size, m.committed[threads])
    # Bytes under way are not there, whatever was there before.
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
        machine.committed[threads] += 1
        return ()

    return Step(ins, [], [], run)


@effect("cp.async.wait_group cp.async.wait_all")
def _wait_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    most = ins.operands[0].value if ins.operands else None
    machine = d.machine
    return Step(ins, [], [], lambda threads: machine.wait_async(threads, most), "block")


@effect("cp.async.bulk")
def _bulk(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    known = "mbarrier::complete_tx::bytes bulk_group L2::cache_hint"
    _parts(ins, parts, known + " " + " ".join(SPACES))
    target, source = parts[:2]
    if target.startswith("shared") and source == "global":
        return _bulk_to_shared(d, ins, target)
    if target == "global" and source.startswith("shared") and "bulk_group" in parts:
        return _bulk_to_global(d, ins)
    raise unknown(ins)


def _bulk_to_shared(d: Decoder, ins: Instruction, space: str) -> Step:
    m = d.machine

    def run(threads: Array, target: Array, source: Array, size: Array, barrier: Array) -> tuple:
        source, size = (np.broadcast_to(x, len(threads)) for x in (source, size))

        def bytes_of(i: int) -> Bytes:
            return int(size[i]), _global_bytes(m, threads[i : i + 1], source[i : i + 1], int(size[i]))

        return _start_to_shared(m, space, threads, target, barrier, bytes_of)

    target, source, size, barrier = ins.operands[:4]
    sources = [d.address(target), d.address(source), d.source(size, TYPES["u32"]), d.address(barrier)]
    return Step(ins, sources, [], run)


Bytes = tuple[int, Callable[[], Array]]
"""How many bytes a copy has, and what reads them when it is executed."""


def _global_bytes(m: Machine, thread: Array, address: Array, size: int) -> Callable[[], Array]:
    """What reads ``size`` bytes of global memory later; they are checked now."""
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
    masks: Array | None = None,
) -> tuple:
    """Start a copy for each of the threads: check everything now, copy later. ``bytes_of(i)``: those of the i-th;
    ``masks``: the ranks of the CTAs that get them, at the same place, and whose barriers count them."""
    target, barrier = (np.broadcast_to(x, len(threads)) for x in (target, barrier))
    ctas, offsets = m.shared_place(space, threads, target)
    barrier_ctas, barriers = m.shared_place(space, threads, barrier)
    for i, thread in enumerate(threads.tolist()):
        cta = int(ctas[i])
        try:
            if barrier_ctas[i] != cta:
                raise Fault(EmulationError, 0, "the mbarrier is in another CTA than the target")
            ctas_of_copy = [cta]
            if masks is not None and masks[i]:
                ctas_of_copy = [int(m.cta_of_rank[m.cluster[thread], rank]) for rank in _bits(int(masks[i]))]
            for one in ctas_of_copy:
                m.start(thread, _one_to_shared(m, thread, one, int(offsets[i]), int(barriers[i]), *bytes_of(i)), (one,))
        except Fault as fault:
            fault.position = i
            raise
    return ()


def _bits(mask: int) -> list[int]:
    """The places of ones."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _one_to_shared(
    m: Machine, thread: int, cta: int, offset: int, barrier: int, size: int, read: Callable[[], Array]
) -> Callable[[], None]:
    here = m.shared.span(cta, offset, size, False)
    agent = m.races.begin(thread)
    m.races.read(np.array([thread]), np.array([cta]), np.array([barrier]), 8)

    def execute() -> None:
        m.shared.data[here] = read()
        m.shared.flags[here] |= WRITTEN
        m.races.copy_writes(agent, cta, offset, size)
        m.races.copy_arrives(agent, ("mbarrier", cta, barrier))
        m.mbarrier_complete(cta, barrier, size)

    # Bytes under way are not there, whatever was there before.
    m.shared.flags[here] &= np.uint8(0xFF ^ WRITTEN)
    return execute


@effect("cp.async.bulk.tensor.2d cp.async.bulk.tensor.3d")
def _tensor_copy(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """A box of one of some matrices of bytes to shared memory; zeros for what is beyond the matrix."""
    known = "shared::cta shared::cluster global tile mbarrier::complete_tx::bytes multicast::cluster L2::cache_hint"
    mods, _ = _parts(ins, parts, known)
    m = d.machine

    def run(threads: Array, target: Array, map: Array, barrier: Array, mask: Array, *coordinates: Array) -> tuple:
        target, map, *coordinates = (np.broadcast_to(x, len(threads)) for x in (target, map, *coordinates))

        def bytes_of(i: int) -> Bytes:
            thread = threads[i : i + 1]
            box = TensorMap(_global_bytes(m, thread, map[i : i + 1], 128)().tobytes())
            return box.size, _box_bytes(m, thread, int(target[i]), box, *(int(x[i]) for x in coordinates))

        return _start_to_shared(m, parts[0], threads, target, barrier, bytes_of, np.broadcast_to(mask, len(threads)))

    target, source, barrier, *rest = ins.operands
    map, *coordinates = source.items
    # Without multicast, zero: to the CTA that the address is of.
    mask = rest[0] if "multicast::cluster" in mods else Imm(0)
    sources = [d.address(target), d.address(map), d.address(barrier), d.source(mask, TYPES["u16"])]
    return Step(ins, [*sources, *(d.source(x, TYPES["s32"]) for x in coordinates)], [], run)


class TensorMap:
    """What the DSL's host code writes for matrices of bytes, one box of one of which is copied. (The format is not
    documented; this is what is seen.)"""

    def __init__(self, data: bytes):
        words = struct.unpack("<32I", data)
        self.address = words[0] | words[1] << 32
        self.pitch, self.matrix_pitch = words[3] * 16, words[4] * 16
        self.width, self.height, self.matrices = words[8] + 1, words[9] + 1, words[10] + 1
        self.box_width, self.box_height = (words[13] >> 24) + 1, (words[14] & 0xFF) + 1
        self.size = self.box_width * self.box_height
        self.swizzle_bits = words[2] >> 13 & 3


def _box_bytes(
    m: Machine, thread: Array, target: int, box: TensorMap, column: int, row: int, matrix: int = 0
) -> Callable[[], Array]:
    """What reads a box later, in the order of shared memory; what is beyond the matrix is zero."""
    if matrix >= box.matrices:
        raise Fault(EmulationError, 0, f"matrix {matrix} of {box.matrices}")
    width, height = min(box.box_width, box.width - column), min(box.box_height, box.height - row)
    start = box.address + matrix * box.matrix_pitch + row * box.pitch + column
    rows = [
        _global_bytes(m, thread, np.array([start + i * box.pitch], np.uint64), width) for i in range(max(height, 0))
    ]
    place = _swizzled(target + np.arange(box.size), box.swizzle_bits)

    def read() -> Array:
        contents = np.zeros((box.box_height, box.box_width), np.uint8)
        for i, part in enumerate(rows):
            contents[i, :width] = part()
        ordered = np.empty(box.size, np.uint8)
        ordered[place - target] = contents.reshape(-1)
        return ordered

    return read


def _bulk_to_global(d: Decoder, ins: Instruction) -> Step:
    m = d.machine

    def run(threads: Array, target: Array, source: Array, size: Array) -> tuple:
        target, source, size = (np.broadcast_to(x, len(threads)) for x in (target, source, size))
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

            m.start(thread, execute, (cta,), reads)
        return ()

    target, source, size = ins.operands[:3]
    return Step(ins, [d.address(target), d.address(source), d.source(size, TYPES["u32"])], [], run)


@effect("cp.async.bulk.commit_group")
def _commit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return _acts(ins, [], d.machine.commit_group)


@effect("cp.async.bulk.wait_group")
def _wait_group(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _parts(ins, parts, "read")
    most = ins.operands[0].value
    machine = d.machine
    return Step(ins, [], [], lambda threads: machine.wait_group(threads, most), "block")


@effect("st.async")
def _st_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    _, (type,) = _parts(ins, parts, "weak shared::cluster mbarrier::complete_tx::bytes v2 v4")
    address, value, barrier = ins.operands
    items = value.items if isinstance(value, Vec) else (value,)
    bits = TYPES[f"b{type.bits}"]
    m, width = d.machine, type.bits // 8

    def run(threads: Array, address: Array, barrier: Array, *values: Array) -> tuple:
        values = [np.broadcast_to(value, len(threads)) for value in values]
        ctas, offsets = m.shared_place("shared::cluster", threads, address)
        barrier_ctas, barriers = m.shared_place("shared::cluster", threads, barrier)
        m.shared.locate(ctas, offsets, width, len(values))
        for i, thread in enumerate(threads.tolist()):
            if barrier_ctas[i] != ctas[i]:
                raise Fault(EmulationError, i, "the mbarrier is in another CTA than the target")
            sent = [value[i : i + 1] for value in values]
            copy = _one_st_async(m, thread, ctas[i : i + 1], offsets[i : i + 1], width, sent, int(barriers[i]))
            m.start(thread, copy, (int(ctas[i]),))
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
        m.races.copy_arrives(agent, ("mbarrier", where, barrier))
        m.mbarrier_complete(where, barrier, size)

    return execute
