"""Barriers of a CTA and of a cluster, and mbarriers."""

from __future__ import annotations

from typing import Any

from ptx_emulator.decoder import Decoder, Step, acts, effect, modifiers
from ptx_emulator.parser import Imm, Instruction, Mem
from ptx_emulator.values import TYPES, Array, of_each

# Barriers of a CTA and of a cluster


@effect(
    "bar.sync barrier.sync bar.cta.sync barrier.cta.sync bar.arrive barrier.arrive bar.cta.arrive barrier.cta.arrive"
)
def _bar(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, "aligned")
    waits = ".sync" in ins.opcode
    sources = [d.source(operand, TYPES["u32"]) for operand in ins.operands]
    machine = d.machine

    def run(threads: Array, number: Array, count: Array | None = None) -> Array:
        return machine.barriers.arrive_at_cta(threads, number, count, waits)

    return Step(ins, sources, [], run, "block")


@effect("barrier.cluster.arrive")
def _cluster_arrive(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, "aligned release relaxed")
    return acts(ins, [], d.machine.barriers.arrive_at_cluster)


@effect("barrier.cluster.wait")
def _cluster_wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, "aligned acquire")
    return Step(ins, [], [], d.machine.barriers.wait_for_cluster, "block")


# mbarriers

_MBARRIER = "b64 shared::cta shared::cluster shared release acquire relaxed cta cluster parity noComplete"


def _order(parts: list[str]) -> tuple[bool, bool]:
    """Return two flags of an mbarrier operation: it is relaxed, and its scope is the cluster. The default scope is the
    CTA."""
    return "relaxed" in parts, "cluster" in parts


@effect("mbarrier.init")
def _mbarrier_init(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    sources = [d.address(ins.operands[0]), d.source(ins.operands[1], TYPES["u32"])]
    return acts(ins, sources, d.machine.barriers.init)


@effect("mbarrier.inval")
def _mbarrier_inval(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return acts(ins, [d.address(ins.operands[0])], d.machine.barriers.inval)


@effect("mbarrier.arrive mbarrier.arrive.expect_tx mbarrier.expect_tx")
def _mbarrier_arrive(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, _MBARRIER)
    space = next((part for part in parts if part.startswith("shared")), "shared")
    operands = list(ins.operands)
    targets = [] if isinstance(operands[0], Mem) else [d.target(operands.pop(0), TYPES["b64"])]
    amount = d.source(operands[1], TYPES["u32"]) if len(operands) > 1 else d.source(Imm(1), TYPES["u32"])
    expects, arrives = "expect_tx" in ins.opcode, "arrive" in ins.opcode
    machine, order = d.machine, _order(parts)

    def run(threads: Array, address: Array, amount: Array) -> tuple:
        count = 0 if not arrives else 1 if expects else amount
        phases = machine.barriers.arrive(space, threads, address, count, amount if expects else 0, *order)
        return (phases,) if targets else ()

    return Step(ins, [d.address(operands[0]), amount], targets, run)


@effect("mbarrier.complete_tx")
def _mbarrier_complete_tx(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, _MBARRIER)
    machine = d.machine

    def run(threads: Array, address: Array, amount: Array) -> tuple:
        ctas, offsets = machine.shared_place("shared::cluster", threads, address)
        for cta, offset, size in zip(ctas, offsets, of_each(amount, threads), strict=True):
            machine.barriers.complete(int(cta), int(offset), int(size))
        return ()

    return Step(ins, [d.address(ins.operands[0]), d.source(ins.operands[1], TYPES["u32"])], [], run)


@effect("mbarrier.try_wait mbarrier.test_wait")
def _mbarrier_wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    mods, _ = modifiers(ins, parts, _MBARRIER)
    parity = "parity" in mods
    blocks = "try_wait" in ins.opcode
    target, address, wanted = ins.operands[:3]
    machine, order = d.machine, _order(parts)

    def run(threads: Array, address: Array, wanted: Array) -> Any:
        done, complete = machine.barriers.test(threads, address, wanted, parity, blocks, *order)
        return (done, complete) if blocks else (complete,)

    sources = [d.address(address), d.source(wanted, TYPES["u32" if parity else "b64"])]
    return Step(ins, sources, [d.target(target, TYPES["pred"])], run, "block" if blocks else "plain")
