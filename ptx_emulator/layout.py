"""Positions of a launch's threads in the grid and in clusters, and addresses of the launch's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptx_emulator.memory import ALLOCATED, REGION_SHIFT, SHARED_BASE, WRITTEN, EmulationError, Memory
from ptx_emulator.parser import Program
from ptx_emulator.values import Array

WARP = 32


@dataclass
class Launch:
    """Arguments of a launch.

    Attributes:
        grid, block, cluster: Sizes in three dimensions.
        params: Bytes of each kernel parameter.
        dynamic_shared: Bytes of dynamic shared memory.
        overlaps: True if the launch may start before the previous launch has ended (programmatic dependent launch).
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: list[bytes]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    overlaps: bool = False


class GlobalMemory:
    """Allocations that launches can access."""

    def __init__(self) -> None:
        self.regions: list[Memory] = []

    def allocate(self, name: str, contents: Array, align: int = 16, accessible: Array | None = None) -> int:
        """Copy ``contents`` into a new allocation, and return the address of the allocation.

        The address is a multiple of ``align``, but not of any larger power of two, so that a kernel that relies on more
        alignment fails. ``accessible`` is a mask of the bytes that kernels may access; None means all bytes.
        """
        lead = align % 256
        memory = Memory(name, lead + len(contents))
        memory.data[lead : lead + len(contents)] = contents
        flags = np.full(len(contents), ALLOCATED | WRITTEN, np.uint8)
        if accessible is not None:
            flags = np.where(accessible, flags, 0)
        memory.flags[lead : lead + len(contents)] = flags
        self.regions.append(memory)
        return (len(self.regions) << REGION_SHIFT) + lead

    def contents(self, address: int, size: int) -> Array:
        start = address & ((1 << REGION_SHIFT) - 1)
        return self.regions[(address >> REGION_SHIFT) - 1].data[start : start + size]

    def copies(self) -> list[Array]:
        """Return a copy of every allocation's contents."""
        return [region.data.copy() for region in self.regions]

    def take_back(self, copies: list[Array]) -> Callable[[], None]:
        """Restore the contents ``copies``, which ``copies()`` returned earlier. Return a function that writes the
        present contents again.

        Allocations that were made after ``copies()``, for parameters of launches, are not changed.
        """
        changed = [
            (region.data, then, region.data.copy())
            for region, then in zip(self.regions, copies, strict=False)
            if not np.array_equal(region.data, then)
        ]
        for data, then, _ in changed:
            data[:] = then

        def put_back() -> None:
            for data, _, now in changed:
                data[:] = now

        return put_back


class Layout:
    """Positions of all threads, and addresses of all memory, in one launch of ``program``."""

    def __init__(self, program: Program, launch: Launch, memory: GlobalMemory):
        self.program = program
        self.launch = launch
        self.global_memory = memory
        self._lay_out_threads()
        self._lay_out_memory()

    def _lay_out_threads(self) -> None:
        launch = self.launch
        self.cta_threads = int(np.prod(launch.block))
        self.ctas = int(np.prod(launch.grid))
        self.cluster_ctas = int(np.prod(launch.cluster))
        if self.cta_threads > 1024 or min(*launch.grid, *launch.block, *launch.cluster) < 1:
            raise EmulationError(f"no launch can have grid {launch.grid}, block {launch.block}")
        if any(size % part for size, part in zip(launch.grid, launch.cluster, strict=True)):
            raise EmulationError(f"grid {launch.grid} is no multiple of cluster {launch.cluster}")
        self.threads = self.ctas * self.cta_threads
        thread = np.arange(self.threads)
        self.cta, self.tid = np.divmod(thread, self.cta_threads)
        self.lane = (self.tid % WARP).astype(np.int64)
        warps = -(-self.cta_threads // WARP)
        self.warp = self.cta * warps + self.tid // WARP
        self.warps = warps * self.ctas
        self.warp_first = thread - self.lane
        lanes = np.bincount(self.warp, minlength=self.warps)
        self.warp_mask = ((1 << lanes.astype(np.int64)) - 1)[self.warp]
        coordinate = np.stack(np.unravel_index(self.cta, launch.grid[::-1])[::-1])
        self.ctaid = coordinate
        self.tid3 = np.stack(np.unravel_index(self.tid, launch.block[::-1])[::-1])
        cluster = np.array(launch.cluster)[:, None]
        self.cluster_ctaid, self.clusterid = coordinate % cluster, coordinate // cluster
        self.nclusterid = np.array(launch.grid) // np.array(launch.cluster)
        self.rank = np.ravel_multi_index(self.cluster_ctaid[::-1], launch.cluster[::-1])
        self.cluster = np.ravel_multi_index(self.clusterid[::-1], tuple(self.nclusterid[::-1]))
        self.clusters = self.ctas // self.cluster_ctas
        # ``cta_of_rank[cluster, rank]`` is the number of the CTA with this rank in the cluster.
        self.cta_of_rank = np.zeros((self.clusters, self.cluster_ctas), np.int64)
        self.cta_of_rank[self.cluster, self.rank] = self.cta
        self.cta_rank = self.rank[:: self.cta_threads]
        self.position = np.zeros(self.threads, np.int64)

    def _lay_out_memory(self) -> None:
        self.symbols: dict[str, tuple[str, int]] = {}

        def place(space: str, at: int, dynamic: int) -> int:
            # Dynamic shared memory follows all static variables.
            for variable in sorted(self.program.variables.get(space, []), key=lambda v: v.size is None):
                at = -(-at // variable.align) * variable.align
                self.symbols[variable.name] = (space, at)
                at += dynamic if variable.size is None else variable.size
            return at

        end = place("shared", SHARED_BASE, self.launch.dynamic_shared)
        self.shared = Memory("shared memory", end, self.ctas)
        self.shared.flags.reshape(self.ctas, -1)[:, SHARED_BASE:end] = ALLOCATED
        self.shared_bytes = end - SHARED_BASE
        end = place("local", 16, 0)
        self.local = Memory("local memory", end, self.threads if end > 16 else 1)
        self.local.flags.reshape(-1, self.local.stride)[:, 16:end] = ALLOCATED
        for space in ("global", "const"):
            for variable in self.program.variables.get(space, []):
                contents = np.frombuffer(variable.initial.ljust(variable.size or 0, b"\0"), np.uint8)
                self.symbols[variable.name] = (
                    "global",
                    self.global_memory.allocate(variable.name, contents, variable.align),
                )
        sizes = [variable.size for variable in self.program.params]
        given = [len(param) for param in self.launch.params]
        if sizes != given:
            raise EmulationError(f"the kernel's parameters have {sizes} bytes, not {given}")
        self.params = dict(zip((v.name for v in self.program.params), self.launch.params, strict=True))
        # A tensor map is a parameter whose address the kernel uses. So copy the map to global memory.
        for variable in self.program.params:
            if variable.align == 64:
                contents = np.frombuffer(self.params[variable.name], np.uint8)
                self.symbols[variable.name] = "global", self.global_memory.allocate(variable.name, contents, 64)
