"""Byte-addressed memory whose accesses are checked, and the errors that a launch may raise."""

import functools
from dataclasses import dataclass

import numpy as np

from ptx_emulator.values import UNSIGNED, Array, any_true, positions

ALLOCATED, WRITTEN, BARRIER = 1, 2, 4
"""Flags of a byte: it is allocated, it is initialised, it belongs to an mbarrier."""

SHARED_BASE = 1024
"""First address of shared memory. As on hardware, lower addresses are reserved."""
RANK_SHIFT = 24
"""Number of bits of an offset in a ``shared::cluster`` address. The higher bits are the rank of the CTA in its
cluster."""
REGION_SHIFT = 36
"""Number of bits of an offset in a global address. The higher bits are the number of the allocation."""
SHARED_WINDOW, LOCAL_WINDOW = 0xF00 << REGION_SHIFT, 0xE00 << REGION_SHIFT
"""First generic addresses of shared and of local memory."""


class EmulationError(RuntimeError):
    """A fault in a launch, such as a race or a misused barrier. Subclasses name some kinds of faults."""


class OutOfBounds(EmulationError):
    """An access outside all allocations."""


class Misaligned(EmulationError):
    """An address that is not a multiple of the access size."""


class Uninitialised(EmulationError):
    """A read of uninitialised bytes."""


class Race(EmulationError):
    """Two accesses to the same byte of shared memory that no barrier orders, at least one of them a write."""


class Deadlock(EmulationError):
    """Threads wait, and no thread or copy that can still run would let these threads continue."""


@dataclass
class Fault(Exception):
    """A fault of one thread. ``position`` is the thread's index among the threads that execute the instruction."""

    kind: type[EmulationError]
    position: int
    message: str


class Memory:
    """Memory that consists of ``banks`` separate banks of ``size`` bytes. There is one bank per CTA (shared memory),
    one per thread (local memory), or a single bank (global memory)."""

    def __init__(self, name: str, size: int, banks: int = 1):
        self.name = name
        self.size = size
        self.stride = -(-max(size, 1) // 16) * 16
        self.data = np.full(self.stride * banks, 0xA5, np.uint8)
        self.flags = np.zeros(self.stride * banks, np.uint8)
        self._views = {width: (self.data.view(f"u{width}"), self.flags.view(f"u{width}")) for width in (1, 2, 4, 8)}

    def locate(self, bank: Array, offset: Array, width: int, count: int) -> Array:
        """Check the bounds and the alignment of an access. Return the index of the first of ``count`` elements of
        ``width`` bytes."""
        size = width * count
        bad = positions(offset % size)
        if len(bad):
            raise Fault(Misaligned, bad[0], f"{self.name} offset {offset[bad[0]]:#x}, access of {size} bytes")
        bad = positions((offset < 0) | (offset + size > self.size))
        if len(bad):
            raise Fault(OutOfBounds, bad[0], f"{self.name} offset {offset[bad[0]]:#x} of {self.size:#x} bytes")
        return (bank * self.stride + offset) // width

    def load(self, bank: Array, offset: Array, width: int, count: int) -> tuple[list[Array], list[Array] | None]:
        """Return the loaded elements, and masks of the uninitialised elements or None if all are initialised."""
        index = self.locate(bank, offset, width, count)
        data, flags = self._views[width]
        whole = _repeat(ALLOCATED | WRITTEN, width)
        found = [flags[index + i] for i in range(count)]
        values = [data[index + i] for i in range(count)]
        if not any(any_true(one != whole) for one in found):
            return values, None
        for i, one in enumerate(found):
            self._check(one, offset + i * width, width)
        return values, [one != whole for one in found]

    def _check(self, found: Array, offset: Array, width: int) -> None:
        """Check that the accessed bytes are allocated and belong to no mbarrier."""
        wrong = (found & _repeat(ALLOCATED | BARRIER, width)) != _repeat(ALLOCATED, width)
        if any_true(wrong):
            bad = positions(wrong)[0]
            raise self._fault(int(found[bad]), bad, offset[bad], width)

    def store(self, bank: Array, offset: Array, width: int, values: list[Array]) -> None:
        index = self.locate(bank, offset, width, len(values))
        data, flags = self._views[width]
        for i, value in enumerate(values):
            self._check(flags[index + i], offset + i * width, width)
            data[index + i] = value
            flags[index + i] = _repeat(ALLOCATED | WRITTEN, width)

    def _fault(self, found: int, position: int, offset: int, width: int) -> Fault:
        for i in range(width):
            flags = found >> 8 * i & 0xFF
            where = f"{self.name} offset {offset + i:#x}"
            if not flags & ALLOCATED:
                return Fault(OutOfBounds, position, where)
            if flags & BARRIER:
                return Fault(EmulationError, position, f"{where} is part of an mbarrier")
        return Fault(Uninitialised, position, f"{self.name} offset {offset:#x}, {width} bytes")

    def forget(self, bank: Array, offset: Array, width: int) -> None:
        """Mark bytes as uninitialised, because undefined values were stored to them."""
        flags = self._views[width][1]
        flags[(bank * self.stride + offset) // width] = _repeat(ALLOCATED, width)

    def span(self, bank: int, offset: int, size: int, reads: bool) -> slice:
        """Check the bytes that a bulk copy reads or writes, and return the indices of these bytes as a slice.

        The bytes must be aligned, in bounds and allocated, and must not be part of an mbarrier. If ``reads``, they must
        also be initialised.
        """
        if offset % 16 or size % 16:
            raise Fault(Misaligned, 0, f"{self.name} offset {offset:#x}, {size} bytes in bulk")
        if offset < 0 or offset + size > self.size:
            raise Fault(OutOfBounds, 0, f"{self.name} offset {offset:#x}, {size} bytes, of {self.size:#x}")
        where = slice(bank * self.stride + offset, bank * self.stride + offset + size)
        found = self.flags[where]
        wrong = (found & (ALLOCATED | BARRIER)) != ALLOCATED
        if reads:
            wrong |= (found & WRITTEN) == 0
        if any_true(wrong):
            first = int(positions(wrong)[0])
            raise self._fault(int(found[first]), 0, offset + first, 1)
        return where


@functools.cache
def _repeat(flag: int, width: int):
    return UNSIGNED[8 * width].type(int.from_bytes(bytes([flag]) * width, "little"))
