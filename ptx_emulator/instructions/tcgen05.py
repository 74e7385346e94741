"""``tcgen05`` instructions: tensor memory and tensor cores of data-center Blackwell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.decoder import Decoder, Source, Step, acts, effect, unknown
from ptx_emulator.instructions.warps import warp_step
from ptx_emulator.memory import EmulationError, Fault
from ptx_emulator.parser import Imm, Instruction, Mem, Vec
from ptx_emulator.tensor_cores import PLAIN_FORMATS
from ptx_emulator.tensor_memory import Part
from ptx_emulator.values import TYPES, Array, distinct, of_each, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

B32, B64, U32, U16 = TYPES["b32"], TYPES["b64"], TYPES["u32"], TYPES["u16"]


def _cta_group(ins: Instruction) -> int:
    return 2 if ".cta_group::2" in ins.opcode else 1


def _of_warps(m: Machine, threads: Array, act: Callable[..., None], *values: Array) -> None:
    """Call ``act(positions, threads, *values)`` for each warp. Raise a fault unless all lanes of a warp pass equal
    values."""
    values = tuple(of_each(value, threads) for value in values)
    for warp in distinct(m.warp[threads]):
        at = positions(m.warp[threads] == warp)
        if len(at) < 32:
            raise Fault(EmulationError, at[0], "a warp of fewer than 32 threads")
        for value in values:
            different = positions(value[at] != value[at[0]])
            if len(different):
                raise Fault(EmulationError, at[different[0]], "an operand that differs between lanes of a warp")
        try:
            act(at, threads[at], *(int(value[at[0]]) for value in values))
        except Fault as fault:
            fault.position = at[0]
            raise


def _by_warps(d: Decoder, ins: Instruction, sources: list[Source], act: Callable[..., None]) -> Step:
    """Return a step without results that calls ``act(thread, *values)`` for the first thread of each warp."""

    def run(threads: Array, *values: Array) -> tuple:
        _of_warps(d.machine, threads, lambda at, warp, *one: act(int(warp[0]), *one), *values)
        return ()

    return warp_step(d, ins, sources, [], run, Imm(-1))


def _by_threads(ins: Instruction, sources: list[Source], act: Callable[..., None]) -> Step:
    """Return a step without results that calls ``act(thread, *values)`` for each thread."""

    def run(threads: Array, *values: Array) -> tuple:
        values = tuple(of_each(value, threads) for value in values)
        for i, thread in enumerate(threads.tolist()):
            try:
                act(thread, *(value[i].item() for value in values))
            except Fault as fault:
                fault.position = i
                raise
        return ()

    return Step(ins, sources, [], run)


# Allocation


@effect("tcgen05.alloc")
def _alloc(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    m, group = d.machine, _cta_group(ins)

    def act(thread: int, address: int, columns: int) -> None:
        first = np.array([m.tensor.allocate(thread, columns, group)], np.uint32)
        m.store("shared", np.array([thread]), np.array([address]), 4, [first])

    return _by_warps(d, ins, [d.address(ins.operands[0]), d.source(ins.operands[1], U32)], act)


@effect("tcgen05.dealloc")
def _dealloc(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    m, group = d.machine, _cta_group(ins)
    sources = [d.source(operand, U32) for operand in ins.operands]
    return _by_warps(d, ins, sources, lambda thread, address, n: m.tensor.deallocate(thread, address, n, group))


@effect("tcgen05.relinquish_alloc_permit")
def _relinquish(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    m, group = d.machine, _cta_group(ins)

    def act(thread: int) -> None:
        m.tensor.group(group)
        m.tensor.relinquished[m.cta[thread]] = True

    return _by_warps(d, ins, [], act)


# Loads and stores


def _places(shape: str, count: int) -> tuple[Array, Array]:
    """Return the lane and the column that each register of each thread of a warp accesses (PTX ISA, "Matrix
    fragments")."""
    register, thread = np.arange(count)[:, None], np.arange(32)[None]
    if shape == "32x32b":
        return thread + 0 * register, register + 0 * thread
    # For 16x256b, a thread uses four registers for every 8 columns.
    return thread // 4 + register % 4 // 2 * 8, register // 4 * 8 + thread % 4 * 2 + register % 2


def _access(ins: Instruction, parts: list[str], items: tuple[Any, ...], width: dict[str, int]) -> tuple[str, int]:
    """Return the shape and the number of columns of a load or store."""
    if len(parts) != 3 or parts[0] not in width or parts[2] != "b32":
        raise unknown(ins)
    columns = width[parts[0]] * int(parts[1][1:])
    if len(items) != columns // (2 if parts[0] == "16x256b" else 1):
        raise unknown(ins)
    return parts[0], columns


def _cells(part: Part, lanes: Array, columns: Array, address: int) -> tuple[int, Array, Array]:
    """Return an index into ``TensorMemory.data``. ``lanes`` are relative to the lane that ``address`` contains."""
    return part.cta, (address >> 16) + lanes, part.columns.start + columns


@effect("tcgen05.ld.sync.aligned")
def _ld(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    first, address = ins.operands
    items = first.items if isinstance(first, Vec) else (first,)
    shape, count = _access(ins, parts, items, {"32x32b": 1, "16x256b": 8})
    lanes, columns = _places(shape, len(items))
    m = d.machine

    def run(threads: Array, address: Array) -> list[Array]:
        words = np.zeros((len(items), len(threads)), np.uint32)
        missing = np.zeros(words.shape, bool)

        def one(at: Array, warp: Array, address: int) -> None:
            where = _cells(m.tensor.access(warp, address, count, "ld"), lanes, columns, address)
            words[:, at], missing[:, at] = m.tensor.data[where], ~m.tensor.there[where]

        _of_warps(m, threads, one, address)
        m.unwritten = list(missing) if missing.any() else None
        return list(words)

    step = warp_step(d, ins, [d.address(address)], [d.target(item, B32) for item in items], run, Imm(-1))
    step.undefined, step.orders = "load", False
    return step


@effect("tcgen05.st.sync.aligned")
def _st(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    address, first = ins.operands
    items = first.items if isinstance(first, Vec) else (first,)
    shape, count = _access(ins, parts, items, {"32x32b": 1})
    lanes, columns = _places(shape, len(items))
    m = d.machine

    def run(threads: Array, address: Array, *values: Array) -> tuple:
        words = np.stack([of_each(value, threads) for value in values])

        def one(at: Array, warp: Array, address: int) -> None:
            where = _cells(m.tensor.access(warp, address, count, "st"), lanes, columns, address)
            m.tensor.data[where], m.tensor.there[where] = words[:, at], True

        _of_warps(m, threads, one, address)
        return ()

    step = warp_step(d, ins, [d.address(address), *(d.source(item, B32) for item in items)], [], run, Imm(-1))
    step.orders = False
    return step


@effect("tcgen05.wait::ld.sync.aligned tcgen05.wait::st.sync.aligned")
def _wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    kind = "ld" if "wait::ld" in ins.opcode else "st"
    return _by_warps(d, ins, [], lambda thread: d.machine.tensor.wait(thread, kind))


@effect("tcgen05.fence::before_thread_sync")
def _fence_before(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return acts(ins, [], lambda threads: d.machine.tensor.tell(threads))


@effect("tcgen05.fence::after_thread_sync")
def _fence_after(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return acts(ins, [], lambda threads: d.machine.tensor.know(threads))


# Tensor cores


@effect("tcgen05.cp")
def _cp(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    if parts[1:] != ["32x128b", "warpx4"]:
        raise unknown(ins)
    m, group = d.machine, _cta_group(ins)
    sources = [d.address(ins.operands[0]), d.source(ins.operands[1], B64)]
    return _by_threads(ins, sources, lambda thread, to, start: m.tensor_cores.copy(thread, to, start, group))


_BLOCKS = {"block16": 16, "scale_vec::4X": 16, "block32": 32, "scale_vec::2X": 32}


@effect("tcgen05.mma")
def _mma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode an MMA with or without block scales. Hints for the collector buffers are ignored, because they do not
    change the result."""
    kind, *rest = [part for part in parts if not part.startswith(("cta_group", "collector"))]
    if kind in PLAIN_FORMATS and not rest:
        return _plain_mma(d, ins, kind)
    if kind == "kind::mxf8f6f4" and rest in (
        ["block_scale"],
        ["block_scale", "scale_vec::1X"],
        ["block_scale", "block32"],
    ):
        return _scaled_mma(d, ins, None)
    sizes = [_BLOCKS.get(part, 0) for part in rest if part != "block_scale"]
    if kind == "kind::mxf4" and not sizes:
        sizes = [32]
    if kind not in ("kind::mxf4nvf4", "kind::mxf4") or "block_scale" not in rest or sizes not in ([16], [32]):
        raise unknown(ins)
    if kind == "kind::mxf4" and sizes == [16]:
        raise unknown(ins)
    return _scaled_mma(d, ins, sizes[0])


def _scaled_mma(d: Decoder, ins: Instruction, block: int | None) -> Step:
    """Decode a block-scaled MMA. ``block`` is None for ``kind::mxf8f6f4``."""
    total, a, b, shape, a_scales, b_scales, accumulates = ins.operands
    m, group = d.machine, _cta_group(ins)
    sources = [
        d.address(total),
        d.source(a, B64),
        d.source(b, B64),
        d.source(shape, U32),
        d.address(a_scales),
        d.address(b_scales),
        d.source(accumulates, TYPES["pred"]),
    ]
    return _by_threads(
        ins, sources, lambda thread, *values: m.tensor_cores.multiply_scaled(thread, *values, group, block)
    )


def _plain_mma(d: Decoder, ins: Instruction, kind: str) -> Step:
    """Decode an MMA without scales. A is in shared memory, or in tensor memory if its operand is an address. The
    optional vector of lanes whose results are not written must be zero."""
    total, a, b, shape, *lanes, accumulates = ins.operands
    m, group, in_tensor_memory = d.machine, _cta_group(ins), isinstance(a, Mem)
    disabled = [item for one in lanes if isinstance(one, Vec) for item in one.items]
    if len(disabled) != 4 * group * len(lanes):
        raise unknown(ins)
    sources = [
        d.address(total),
        d.address(a) if in_tensor_memory else d.source(a, B64),
        d.source(b, B64),
        d.source(shape, U32),
        d.source(accumulates, TYPES["pred"]),
        *(d.source(one, U32) for one in disabled),
    ]

    def act(thread: int, *values: int) -> None:
        if any(values[5:]):
            raise NotImplementedError("an MMA that does not write all lanes")
        m.tensor_cores.multiply(thread, *values[:4], bool(values[4]), group, kind, in_tensor_memory)

    return _by_threads(ins, sources, act)


@effect("tcgen05.commit")
def _commit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    m, group = d.machine, _cta_group(ins)
    if "mbarrier::arrive::one" not in parts:
        raise unknown(ins)

    def act(thread: int, address: int, mask: int | None = None) -> None:
        m.tensor.group(group)
        one = np.array([thread])
        (cta,), (offset,) = m.shared_place("shared::cluster", one, np.array([address]))
        ctas = [int(cta)] if mask is None else m.ctas_of_mask(thread, mask)
        m.tensor.commit(thread, [(cta, int(offset)) for cta in ctas])

    sources = [d.address(ins.operands[0])]
    if "multicast::cluster" in parts:
        sources.append(d.source(ins.operands[1], U16))
    return _by_threads(ins, sources, act)
