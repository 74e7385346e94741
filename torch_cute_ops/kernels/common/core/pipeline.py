"""Shared-memory pipelines (stages with full and empty mbarriers), and fences of the async proxy."""

from dataclasses import dataclass
from typing import Final

import cutlass.cute as cute
from cutlass import Int32, Uint32

from torch_cute_ops.kernels.common.core import ptx

VECTOR_BYTES: Final = 16
"""Number of bytes of a vector load or store. Shared-memory swizzles permute vectors of this size within a row."""


@dataclass(frozen=True)
class Pipeline:
    """A shared-memory pipeline: a ring of stages that producers fill and consumers empty.

    A ``full`` and an ``empty`` mbarrier belong to each stage. Producers and consumers track a stage index and a phase
    parity, and advance both with ``next``. Consumers start with parity 0. Producers start with parity 1, so that a wait
    for an unused stage returns at once. The class is frozen, because the DSL would carry the fields of a mutable object
    through every loop.

    Attributes:
        full: mbarriers, one per stage, at which producers arrive.
        empty: mbarriers, one per stage, at which consumers arrive.
        stages: number of pipeline stages.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int

    @classmethod
    def at(cls, barriers: cute.Pointer, stages: int) -> "Pipeline":
        """Return a pipeline whose ``2 * stages`` mbarriers begin at ``barriers``, full before empty."""
        return cls(barriers, barriers + stages, stages)

    def init(self, full: int, empty: int) -> None:
        """Initialise the mbarriers, in one thread.

        Args:
            full: number of arrivals that complete a phase of a full barrier, in addition to the bytes of copies.
            empty: number of arrivals that complete a phase of an empty barrier.
        """
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, full)
            cute.arch.mbarrier_init(self.empty + stage, empty)

    def next(self, stage, parity) -> tuple:
        """Return the index of the stage after ``stage``, and the parity of its phase."""
        return next_stage(stage, parity, self.stages)

    def wait_full(self, stage, parity) -> None:
        """Wait, as a consumer, until a stage is full."""
        ptx.wait(self.full + stage, parity)

    def wait_empty(self, stage, parity, sleep: int = 0) -> None:
        """Wait, as a producer, until a stage is empty. ``sleep`` is the polling interval in nanoseconds (see
        ``ptx.wait``)."""
        ptx.wait(self.empty + stage, parity, sleep)

    def arrive_full(self, stage, condition) -> None:
        """Arrive at a stage's full barrier if ``condition``."""
        ptx.arrive_if(self.full + stage, condition)

    def arrive_empty(self, stage, condition) -> None:
        """Arrive at a stage's empty barrier if ``condition``."""
        ptx.arrive_if(self.empty + stage, condition)

    def release(self, stage, leads, exists=True) -> None:
        """Release a stage after this warp's last load from it. The module's function ``release`` describes the
        arguments."""
        release(self.empty + stage, leads, exists)


def next_stage(stage, parity, stages: int) -> tuple:
    """Return the index of the stage after ``stage``, and the parity of its phase. If ``stage`` is a constant, both
    results are constants."""
    if isinstance(stage, int):
        return (stage + 1, parity) if stage + 1 < stages else (0, parity ^ 1)
    wraps = stage + 1 == stages
    return ptx.select(wraps, Int32(0), stage + 1), ptx.select(wraps, parity ^ 1, parity)


def release(empty: cute.Pointer, leads, exists=True) -> None:
    """Release a stage after this warp's last load from it: arrive at the stage's empty barrier.

    Args:
        empty: the stage's empty barrier.
        leads: 1 in the lane that arrives for its warp, 0 in all other lanes.
        exists: condition under which the warp arrives.
    """
    # Without the fence, loads could complete after the arrival. MMAs that use the loaded values do not prevent this,
    # because ptxas may move the MMAs past the arrival.
    fence_async()
    cute.arch.sync_warp()
    ptx.arrive_if(empty, ptx.select(exists, leads, Uint32(0)))


def fence_async() -> None:
    """Order this thread's accesses to shared memory before later accesses by the async proxy (wgmma, bulk copies).

    The threads must synchronise after the fence. After that, wgmma and bulk copies see this thread's stores, and bulk
    copies do not overwrite data that the thread is still loading. A load needs the fence if the thread uses the loaded
    value only after the barrier: on an H200, bulk copies whose source was in L2 overtook such loads. (PTX ISA, "Memory
    Consistency Model": generic and async proxy.)
    """
    cute.arch.fence_proxy("async.shared", space="cta")


def fence_async_global() -> None:
    """Order accesses to global memory by this thread and by bulk copies: accesses before this fence precede accesses
    after it.

    If one thread's accesses must be ordered with another thread's bulk copies, both threads must fence: one before and
    one after they synchronise.
    """
    cute.arch.fence_proxy("async.global")
