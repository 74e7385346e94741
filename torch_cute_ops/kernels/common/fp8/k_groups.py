"""Sums of the accumulators of two K groups: sets of consumer warpgroups that multiply different k tiles of a tile."""

from typing import Final

import cutlass.cute as cute
from cutlass import range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp8.gemm import arrive
from torch_cute_ops.kernels.common.fp8.layouts import GROUPS, FP8GemmConfig
from torch_cute_ops.kernels.common.fp8.weights import piece_at

K_GROUP_THREADS: Final = GROUPS * WARPGROUP
"""Number of threads of a K group."""


class KGroupSums:
    """Adds the accumulators of the second K group to the accumulators of the first K group.

    The second group passes its accumulators through shared memory: the first ``tile_n * tile_m`` words of
    ``Smem.workspace``.
    """

    def __init__(self, config: FP8GemmConfig):
        self.config = config

    @cute.jit
    def leave(self, acc, turn, consumer, smem):
        """Store the second group's accumulators for the first group. Before that, wait until the first group has read
        the previous tile's accumulators."""
        ptx.wait(smem.k_groups.empty, turn ^ 1)
        for i in range_constexpr(0, self.config.mma_n // 2, 4):
            store_words([ptx.bits_of(acc[i + j]) for j in range(4)], self._left(i, consumer, smem))
        arrive(smem.k_groups.full, consumer.lane)

    @cute.jit
    def join(self, acc, turn, consumer, smem):
        """Wait for the second group's accumulators, and add them to the first group's accumulators."""
        ptx.wait(smem.k_groups.full, turn)
        for i in range_constexpr(0, self.config.mma_n // 2, 4):
            words = load_words(self._left(i, consumer, smem))
            for j in range_constexpr(4):
                acc[i + j] = ptx.add_rn(acc[i + j], ptx.float_of(words[j]))
        arrive(smem.k_groups.empty, consumer.lane)

    def _left(self, i: int, consumer, smem) -> cute.Tensor:
        """Return a view of four of a thread's accumulators in the workspace, starting with the ``i``-th accumulator."""
        return piece_at(smem.workspace, (i // 4 * K_GROUP_THREADS + consumer.tid) * VECTOR_BYTES)
