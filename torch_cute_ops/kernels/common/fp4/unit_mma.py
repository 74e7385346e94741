"""MMAs of a warp, or of a warpgroup, with rows of an FP4 weight and a unit's tokens, a chunk of k at a time.

Both operands are in stages in shared memory: the weight in a ``WeightRing``, the tokens in the layouts of
``kernels.common.fp4.activations``. Each warp has 16 rows.
"""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Uint32
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.convert import DSL_DTYPES
from torch_cute_ops.kernels.common.core.fences import fence_async
from torch_cute_ops.kernels.common.fp4.activation_layout import ActivationLayout
from torch_cute_ops.kernels.common.fp4.activations import STEPS_BYTES
from torch_cute_ops.kernels.common.fp4.warp_mma import multiply_word
from torch_cute_ops.kernels.common.fp4.warpgroup_mma import warpgroup_mma
from torch_cute_ops.kernels.common.fp4.weight_ring import WeightRing


class UnitMma:
    """The MMAs of units of ``group`` tokens.

    Attributes:
        pitch: bytes from a token of a stage to the next: those of a token, unless ``__init__`` is told.
        last_blocks: blocks of a row where those of its last chunk are fewer than a chunk has; else ``None``.
    """

    def __init__(
        self,
        ring: WeightRing,
        arranged: ActivationLayout,
        group: int,
        stages: int,
        width: int,
        pitch: int | None = None,
    ):
        self.ring, self.group, self.stages, self.chunk = ring, group, stages, arranged.chunk
        self.dtype, self.by_warp = DSL_DTYPES[arranged.dtype], arranged.by_warp
        self.pitch = pitch or arranged.token_bytes
        self.last_blocks = width // ring.fmt.block_size if width % arranged.chunk else None

    @property
    def stage_tokens(self) -> int:
        """Activations of a stage, bytes."""
        return self.group * self.pitch

    def start_of(self, tokens: cute.Pointer) -> Callable | None:
        """What starts the MMAs of warpgroups with the stages of activations at ``tokens``; ``None`` for those of
        warps."""
        if self.by_warp:
            return None
        # All elements of a group of eight tokens, then those of the next
        return warpgroup_mma(self.dtype, self.group, self.chunk, self.stages, (1, 0, 2), tokens)

    def multiply(
        self, start, part: int, parts: int, chunk, stage, adds, rows, lane, sums, smem, free_before, phase=None
    ) -> None:
        """Add a chunk to the sums, with a part of each lane's codes.

        The MMAs of a warpgroup may still run at the end, but those of the chunk before are done: then ``free_before``
        is called, if it is not ``None``.

        Args:
            start: what ``start_of`` returns.
            part, parts: which part of the words of codes, of how many.
            chunk, stage: the chunk, and the stage of its activations.
            adds: whether a warpgroup adds to the sums or replaces them; a warp always adds.
            rows: of each of the lane's two rows its stage in the ring of the weight, its row there, and that of its
                scales.
            lane: index in the warp.
            sums: accumulators, four for each eight tokens.
            smem: has the pointers ``codes``, ``scales`` and ``tokens``.
            free_before: frees the stage of the chunk before.
            phase: of the expert, as ``WeightRing.factors`` takes it.
        """
        quad = lane % 4
        existing = None
        if self.last_blocks is not None:
            existing = self.ring.existing(self.last_blocks - chunk * self.ring.blocks, quad)
        codes = [self.ring.codes(smem.codes, at, row, quad) for at, row, _ in rows]
        scales = [self.ring.factors(smem.scales, at, row, quad, existing, self.dtype, phase) for at, _, row in rows]
        count = self.ring.words // parts
        for i in range(count):
            word = part * count + i
            pairs = self.ring.pairs(codes, scales, word, self.dtype)
            if start is None:
                at = smem.tokens + cute.assume(stage * self.stage_tokens, divby=STEPS_BYTES)
                multiply_word(pairs, word, self.group, at, self.pitch, lane, sums, self.dtype)
                continue
            start(pairs, word, stage, adds if i == 0 else True, sums)
            # The MMAs of the word before are done, and its registers free.
            warpgroup.wait_group(1)
            if i == 0 and free_before is not None:
                free_before()


def free(barrier, leads, exists=True) -> None:
    """A warp frees a stage, if it exists. ``leads``: whether this lane arrives for its warp, 1 or 0."""
    # All lanes have read. (The MMAs do not ensure it: ptxas moves them behind the arrival.)
    fence_async()
    cute.arch.sync_warp()
    ptx.arrive_if(barrier, ptx.select(exists, leads, Uint32(0)))
