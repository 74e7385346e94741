"""MMAs and copies of scales by tensor cores, with their descriptors, scales and accumulators (PTX ISA, "tcgen05").

This module implements block-scaled MMAs (``ScaledShape``), and MMAs of FP8, fp16 and bf16 without scales
(``PlainShape``), for which A may be in tensor memory. NVIDIA documents neither the order of additions nor intermediate
rounding. The emulator adds the exact products and the accumulator in float64, and rounds the sum once.

The PTX ISA shows the places of accumulators and scales only in figures. Calibration with NVIDIA's kernels showed:

- Accumulators of one CTA with 128 rows, or of two CTAs with 256 rows: row r of a CTA is in lane r, and column n is in
  column n.
- A in tensor memory, with 128 rows per CTA: row r is in lane r, and each column holds 32 bits of consecutive elements.
- Scales of row r are in lane r % 32 of each quarter, in column r // 32. The bytes of a word are the scales of
  consecutive blocks along k. For K = 96, the scales continue in a second word, four columns further per 128 rows.
- For K = 96, the leading dimension in the descriptor may be an absolute address. The address locates the second 128
  bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.memory import ALLOCATED, WRITTEN, EmulationError, Fault, OutOfBounds
from ptx_emulator.races import Agent
from ptx_emulator.tensor_memory import COPIED, LANES, Part, Pipe
from ptx_emulator.values import E2M1, E4M3, E5M2, SCALES, Array, canonical, from_bf16, product

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


@lru_cache(4096)
def operand_chunks(descriptor: int, rows: int, width: int) -> Array:
    """Return the shared-memory offsets of the first ``width`` bytes of each row, as 16-byte chunks: (rows, width //
    16).

    The operand is K-major. See "Shared memory descriptor" and "Canonical layouts" in the PTX ISA.
    """
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    absolute, swizzle = descriptor >> 52 & 1, descriptor >> 61
    if descriptor >> 46 & 7 != 1:
        raise Fault(EmulationError, 0, f"descriptor {descriptor:#x}: bits 46 to 48 are not 0b001")
    if descriptor >> 49 & 7 or descriptor >> 53 & 0xFF:
        raise NotImplementedError(f"descriptor {descriptor:#x} with a base offset")
    if swizzle not in (0, 2, 4, 6) or (absolute and swizzle != 2):
        raise Fault(EmulationError, 0, f"descriptor {descriptor:#x}: swizzle mode {swizzle}")
    row, byte = np.arange(rows)[:, None], np.arange(0, width, 16)
    if swizzle == 0:
        chunks = start + row // 8 * stride + row % 8 * 16 + byte // 16 * leading
    else:
        bits = {2: 3, 4: 2, 6: 1}[swizzle]
        chunks = start + row // 8 * stride + row % 8 * (16 << bits) + byte
        if absolute:
            place = (start & 127) + byte
            beyond = leading + row // 8 * stride + row % 8 * 128 + place - 128
            chunks = np.where(place < 128, chunks, beyond)
        chunks = chunks ^ (chunks >> 7 & (1 << bits) - 1) << 4
    chunks.setflags(write=False)
    return chunks


@dataclass(frozen=True)
class Shape:
    """Fields that all instruction descriptors contain (PTX ISA, "Instruction descriptor"). ``group`` CTAs run the MMA.

    Attributes:
        m, n, k: sizes of the MMA.
        a_negated, b_negated: True if an operand is negated.
        group: number of CTAs.
        a_format, b_format: formats of the elements: e2m1, e2m1 spread, e4m3, e5m2, f16 or bf16.
    """

    m: int
    n: int
    k: int
    a_negated: bool
    b_negated: bool
    group: int
    a_format: str
    b_format: str

    def check(self, descriptor: int) -> None:
        """Raise a fault unless PTX defines an MMA of this size."""
        step = 8 * self.group
        if self.m not in (128, 128 * self.group) or not step <= self.n <= 256 or self.n % step:
            raise Fault(EmulationError, 0, f"instruction descriptor {descriptor:#x}: {self.m} x {self.n}")
        if self.group == 2 and self.m == 128:
            raise NotImplementedError("an MMA of 128 rows in two CTAs (layout B)")

    @property
    def rows(self) -> tuple[int, int]:
        """Return the numbers of rows of A and of B that each CTA holds."""
        return self.m // self.group, self.n // self.group

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes of a row of A or B."""
        return self.k * _BITS.get(self.a_format, 8) // 8


_BITS = {"e2m1": 4, "f16": 16, "bf16": 16}
"""Number of bits that an element takes in memory, if it is not 8."""
PLAIN_FORMATS = {"kind::f8f6f4": ("e4m3", "e5m2"), "kind::f16": ("f16", "bf16")}
"""Formats of the operands of MMAs without scales, by their number in the descriptor. The formats of 4 and 6 bits of
``kind::f8f6f4``, with the numbers 3 to 5, are not implemented: their elements are padded in shared memory."""
MX_FORMATS = {0: "e4m3", 1: "e5m2", 5: "e2m1 spread"}
"""Formats of the operands of ``kind::mxf8f6f4``, by their number in the descriptor. In shared memory, 16 elements of
e2m1 take 8 bytes of codes and 8 bytes that are ignored. The formats of 6 bits are not implemented."""


@dataclass(frozen=True)
class PlainShape(Shape):
    """Fields of the instruction descriptor of an MMA without scales (``kind::f8f6f4`` or ``kind::f16``) with fp32
    accumulators."""

    @classmethod
    def of(cls, descriptor: int, group: int, kind: str) -> PlainShape:
        if descriptor & 0b1111 or descriptor >> 6 & 1 or descriptor >> 23 & 1 or descriptor >> 29:
            raise Fault(EmulationError, 0, f"instruction descriptor {descriptor:#x}: reserved bits, or sparsity")
        formats, known = (descriptor >> 7 & 7, descriptor >> 10 & 7), PLAIN_FORMATS[kind]
        if descriptor >> 4 & 3 != 1 or descriptor >> 15 & 3 or max(formats) >= len(known):
            raise NotImplementedError(
                f"instruction descriptor {descriptor:#x}: not K-major {' or '.join(known)} to fp32"
            )
        if kind == "kind::f16" and formats[0] != formats[1]:
            raise NotImplementedError(f"instruction descriptor {descriptor:#x}: fp16 times bf16")
        shape = cls(
            m=(descriptor >> 24 & 31) * 16,
            n=(descriptor >> 17 & 63) * 8,
            k=16 if kind == "kind::f16" else 32,
            a_negated=bool(descriptor >> 13 & 1),
            b_negated=bool(descriptor >> 14 & 1),
            group=group,
            a_format=known[formats[0]],
            b_format=known[formats[1]],
        )
        shape.check(descriptor)
        return shape


@dataclass(frozen=True)
class ScaledShape(Shape):
    """Fields of the instruction descriptor of a block-scaled MMA with one scale per ``block`` elements: an MMA of two
    FP4 operands, or of ``kind::mxf8f6f4``.

    Attributes:
        scale: format of the scales.
        a_id, b_id: index of the byte at which the scales of A or B begin in a word.
        block: number of elements per scale.
    """

    scale: str
    a_id: int
    b_id: int
    block: int

    @classmethod
    def of(cls, descriptor: int, group: int, block: int) -> ScaledShape:
        if descriptor & 0b1111 or descriptor >> 6 & 1 or descriptor >> 12 & 1 or descriptor >> 24 & 7:
            raise Fault(EmulationError, 0, f"instruction descriptor {descriptor:#x}: reserved bits, or sparsity")
        if descriptor >> 7 & 7 != 1 or descriptor >> 10 & 3 != 1 or descriptor >> 15 & 3:
            raise Fault(EmulationError, 0, f"instruction descriptor {descriptor:#x}: operands are not K-major e2m1")
        shape = cls(
            m=(descriptor >> 27 & 3) * 128,
            n=(descriptor >> 17 & 63) * 8,
            k=96 if descriptor >> 31 else 64,
            scale="ue8m0" if descriptor >> 23 & 1 else "ue4m3",
            a_id=descriptor >> 29 & 3,
            b_id=descriptor >> 4 & 3,
            a_negated=bool(descriptor >> 13 & 1),
            b_negated=bool(descriptor >> 14 & 1),
            group=group,
            block=block,
            a_format="e2m1",
            b_format="e2m1",
        )
        shape.check(descriptor)
        return shape

    @classmethod
    def of_mxf8f6f4(cls, descriptor: int, group: int) -> ScaledShape:
        """Return the fields of a descriptor of ``kind::mxf8f6f4``."""
        if descriptor & 0b1111 or descriptor >> 6 & 1 or descriptor >> 24 & 7 or descriptor >> 31:
            raise Fault(EmulationError, 0, f"instruction descriptor {descriptor:#x}: reserved bits, or sparsity")
        formats = descriptor >> 7 & 7, descriptor >> 10 & 7
        if descriptor >> 15 & 3 or not set(formats) <= set(MX_FORMATS):
            raise NotImplementedError(f"instruction descriptor {descriptor:#x}: not K-major FP8 or FP4")
        shape = cls(
            m=(descriptor >> 27 & 3) * 128,
            n=(descriptor >> 17 & 63) * 8,
            k=32,
            scale="ue8m0" if descriptor >> 23 & 1 else "ue4m3",
            a_id=descriptor >> 29 & 3,
            b_id=descriptor >> 4 & 3,
            a_negated=bool(descriptor >> 13 & 1),
            b_negated=bool(descriptor >> 14 & 1),
            group=group,
            block=32,
            a_format=MX_FORMATS[formats[0]],
            b_format=MX_FORMATS[formats[1]],
        )
        shape.check(descriptor)
        return shape

    def check(self, descriptor: int) -> None:
        super().check(descriptor)
        if self.block == 32 and self.scale != "ue8m0":
            raise Fault(EmulationError, 0, "blocks of 32 have scales of ue8m0")
        if self.k == 64 and any(one not in ((0,) if self.block == 16 else (0, 2)) for one in (self.a_id, self.b_id)):
            raise Fault(EmulationError, 0, f"scale factor ids {self.a_id}, {self.b_id}")

    def scale_columns(self, rows: int, number: int) -> int:
        """Return the number of tensor-memory columns that hold the scales of ``rows`` rows, starting at scale id
        ``number``."""
        return -(-rows // 32) + (self.second_word(rows) if number + self.k // self.block > 4 else 0)

    @staticmethod
    def second_word(rows: int) -> int:
        return 4 * -(-rows // 128)


class TensorCores:
    """Tensor cores of all SMs in one launch."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.memory = machine.tensor

    def _read_later(self, agent: Agent, cta: int, chunks: Array, pipe: Pipe, number: int) -> None:
        """Check and record that an operation of a pipe reads chunks of shared memory."""
        shared = self.machine.shared
        if chunks.min() < 0 or chunks.max() + 16 > shared.size:
            raise Fault(OutOfBounds, 0, f"operand at offset {int(chunks.max()):#x} of shared memory")
        if (shared.flags[cta * shared.stride + chunks] & ALLOCATED == 0).any():
            raise Fault(OutOfBounds, 0, "operand outside of the allocated shared memory")
        self.machine.races.pipe_reads(agent, cta, chunks.reshape(-1), pipe.column, number, pipe.saw)

    def _bytes(self, cta: int, chunks: Array) -> tuple[Array, Array]:
        """Return chunks of shared memory as (rows, width) bytes, and a mask of the initialised bytes."""
        shared = self.machine.shared
        index = (cta * shared.stride + chunks[..., None] + np.arange(16)).reshape(len(chunks), -1)
        return shared.data[index], shared.flags[index] & WRITTEN != 0

    def copy(self, thread: int, address: int, descriptor: int, group: int) -> None:
        """Execute ``tcgen05.cp.32x128b.warpx4``: copy 32 rows of 16 bytes to each quarter of the 128 lanes."""
        memory = self.memory
        chunks = operand_chunks(descriptor, 32, 16)
        if address >> 16:
            raise Fault(EmulationError, 0, f"tcgen05.cp to lane {address >> 16}")
        parts = [memory.part(cta, address, 4) for cta in memory.ctas_of(thread, group)]
        pipe, number = memory.next_operation(thread)
        agent = self.machine.races.begin(thread)
        for part in parts:
            self._read_later(agent, part.cta, chunks, pipe, number)
            memory.check_write(np.array([thread]), part, "tcgen05.cp", pipe)
            memory.mark_written(part, pipe.column, number)

        def execute() -> None:
            for part in parts:
                data, there = self._bytes(part.cta, chunks)
                words = np.ascontiguousarray(data).view(np.uint32)
                memory.data[part.cta, :, part.columns] = np.tile(words, (4, 1))
                memory.there[part.cta, :, part.columns] = np.tile(there.reshape(32, 4, 4).all(2), (4, 1))

        memory.issue(thread, execute, [part.cta for part in parts])

    def multiply(
        self,
        thread: int,
        accumulator: int,
        a: int,
        b: int,
        instruction: int,
        accumulates: bool,
        group: int,
        kind: str,
        a_in_tensor_memory: bool,
    ) -> None:
        """Execute a ``tcgen05.mma`` without scales: ``A @ B``, or ``A @ B + D``.

        Each CTA of a pair holds the rows of A for its half of D, and half of the rows of B. ``a`` is a descriptor of
        shared memory or an address of tensor memory, and ``b`` is a descriptor of shared memory.
        """
        shape = PlainShape.of(instruction, group, kind)
        # CUTLASS refuses these sizes, but FlashInfer uses tiles of 8 columns.
        if a_in_tensor_memory and shape.n % (16 * group) and not self.machine.lenient:
            raise Fault(EmulationError, 0, f"{shape.m} x {shape.n} with A in tensor memory")
        self._multiply(thread, accumulator, a, b, shape, accumulates, None, a_in_tensor_memory)

    def multiply_scaled(
        self,
        thread: int,
        accumulator: int,
        a: int,
        b: int,
        instruction: int,
        a_scales: int,
        b_scales: int,
        accumulates: bool,
        group: int,
        block: int | None,
    ) -> None:
        """Execute a block-scaled ``tcgen05.mma`` with both operands in shared memory: ``A @ B``, or ``A @ B + D``.

        Each CTA of a pair holds half of D's rows, the same rows of A, half of the rows of B, and the scales of its rows
        of A and B. ``block`` is None for ``kind::mxf8f6f4``.
        """
        of = ScaledShape.of_mxf8f6f4(instruction, group) if block is None else None
        shape = of or ScaledShape.of(instruction, group, block or 0)
        self._multiply(thread, accumulator, a, b, shape, accumulates, (a_scales, b_scales))

    def _multiply(
        self,
        thread: int,
        accumulator: int,
        a: int,
        b: int,
        shape: PlainShape | ScaledShape,
        accumulates: bool,
        scales_at: tuple[int, int] | None,
        a_in_tensor_memory: bool = False,
    ) -> None:
        memory, threads = self.memory, np.array([thread])
        a_rows, b_rows = shape.rows
        ctas = memory.ctas_of(thread, shape.group)
        lefts = [a] if a_in_tensor_memory else []
        for address in (accumulator, *lefts, *(one & 0x3FFFFFFF for one in scales_at or ())):
            if address >> 16:
                raise Fault(EmulationError, 0, f"an operand at lane {address >> 16} of tensor memory")
        pipe, number = memory.next_operation(thread)
        agent = self.machine.races.begin(thread)
        how = hash((accumulator, shape.m, shape.n, shape.group)) | 1
        b_chunks = operand_chunks(b, b_rows, shape.row_bytes)
        a_chunks = None if a_in_tensor_memory else operand_chunks(a, a_rows, shape.row_bytes)
        sums = [memory.part(cta, accumulator, shape.n) for cta in ctas]
        # ``reads`` are the parts of tensor memory that the MMA reads: A, or scales of A and B.
        reads: list[list[Part]] = [[memory.part(cta, one, shape.row_bytes // 4) for one in lefts] for cta in ctas]
        if isinstance(shape, ScaledShape) and scales_at is not None:
            places = (scales_at[0], a_rows, shape.a_id), (scales_at[1], shape.n, shape.b_id)
            reads = [
                [memory.part(cta, first, shape.scale_columns(rows, one)) for first, rows, one in places] for cta in ctas
            ]
        for cta, total, parts in zip(ctas, sums, reads, strict=True):
            for chunks in (b_chunks,) if a_chunks is None else (a_chunks, b_chunks):
                self._read_later(agent, cta, chunks, pipe, number)
            for part in parts:
                memory.check_read(threads, part, f"tcgen05.mma with {'A' if lefts else 'scales'}", pipe)
            memory.check_write(threads, total, "tcgen05.mma", pipe, (COPIED, how))
            for part in parts:
                if self._overlap(part, total):
                    raise Fault(EmulationError, 0, f"the accumulator overlaps {'A' if lefts else 'the scales'}")
        for total, parts in zip(sums, reads, strict=True):
            memory.mark_written(total, pipe.column, number, how)
            for part in parts:
                memory.used.set(part, pipe.column, number)

        def execute() -> None:
            found = [self._operand(self._bytes(cta, b_chunks), shape.b_format, shape.b_negated) for cta in ctas]
            right, right_there = (np.concatenate(one) for one in zip(*found, strict=True))
            for total, parts in zip(sums, reads, strict=True):
                data = self._words(parts[0], a_rows) if a_chunks is None else self._bytes(total.cta, a_chunks)
                left, left_there = self._operand(data, shape.a_format, shape.a_negated)
                factors = right
                there = left_there[:, None] & right_there
                if isinstance(shape, ScaledShape):
                    a_scale, a_there = self._scales(parts[0], a_rows, shape, shape.a_id)
                    b_scale, b_there = self._scales(parts[1], shape.n, shape, shape.b_id)
                    there = there & a_there[:, None] & b_there
                    left, factors = left * a_scale, right * b_scale
                result = product(left, factors.T)
                where = total.cta, slice(0, a_rows), total.columns
                if accumulates:
                    result = result + memory.data[where].view(np.float32)
                    there = there & memory.there[where]
                memory.data[where] = canonical(result.astype(np.float32)).view(np.uint32)
                memory.there[where] = there

        memory.issue(thread, execute, ctas)

    @staticmethod
    def _overlap(a: Part, b: Part) -> bool:
        return a.columns.start < b.columns.stop and b.columns.start < a.columns.stop

    def _words(self, part: Part, rows: int) -> tuple[Array, Array]:
        """Return the first ``rows`` lanes of a part of tensor memory as (rows, width) bytes, and a mask of the
        initialised bytes."""
        where = part.cta, slice(0, rows), part.columns
        words = np.ascontiguousarray(self.memory.data[where])
        return words.view(np.uint8), np.repeat(self.memory.there[where], 4, 1)

    @staticmethod
    def _operand(found: tuple[Array, Array], fmt: str, negated: bool) -> tuple[Array, Array]:
        """Decode an operand. Return the values of its rows, and a mask of the rows that are completely initialised.

        ``found`` contains the operand as (rows, width) bytes, and a mask of the initialised bytes.
        """
        data, there = found
        if fmt == "e2m1 spread":
            used = np.arange(data.shape[1]) % 16 < 8
            data, there = data[:, used], there[:, used]
        if fmt.startswith("e2m1"):
            numbers = np.stack([E2M1[data & 15], E2M1[data >> 4]], -1).reshape(len(data), -1)
        elif fmt == "f16":
            numbers = np.ascontiguousarray(data).view(np.float16).astype(np.float64)
        elif fmt == "bf16":
            numbers = from_bf16(np.ascontiguousarray(data).view(np.uint16)).astype(np.float64)
        else:
            numbers = (E4M3 if fmt == "e4m3" else E5M2)[data]
        return -numbers if negated else numbers, there.all(1)

    def _scales(self, part: Part, rows: int, shape: ScaledShape, number: int) -> tuple[Array, Array]:
        """Return the scale of each value in an operand's rows, and a mask of the rows whose scales are initialised.

        All quarters of the lanes must hold the same scales, because the tensor core reads a different quarter for each
        part of the accumulator's rows.
        """
        row = np.arange(rows)
        first = part.columns.start + row // 32
        columns = [first] if number + shape.k // shape.block <= 4 else [first, first + shape.second_word(rows)]
        lanes = row[:, None] % 32 + np.arange(0, LANES, 32)
        words, there = [], np.ones(rows, bool)
        for column in columns:
            found = self.memory.data[part.cta, lanes, column[:, None]]
            if (found != found[:, :1]).any():
                raise Fault(EmulationError, 0, "scales differ between the quarters of the lanes")
            words.append(found[:, 0])
            there &= self.memory.there[part.cta, lanes, column[:, None]].all(1)
        codes = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)
        codes = codes[:, number : number + shape.k // shape.block]
        return np.repeat(SCALES[shape.scale][codes], shape.block, 1), there
