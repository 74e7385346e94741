"""The order of loads and stores of shared memory with copies and products that access it by themselves."""

import cutlass.cute as cute


def fence_async() -> None:
    """What this thread stored to shared memory is for bulk copies and warpgroup products to read, after a barrier; and
    what it loaded of it comes before bulk copies that write there.

    Loads need it whose results nothing has used when the barrier is passed, in the machine code: on an H200 copies of
    what was in L2 overtook them. (PTX ISA, "Memory Consistency Model": generic and async proxy.)
    """
    cute.arch.fence_proxy("async.shared", space="cta")
