"""Instructions that the lanes of a warp execute together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.decoder import Decoder, Source, Step, effect, modifiers, nothing
from ptx_emulator.memory import EmulationError, Fault
from ptx_emulator.parser import Instruction, Operand, Symbol, Vec
from ptx_emulator.values import TYPES, UNSIGNED, Array, distinct, of_each, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


def warp_step(d: Decoder, ins: Instruction, sources: list[Source], targets: list, run: Callable, mask: Operand) -> Step:
    """Return a step that runs when all lanes of ``mask`` have arrived."""
    return Step(ins, sources, targets, run, "warp", d.source(mask, TYPES["u32"]))


@effect("bar.warp.sync barrier.warp.sync")
def _bar_warp(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return warp_step(d, ins, [], [], nothing, ins.operands[0])


@effect("shfl.sync")
def _shfl(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (mode,), _ = modifiers(ins, parts, "up down bfly idx")
    first, a, b, c, mask = ins.operands
    value, valid = first.items if isinstance(first, Vec) else (first, Symbol("_"))
    machine = d.machine
    b32, u32 = TYPES["b32"], TYPES["u32"]

    def run(threads: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        a, b, c = (of_each(x, threads).astype(np.int64) for x in (a, b, c))
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
        absent = positions(~there[other])
        if len(absent):
            raise Fault(EmulationError, absent[0], f"reads lane {source[absent[0]]}, which takes no part")
        return a[machine.position[other]].astype(np.uint32), inside

    sources = [d.source(a, b32), d.source(b, u32), d.source(c, u32)]
    step = warp_step(d, ins, sources, [d.target(value, b32), d.target(valid, TYPES["pred"])], run, mask)
    step.undefined = "shuffle"
    return step


def _per_warp(machine: Machine, threads: Array, function: Callable[[Array], Any], dtype: Any) -> Array:
    """Call ``function`` for each warp, with the positions of the warp's threads in ``threads`` as its argument."""
    result = np.zeros(len(threads), dtype)
    for warp in distinct(machine.warp[threads]):
        at = positions(machine.warp[threads] == warp)
        result[at] = function(at)
    return result


@effect("vote.sync")
def _vote(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (mode,), (type,) = modifiers(ins, parts, "all any uni ballot")
    target, value, mask = ins.operands
    machine = d.machine

    def run(threads: Array, value: Array) -> tuple[Array]:
        value = of_each(value, threads)

        def ballot(at: Array) -> int:
            return int((value[at].astype(np.int64) << machine.lane[threads[at]]).sum())

        functions = {
            "all": lambda at: value[at].all(),
            "any": lambda at: value[at].any(),
            "uni": lambda at: value[at].all() or not value[at].any(),
            "ballot": ballot,
        }
        return (_per_warp(machine, threads, functions[mode], UNSIGNED[type.bits]),)

    return warp_step(d, ins, [d.source(value, TYPES["pred"])], [d.target(target, type)], run, mask)


@effect("redux.sync")
def _redux(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    (mode,), (type,) = modifiers(ins, parts, "add min max and or xor")
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
        value = of_each(value, threads)
        return (_per_warp(machine, threads, lambda at: functions[mode].reduce(value[at]), type.dtype),)

    return warp_step(d, ins, [d.source(value, type)], [d.target(target, type)], run, mask)


@effect("elect.sync")
def _elect(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode ``elect.sync``. The emulator always elects the lowest lane."""
    first, mask = ins.operands
    lane, elected = first.items
    machine = d.machine

    def run(threads: Array) -> tuple[Array, Array]:
        lowest = _per_warp(machine, threads, lambda at: machine.lane[threads[at]].min(), np.uint32)
        return lowest, machine.lane[threads] == lowest

    return warp_step(d, ins, [], [d.target(lane, TYPES["b32"]), d.target(elected, TYPES["pred"])], run, mask)
