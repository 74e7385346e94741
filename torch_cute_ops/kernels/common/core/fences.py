"""The order of a thread's accesses to shared memory and those of the async proxy: bulk copies and wgmma."""

import cutlass.cute as cute


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
