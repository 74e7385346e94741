"""Memory as words, four at a time."""

import cutlass.cute as cute
from cutlass import Constexpr, Uint32

from torch_cute_ops.kernels.common.core.convert import store_words
from torch_cute_ops.kernels.common.core.fences import fence_async


def by_four(at: cute.Pointer, size: int) -> cute.Tensor:
    """``size`` bytes as words (n, 4)."""
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout((size // 16, 4), stride=(4, 1)))


@cute.jit
def clear(at: cute.Pointer, size: Constexpr[int], tid, threads: Constexpr[int]):
    """The threads of a CTA zero ``size`` bytes of shared memory, which bulk copies may overwrite when they have met."""
    words = by_four(at, size)
    for i in range(tid, cute.size(words, mode=[0]), threads):
        store_words([Uint32(0)] * 4, words[i, None])
    fence_async()
