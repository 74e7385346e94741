"""Loads, stores, atomics and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.decoder import Decoder, Step, Target, effect, modifiers
from ptx_emulator.memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW, Fault, OutOfBounds, Uninitialised
from ptx_emulator.parser import Imm, Instruction, Vec
from ptx_emulator.values import TYPES, UNSIGNED, Array, canonical, flush, of_each

_ACCESS = (
    "volatile relaxed acquire release gpu cta sys cluster nc v2 v4 v8 weak L1::no_allocate L1::evict_last"
    " L1::evict_first L1::evict_normal L1::evict_unchanged L2::64B L2::128B L2::256B L2::evict_first L2::evict_last"
    " L2::cache_hint ca cg cs cv wb wt lu"
)
SPACES = ("shared", "shared::cta", "shared::cluster", "global", "local", "const", "param")


def split_space(parts: list[str]) -> tuple[str, list[str]]:
    """Split modifiers into the name of a state space and the other modifiers."""
    found = [part for part in parts if part in SPACES or part == "param::entry"]
    space = found[0] if found else ""
    rest = [part for part in parts if part not in found]
    return {"const": "global", "param::entry": "param"}.get(space, space), rest


def _parsed(ins: Instruction, parts: list[str], operand: int) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the state space and the type of a memory access, and the registers or constants of its data operand."""
    space, parts = split_space(parts)
    _, (type,) = modifiers(ins, parts, _ACCESS)
    values = ins.operands[operand]
    return space, type, values.items if isinstance(values, Vec) else (values,)


@effect("ld ldu")
def _ld(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, type, items = _parsed(ins, parts, 0)
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
    space, type, items = _parsed(ins, parts, 1)
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
    """Decode an atomic operation. The threads of an instruction execute the operation in a fixed order. fp32 sums in
    global memory flush subnormals to zero."""
    space, parts = split_space(parts)
    mods, (type,) = modifiers(ins, parts, _ACCESS + " acq_rel " + " ".join(_ATOMIC))
    (name,) = mods & set(_ATOMIC)
    reduces = ins.opcode.startswith("red")
    operands = list(ins.operands)
    targets = [] if reduces else [d.target(operands.pop(0), type)]
    bits = TYPES[f"b{type.bits}"].dtype
    function, machine = _ATOMIC[name], d.machine

    def run(threads: Array, address: Array, a: Array, b: Array | None = None) -> tuple:
        address, a = of_each(address, threads), of_each(a, threads)
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
    space, rest = split_space(parts)
    mods, (type,) = modifiers(ins, rest, "to")
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space.split("::")[0], 0)
    delta = np.uint64((-window if "to" in mods else window) % (1 << 64))
    source = d.source(ins.operands[1], type)
    return Step(ins, [source], [d.target(ins.operands[0], type)], lambda threads, value: (value + delta,))


@effect("mapa")
def _mapa(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, rest = split_space(parts)
    _, (type,) = modifiers(ins, rest, "")
    window = 0 if space else SHARED_WINDOW

    def run(threads: Array, address: Array, rank: Array) -> tuple:
        # Do not check the rank here, because compiled code may compute addresses in CTAs that do not exist. Each memory
        # access checks the rank.
        number = np.minimum(rank, 255).astype(np.int64)
        offset = (address.astype(np.int64) - window) & ((1 << RANK_SHIFT) - 1)
        return (((number << RANK_SHIFT) + offset + window).astype(type.dtype),)

    sources = [d.source(ins.operands[1], type), d.source(ins.operands[2], TYPES["u32"])]
    return Step(ins, sources, [d.target(ins.operands[0], type)], run)
