"""TMA copies with a tensor map (tiled mode) of boxes of a tensor, to shared memory of one or more CTAs and back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.decoder import Decoder, Step, effect, modifiers, unknown
from ptx_emulator.instructions.copies import global_bytes, one_to_shared
from ptx_emulator.instructions.products import swizzled
from ptx_emulator.memory import ALLOCATED, WRITTEN, EmulationError, Fault, Memory, OutOfBounds, Uninitialised
from ptx_emulator.parser import Instruction
from ptx_emulator.values import TYPES, Array, of_each

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

_BITS = {0: 8, 1: 16, 2: 32, 6: 16, 7: 32, 10: 16, 11: 4, 12: 4}
"""Number of bits of an element, keyed by the type number in a tensor map."""
_SPREAD = 12
"""Type of elements of 4 bits (``CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B``). A copy spreads 16 elements to 16 bytes of
shared memory: 8 bytes of codes, then 8 undefined bytes. The mbarrier counts only the 8 bytes of codes, as CUTLASS
assumes."""
_UNDEFINED = 0xA5


class TensorMap:
    """A tensor map, decoded from the bytes that the DSL's host code writes. Dimensions are listed innermost first.

    NVIDIA does not document these bytes. Their meaning was inferred from the tensor maps of DSL kernels, among them
    NVIDIA's examples.
    """

    def __init__(self, data: bytes):
        words = struct.unpack("<32I", data)
        self.address = words[0] | words[1] << 32
        self.rank = (words[2] >> 4 & 7) + 1
        if words[2] >> 7 & 15 not in _BITS:
            raise NotImplementedError(f"a tensor map of elements of type {words[2] >> 7 & 15}")
        self.bits = _BITS[words[2] >> 7 & 15]
        self.is_spread = words[2] >> 7 & 15 == _SPREAD
        self.swizzle_bits = words[2] >> 13 & 3
        self.strides = [1, *(words[3 + i] * 16 for i in range(self.rank - 1))]  # in bytes, except the innermost stride
        self.sizes = [words[8 + i] + 1 for i in range(self.rank)]
        box = [words[13] >> 24, *(words[14] >> 8 * i & 0xFF for i in range(4))]
        self.box = [extent + 1 for extent in box[: self.rank]]
        self.row_bytes = self.box[0] * self.bits // 8
        self.size = int(np.prod(self.box[1:])) * self.row_bytes
        if self.is_spread:
            self._check_spread()

    def _check_spread(self) -> None:
        """Check the limits of ``cuTensorMapEncodeTiled`` for this type."""
        if self.address % 32 or any(stride % 32 for stride in self.strides[1:]):
            raise Fault(EmulationError, 0, "a tensor map of spread elements: address and strides are multiples of 32")
        if self.sizes[0] % 128 or self.box[0] != 128:
            raise Fault(EmulationError, 0, "a tensor map of spread elements: the box takes 128 of a multiple of 128")
        if self.swizzle_bits not in (0, 3):
            raise Fault(EmulationError, 0, "a tensor map of spread elements with a swizzle of less than 128 bytes")

    @property
    def span(self) -> int:
        """Number of bytes of shared memory that a box takes."""
        return self.size * (1 + self.is_spread)


@dataclass
class Box:
    """A box at given coordinates, with the addresses of its bytes in shared and global memory.

    Attributes:
        there: (rows, bytes) mask of the bytes that lie in the tensor.
        index: Indices of these bytes in ``memory``, row by row.
    """

    map: TensorMap
    place: Array
    there: Array
    memory: Memory | None
    index: Array

    def read(self) -> Array:
        """Return the bytes of the box in the order of shared memory, with zeros for bytes outside of the tensor."""
        contents = np.zeros(self.there.shape, np.uint8)
        if self.memory is not None:
            contents[self.there] = self.memory.data[self.index]
        ordered = np.full(self.map.span, _UNDEFINED, np.uint8)
        ordered[self.place] = contents.reshape(-1)
        return ordered

    def write(self, contents: Array, known: Array) -> None:
        """Write bytes of shared memory to the box in the tensor. ``known`` is a mask of the initialised bytes."""
        there = self.there.reshape(-1)
        if not known[self.place][there].all():
            raise Fault(Uninitialised, 0, "stores uninitialised bytes to global memory")
        if self.memory is not None:
            self.memory.data[self.index] = contents[self.place][there]


def _box(m: Machine, thread: int, map: int, dimensions: int, offset: int, coordinates: list[int]) -> Box:
    """Check the operands of a copy, and return its box.

    ``coordinates`` are the coordinates of the box's first element. In shared memory, the box starts at ``offset``.
    """
    one = np.array([thread])
    box = TensorMap(global_bytes(m, one, np.array([map], np.uint64), 128)().tobytes())
    if box.rank != dimensions:
        raise Fault(EmulationError, 0, f"a tensor map of {box.rank} dimensions")
    if offset % 128:
        raise Fault(EmulationError, 0, f"a box at offset {offset:#x} of shared memory: no multiple of 128")
    if box.is_spread and coordinates[0] % 128:
        raise Fault(EmulationError, 0, f"a box of spread elements from element {coordinates[0]} on")
    if coordinates[0] * box.bits % 8:
        raise Fault(EmulationError, 0, f"a box from element {coordinates[0]} of {box.bits} bits on")
    # Compute each row's coordinates in all dimensions except the innermost.
    steps = np.stack(np.unravel_index(np.arange(box.size // box.row_bytes), box.box[:0:-1] or (1,)))[::-1]
    rows, inside = np.zeros(steps.shape[1], np.int64), np.ones(steps.shape[1], bool)
    for step, at, extent, stride in zip(steps, coordinates[1:], box.sizes[1:], box.strides[1:], strict=False):
        inside &= (at + step >= 0) & (at + step < extent)
        rows += (at + step) * stride
    column = coordinates[0] * box.bits // 8 + np.arange(box.row_bytes)
    there = inside[:, None] & (column >= 0) & (column < box.sizes[0] * box.bits // 8)
    byte = np.arange(box.size)
    place = swizzled(offset + (byte + byte // 8 * 8 if box.is_spread else byte), box.swizzle_bits) - offset
    addresses = (box.address + rows[:, None] + column)[there]
    if not len(addresses):
        return Box(box, place, there, None, addresses)
    ((_, memory, bank, start),) = m.places("global", one, addresses[:1])
    index = int(bank[0]) * memory.stride + int(start[0]) + addresses - addresses[0]
    beyond = (index < 0) | (index >= memory.size)
    if beyond.any() or (memory.flags[index] & ALLOCATED == 0).any():
        raise Fault(OutOfBounds, 0, f"{memory.name}: not all of a box is allocated")
    return Box(box, place, there, memory, index)


@effect(" ".join(f"cp.async.bulk.tensor.{rank}d" for rank in range(1, 6)))
def _tensor_copy(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    dimensions = int(ins.opcode.split(".")[4][0])
    if parts[0] == "global":
        return _to_global(d, ins, parts, dimensions)
    return _to_shared(d, ins, parts, dimensions)


def _started(ins: Instruction, sources: list, start: Callable[..., None]) -> Step:
    """Return a step without results that calls ``start(thread, *values)`` for each thread."""

    def run(threads: Array, *values: Array) -> tuple:
        values = tuple(of_each(value, threads) for value in values)
        for i, thread in enumerate(threads.tolist()):
            try:
                start(thread, *(int(value[i]) for value in values))
            except Fault as fault:
                fault.position = i
                raise
        return ()

    return Step(ins, sources, [], run)


def _to_shared(d: Decoder, ins: Instruction, parts: list[str], dimensions: int) -> Step:
    """Decode a copy of a box to the same offset in the shared memory of each CTA of a mask.

    In each of these CTAs, the copy arrives at the mbarrier at the same offset. With ``cta_group::2``, the copy arrives
    in only one CTA of each target's pair: the CTA whose rank has the same parity as the rank in the mbarrier's address.
    """
    known = (
        "shared::cta shared::cluster global tile mbarrier::complete_tx::bytes multicast::cluster cta_group::1"
        " cta_group::2 L2::cache_hint"
    )
    modifiers(ins, parts, known)
    m = d.machine
    pairs, multicast = "cta_group::2" in parts, "multicast::cluster" in parts
    if parts[1] != "global":
        raise unknown(ins)

    def start(thread: int, target: int, map: int, barrier: int, *rest: int) -> None:
        one = np.array([thread])
        (cta,), (offset,) = m.shared_place(parts[0], one, np.array([target]))
        (barrier_cta,), (barrier_offset,) = m.shared_place(parts[0], one, np.array([barrier]))
        if (m.cta_rank[cta] ^ m.cta_rank[barrier_cta]) > pairs:
            raise Fault(EmulationError, 0, "the mbarrier is in another CTA than the target")
        box = _box(m, thread, map, dimensions, int(offset), list(rest[:dimensions]))
        ctas = m.ctas_of_mask(thread, rest[-1]) if multicast else [int(cta)]
        for to in ctas:
            signal = to
            if pairs:
                rank = int(m.cta_rank[to]) & ~1 | int(m.cta_rank[barrier_cta]) & 1
                signal = int(m.cta_of_rank[m.cluster[thread], rank])
            copy = one_to_shared(
                m, thread, to, int(offset), signal, int(barrier_offset), box.map.span, box.read, box.map.size
            )
            m.under_way.start(thread, copy, (to, signal))

    target, source, barrier = ins.operands[:3]
    map, *coordinates = source.items
    if len(coordinates) != dimensions:
        raise unknown(ins)
    sources = [d.address(target), d.address(map), d.address(barrier)]
    sources += [d.source(coordinate, TYPES["s32"]) for coordinate in coordinates]
    if multicast:
        sources.append(d.source(ins.operands[3], TYPES["u16"]))
    return _started(ins, sources, start)


def _to_global(d: Decoder, ins: Instruction, parts: list[str], dimensions: int) -> Step:
    """Decode a copy of a box from shared memory to the tensor. Bytes outside of the tensor are skipped."""
    modifiers(ins, parts, "global shared::cta tile bulk_group L2::cache_hint")
    m = d.machine

    def start(thread: int, map: int, source: int, *coordinates: int) -> None:
        (cta,), (offset,) = m.shared_place("shared", np.array([thread]), np.array([source]))
        box = _box(m, thread, map, dimensions, int(offset), list(coordinates))
        if box.map.is_spread:
            raise NotImplementedError("a copy of spread elements to global memory")
        here = m.shared.span(int(cta), int(offset), box.map.size, False)
        reads = m.races.copy_reads(m.races.begin(thread), int(cta), int(offset), box.map.size)

        def execute() -> None:
            box.write(m.shared.data[here], m.shared.flags[here] & WRITTEN != 0)

        m.under_way.start(thread, execute, (int(cta),), reads)

    target, source = ins.operands[:2]
    map, *coordinates = target.items
    if len(coordinates) != dimensions or "bulk_group" not in parts:
        raise unknown(ins)
    sources = [d.address(map), d.address(source), *(d.source(one, TYPES["s32"]) for one in coordinates)]
    return _started(ins, sources, start)
