"""The MMAs of a consumer warp, or of its warpgroup, with a chunk of its rows of the weight and the tokens of a tile: of
several rows of activations here, of one in ``row`` and ``codes``."""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.core.pipeline import fence_async, next_stage
from torch_cute_ops.kernels.common.fp4.decode import acc_scale
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.kernels.common.fp4.mma import WORD_STEPS, warp_mma, warpgroup_mma
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.config import QUARTERS, Config
from torch_cute_ops.kernels.fp4_wgmma.part import tokens_at

QUARTER_WORDS = K_TILE // QUARTERS // 16 // WORD_STEPS
"""Words of a lane's codes that a quarter of the activations of a chunk is multiplied with."""


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        group, thread: the warpgroup, and the thread in it.
        lane, quad: index in the warp, and among the four lanes that share a row.
        row: the first of its two rows of the weight in the tile; the other is ``row + 8``.
        scale_row: the same, counted from the first row of the tile's first tile of scales.
        turn: which of the warps of its band its warp is: the number of its first chunk of a segment.
        existing: the mask of its scales of the last chunk of a row of the weight.
        leads: whether it arrives at barriers for its warp, 1 or 0.
    """

    group: Int32
    lane: Int32
    thread: Int32
    quad: Int32
    row: Int32
    scale_row: Int32
    turn: Int32 | int
    existing: Uint32
    leads: Uint32


class Stages(NamedTuple):
    """Where a consumer warp is in both rings.

    Attributes:
        stage, parity: the next stage of the weight, and the parity of its barriers.
        token_stage, token_parity: the same of the activations.
        last: the stage of activations that was multiplied last.
    """

    stage: Int32
    parity: Int32
    token_stage: Int32
    token_parity: Int32
    last: Int32


class Mma:
    """The interface of all MMAs. What does nothing here is for those of some kinds alone.

    Attributes:
        acc_scale: the factor from their sums to true sums, a power of two.
    """

    def __init__(self, config: Config, ring: WeightStages, acc_scale: float):
        self.config, self.ring, self.acc_scale = config, ring, acc_scale

    def start_of(self, smem) -> Callable | None:
        """What ``multiply`` starts MMAs of the warpgroup with; ``None``: they are the warp's own."""
        return None

    def multiply(self, start, adds, first, i, stages: Stages, sums, consumer: Consumer, part, smem) -> Stages:
        """Multiply the ``i``-th chunk of a segment that begins with chunk ``first``; free its stages, or leave that to
        the next call or to ``end``. Returns the next stages.

        Args:
            start: what ``start_of`` returns.
            adds: whether a warpgroup adds to the sums or replaces them; a warp always adds.
            first, i: the chunk.
            stages: the stages that it arrives in.
            sums: the accumulators.
            consumer, part, smem: of the thread and its CTA; ``scale_row`` is that of the segment's tile.
        """
        raise NotImplementedError

    def pass_by(self, stages: Stages, consumer: Consumer, smem) -> Stages:
        """Leave a chunk to another warp of the band. The warp waits for it and frees it all the same: a wait by parity
        takes whoever has seen every phase of the barrier."""
        stage, parity, token_stage, token_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        smem.weight_pipeline.arrive_empty(stage, consumer.leads)
        smem.a_pipeline.wait_full(token_stage, token_parity)
        smem.a_pipeline.arrive_empty(token_stage, consumer.leads)
        return self._after(stages)

    def _after(self, stages: Stages) -> Stages:
        """The stages after those of a chunk, where the activations' are whole chunks too."""
        c = self.config
        return Stages(
            *next_stage(stages.stage, stages.parity, c.stages),
            *next_stage(stages.token_stage, stages.token_parity, c.token_stages),
            stages.token_stage,
        )

    def wait(self) -> None:
        """Wait for the MMAs: then the sums are there."""

    def end(self, stages: Stages, consumer: Consumer, smem) -> None:
        """Wait for the MMAs of a segment, and free what they have read."""

    def add_up(self, sums) -> None:
        """Make totals of a segment's sums, where these are parts of them."""

    def _existing(self, chunk, consumer: Consumer, part) -> Uint32:
        """The mask of a lane's scales of a chunk, for ``WeightStages.factors``."""
        return ptx.select(chunk == part.chunks - 1, consumer.existing, Uint32(0xFFFFFFFF))


class TileMma(Mma):
    """MMAs with several rows of activations: codes are decoded and multiplied by their scales before them."""

    def __init__(self, config: Config, ring: WeightStages):
        super().__init__(config, ring, acc_scale(config.operands.fmt, config.operands.decodes_both))
        self.dtype = DSL_DTYPES[config.operands.dtype]

    def _load(self, stage, existing, consumer: Consumer, smem) -> tuple[list, list]:
        """A lane's codes of its two rows in a stage, and their factors."""
        rows, scale_rows = ((row, row + 8) for row in (consumer.row, consumer.scale_row))
        codes = [self.ring.codes(smem.codes, stage, row, consumer.quad) for row in rows]
        factors = [
            self.ring.factors(smem.scales, stage, row, consumer.quad, existing, self.dtype) for row in scale_rows
        ]
        return codes, factors


class WarpMma(TileMma):
    """MMAs of a warp (mma.sync). A stage of activations is a whole chunk."""

    def multiply(self, start, adds, first, i, stages: Stages, sums, consumer: Consumer, part, smem) -> Stages:
        c = self.config
        stage, parity, token_stage, token_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        codes, factors = self._load(stage, self._existing(first + i, consumer, part), consumer, smem)
        for word in range(self.ring.words):
            pairs = self.ring.pairs(codes, factors, word, self.dtype)
            if word == 0:
                smem.a_pipeline.wait_full(token_stage, token_parity)
            at = tokens_at(c, token_stage, smem)
            warp_mma(pairs, word, c.tokens, at, c.arranged.token_bytes, consumer.lane, sums, self.dtype)
            if word == self.ring.words // 2:
                # All lanes have read their codes. (That this MMA takes a word of the last load does not ensure it:
                # ptxas moves it, and so the first use of a load, behind the arrival.)
                fence_async()
                cute.arch.sync_warp()
                smem.weight_pipeline.arrive_empty(stage, consumer.leads)
                stage, parity = smem.weight_pipeline.next(stage, parity)
        if not c.arranges:
            fence_async()
        cute.arch.sync_warp()
        smem.a_pipeline.arrive_empty(token_stage, consumer.leads)
        return Stages(stage, parity, *smem.a_pipeline.next(token_stage, token_parity), token_stage)


class WarpgroupMma(TileMma):
    """MMAs of a warpgroup (wgmma). Those of a word run while the next is decoded."""

    def start_of(self, smem) -> Callable:
        c = self.config
        sizes = c.tokens, c.span * K_TILE // QUARTERS, c.token_stages
        return warpgroup_mma(self.dtype, *sizes, (0, 1, 2), smem.tokens)

    def multiply(self, start, adds, first, i, stages: Stages, sums, consumer: Consumer, part, smem) -> Stages:
        c = self.config
        stage, parity, token_stage, token_parity, last = stages
        words = QUARTER_WORDS * c.span
        smem.weight_pipeline.wait_full(stage, parity)
        codes, factors = self._load(stage, self._existing(first + i, consumer, part), consumer, smem)
        for word in range(self.ring.words):
            pairs = self.ring.pairs(codes, factors, word, self.dtype)
            if word % words == 0:
                smem.a_pipeline.wait_full(token_stage, token_parity)
            start(pairs, word % words, token_stage, adds if word == 0 else True, sums)
            if word == self.ring.words // 2:
                # All lanes have read their codes, since this wgmma takes a word of the last load. (An arrival does
                # not wait for loads whose results are not used yet: on an H200 copies overtook them.)
                cute.arch.sync_warp()
                smem.weight_pipeline.arrive_empty(stage, consumer.leads)
                stage, parity = smem.weight_pipeline.next(stage, parity)
            # The MMAs of the word before are done, and its registers free.
            warpgroup.wait_group(1)
            if word % words == 0:
                leads = consumer.leads if word else ptx.select(i > 0, consumer.leads, Uint32(0))
                smem.a_pipeline.arrive_empty(last, leads)
            if word % words == words - 1:
                last = token_stage
                token_stage, token_parity = smem.a_pipeline.next(token_stage, token_parity)
        return Stages(stage, parity, token_stage, token_parity, last)

    def wait(self) -> None:
        warpgroup.wait_group(0)

    def end(self, stages: Stages, consumer: Consumer, smem) -> None:
        self.wait()
        smem.a_pipeline.arrive_empty(stages.last, consumer.leads)
