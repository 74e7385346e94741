"""Moves between registers, control flow, and instructions without an effect in the emulator."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.decoder import Decoder, Step, effect, modifiers, nothing, unknown
from ptx_emulator.memory import EmulationError, Fault
from ptx_emulator.parser import Instruction, Operand, Symbol, Vec
from ptx_emulator.values import TYPES, UNSIGNED, Array, Type

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


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


LANE_MASKS = {
    f"lanemask_{kind}": np.array([sum(1 << j for j in range(32) if compare(j, i)) for i in range(32)])
    for kind, compare in (("eq", operator.eq), ("lt", operator.lt), ("le", operator.le), ("gt", operator.gt))
}
"""Special registers whose value depends only on the lane."""


def special_register(m: Machine, name: str) -> Array | None:
    """Return the value of a special register in each thread, or None if it is unknown."""
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
    if base in LANE_MASKS:
        return LANE_MASKS[base][m.lane]
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
    return Step(ins, [], [], nothing, "branch", target=ins.operands[0].value, undefined="pass")


@effect("ret exit")
def _exit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [], lambda threads: None, "exit", undefined="pass")


@effect("trap")
def _trap(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    def run(threads: Array) -> tuple:
        raise Fault(EmulationError, 0, "trap")

    return Step(ins, [], [], run)


@effect(
    "prefetch prefetchu nanosleep setmaxnreg fence.proxy fence.mbarrier_init"
    " cp.async.bulk.prefetch.tensor discard applypriority pragma wgmma.fence"
)
def _no_effect(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [], nothing)


@effect("griddepcontrol.wait")
def _wait_for_kernel(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    if d.machine.before is not None:
        return Step(ins, [], [], d.machine.wait_for_kernel, "block")

    def run(threads: Array) -> tuple:
        d.machine.wait_for_kernel(threads)
        return ()

    return Step(ins, [], [], run)


@effect("griddepcontrol.launch_dependents")
def _launch_dependents(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    def run(threads: Array) -> tuple:
        d.machine.release_dependents(threads)
        return ()

    return Step(ins, [], [], run)


@effect("fence membar")
def _fence(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode a memory fence. The modifier ``sync_restrict`` is ignored, because the race detector covers only shared
    memory."""
    restricted = "sync_restrict::shared::cta sync_restrict::shared::cluster"
    modifiers(ins, parts, f"sc acq_rel acquire release cta cluster gpu sys gl {restricted}")
    machine, cluster = d.machine, "cta" not in parts
    acquires, releases = "release" not in parts, "acquire" not in parts

    def run(threads: Array) -> tuple:
        if machine.scoped:
            machine.races.fence_memory(threads, acquires, releases, cluster)
        return ()

    return Step(ins, [], [], run)


@effect("fence.proxy.async")
def _fence_proxy_async(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    modifiers(ins, parts, "global shared::cta shared::cluster")
    machine = d.machine

    def run(threads: Array) -> tuple:
        if parts != ["global"]:
            machine.races.fence(threads)
        return ()

    return Step(ins, [], [], run)


@effect("createpolicy")
def _createpolicy(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return Step(ins, [], [d.target(ins.operands[0], TYPES["b64"])], lambda threads: (np.zeros(1, np.uint64),))
