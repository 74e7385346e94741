"""Stages of a shared-memory pipeline, fences of the async proxy, and programmatic dependent launch."""

from typing import Final

import cutlass.cute as cute
from cutlass import Int32

from torch_cute_ops.kernels.common.core import ptx

PIECE: Final = 16  # bytes that the swizzle moves together


def next_stage(stage, parity, stages: int) -> tuple:
    """The next stage of a ring and the parity of its barriers' next phase; for a constant stage, a constant."""
    if isinstance(stage, int):
        return (stage + 1, parity) if stage + 1 < stages else (0, parity ^ 1)
    wraps = stage + 1 == stages
    return ptx.select(wraps, Int32(0), stage + 1), ptx.select(wraps, parity ^ 1, parity)


def fence_async() -> None:
    """Order this thread's accesses to shared memory before those of the async proxy that follow a barrier: wgmma and
    bulk copies see what it stored, and bulk copies do not overwrite what it loads.

    Loads need the fence if the machine code has not used their results before the barrier: on an H200, copies of data
    in L2 overtook them. (PTX ISA, "Memory Consistency Model": generic and async proxy.)
    """
    cute.arch.fence_proxy("async.shared", space="cta")


def fence_async_global() -> None:
    """Order this thread's accesses to global memory before bulk copies that follow a synchronisation, or behind those
    that are before one: both sides of one between threads have it."""
    cute.arch.fence_proxy("async.global")


# Programmatic dependent launch (PDL)
#
# A kernel starts when every CTA of the previous kernel has released its dependents, or ended. Each kernel of this
# package releases its dependents only after its own wait, which returns when the previous kernel has ended and its
# stores are visible. Before a kernel has waited, at most one other kernel is running, so it may read only data that was
# complete before that other kernel was launched. It writes nothing before the wait because the previous kernel may
# still read the memory.
#
# Exception: memory that only the second kernel of an op touches. The previous kernel is then the op's first one, which
# does not touch that memory and has itself waited. ``fp4_gated_experts`` zeroes the padding of scales that early.
#
# This is the promise of ``static_weight``: the weight and its scales were complete before the previous launch. A weight
# that the previous launch writes is not static. For the same reason the second kernel of an op may read the op's inputs
# before the first one ends: they were complete before the first kernel passed its wait.


def pdl_start(pdl: bool) -> None:
    """Wait for the kernels before this one, and then let those after it start; ``pdl`` is whether launches overlap.

    So all that was before this kernel has been done when one after it starts, but for what this one does.
    """
    if pdl:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
