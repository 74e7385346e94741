"""How the stages are filled: the producer warp copies the weight, and the activations where these have been rearranged;
elsewhere the warps beside it rearrange them, the first ones the consumers."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import prefetch
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, K_TILE
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.config import QUARTERS, Config
from torch_cute_ops.kernels.fp4_wgmma.part import segment_before, tokens_at


class Copies:
    """What fills the stages of one ``Config``."""

    def __init__(self, config: Config, ring: WeightStages, activations: Activations):
        self.config, self.ring, self.activations = config, ring, activations
        # Pieces of a lane: of a group of eight tokens, in a step, and steps of a chunk
        self.each = activations.pieces * min(config.tokens, ATOM_M) // 32
        pieces = self.each * config.groups_of_tokens // config.members
        self.together = min(config.pieces_together, pieces)
        self.steps = pieces // self.together

    @cute.jit
    def produce(self, weight, part, smem):
        """The producer warp: copy everything that the worker multiplies, in that order.

        ``Config.ahead`` chunks of the weight are copied before the kernel before this one has ended. Where that is the
        op's own, which rearranges the activations, this is safe because it lets this kernel start only after its own
        wait for all kernels before. A static weight needs no wait (``kernels.common.core.launch``), and this warp
        reads nothing else.
        """
        c = self.config
        full, loaded = smem.weight_pipeline.full, Int32(0)
        if const_expr(c.pdl and c.ahead is not None):
            if const_expr(c.ahead > 0):
                unit = part.end
                ahead = cutlass.min(part.end - part.begin, Int32(c.ahead))
                while loaded < ahead:
                    tile, first, count = segment_before(unit, part)
                    for i in range(cutlass.min(count, ahead - loaded)):
                        self.ring.load(tile, first + i, 0, loaded, full + loaded, weight, part.n, part.blocks)
                        loaded += 1
                    unit -= count
            cute.arch.griddepcontrol_wait()
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        token_stage, token_parity = Int32(0), Int32(1)
        unit = part.end
        done = Int32(0)
        while unit > part.begin:
            tile, first, count = segment_before(unit, part)
            for i in range(count):
                if done >= loaded:
                    smem.weight_pipeline.wait_empty(stage, parity)
                    self.ring.load(tile, first + i, 0, stage, full + stage, weight, part.n, part.blocks)
                done += 1
                stage, parity = smem.weight_pipeline.next(stage, parity)
                if const_expr(not c.arranges):
                    for quarter in range_constexpr(0, QUARTERS, c.span):
                        smem.a_pipeline.wait_empty(token_stage, token_parity)
                        self._load_tokens(first + i, quarter, token_stage, part, smem)
                        token_stage, token_parity = smem.a_pipeline.next(token_stage, token_parity)
            unit -= count
        if const_expr(c.prefetches):
            prefetch(part.prefetch, part.token_tile * part.workers + part.worker, part.token_tiles * part.workers)

    @cute.jit
    def arrange_first(self, tid, part, smem):
        """The consumers rearrange the activations of the first chunks together, while the weight is on its way."""
        c = self.config
        chunks = cutlass.min(part.end - part.begin, Int32(c.first_chunks))
        pieces, threads = self.activations.pieces, c.warps * 32
        for item in cutlass.range(tid, chunks * (pieces * c.tokens), threads, unroll=1):
            place, piece, chunk = item % c.tokens, item // c.tokens % pieces, item // (c.tokens * pieces)
            start = (part.begin % part.chunks + chunk) * K_TILE
            token = cutlass.min(part.token_tile * c.tokens + place, part.m - 1)
            left = part.blocks * c.operands.fmt.block_size - start
            words = self.activations.read(part.a, part.a_scale, token, start, left, piece)
            self.activations.store(words, c.groups_of_tokens, piece, place, tokens_at(c, chunk, smem))
        if const_expr(not c.by_warp):
            # (Before wgmma there is another fence, when a stage of codes is freed; this does not rely on it.)
            fence_async()
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        ptx.arrive_if(smem.a_pipeline.full + cutlass.min(tid, chunks - 1), Uint32(tid < chunks))

    @cute.jit
    def arrange(self, helper, lane, part, smem):
        """A warp, by its number, rearranges activations from memory to their stages. Its team takes turns with the
        others at chunks, after the first ones where the consumers rearrange these; and the warps of a team at groups of
        eight tokens."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        team, member = helper // c.members, helper % c.members
        tokens = min(c.tokens, ATOM_M)
        for use in range(c.first_chunks + team, part.end - part.begin, c.teams):
            start = (part.begin % part.chunks + use) * K_TILE
            stage = use % c.token_stages
            base = tokens_at(c, stage, smem)
            # Not unrolled, for lack of registers
            for step in cutlass.range(self.steps, unroll=1):
                items = [
                    ((group * c.members + member) * ATOM_M + lane % tokens, lane // tokens + first, after)
                    for group, first, after in self._pieces_of(step)
                ]
                read = []
                for place, piece, after in items:
                    # For tokens that do not exist the last one again, whose results are not stored
                    token = cutlass.min(part.token_tile * c.tokens + place, part.m - 1)
                    left = part.blocks * c.operands.fmt.block_size - start
                    read.append(self.activations.read(part.a, part.a_scale, token, start, left, piece, after))
                if step == 0:
                    ptx.wait(smem.a_pipeline.empty + stage, (use // c.token_stages + 1) % 2)
                for (place, piece, after), words in zip(items, read, strict=True):
                    self.activations.store(words, c.groups_of_tokens, piece + after, place, base)
            if const_expr(not c.by_warp):
                # wgmma reads shared memory through the async proxy.
                fence_async()
            cute.arch.sync_warp()
            ptx.arrive_if(smem.a_pipeline.full + stage, Uint32(lane == 0))

    def _pieces_of(self, step) -> list[tuple]:
        """The pieces that a lane loads in a step: the group of tokens among those of its warp, and the number of the
        first lane's piece, as a sum whose second part is constant."""
        width = self.activations.pieces // self.each
        if self.together < self.each:  # gated ones, by teams of several warps
            at = [step * self.together + i for i in range(self.together)]
            return [(i // self.each, i % self.each * width, 0) for i in at]
        groups = self.together // self.each
        return [(step * groups + i, 0, j * width) for i in range(groups) for j in range(self.each)]

    @cute.jit
    def _load_tokens(self, chunk, quarter: int, stage, part, smem):
        """Start the copies of a stage of activations, from ``quarter`` of a chunk on; with the last quarter also those
        of the expert's factors."""
        c = self.config
        barrier = smem.a_pipeline.full + stage
        has_factors = c.width is not None and quarter + c.span == QUARTERS
        with cute.arch.elect_one():
            size = c.token_bytes + (c.factor_bytes if has_factors else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            # Contiguous in memory: a chunk in the layout for mma.sync, a quarter in that for wgmma.
            pieces = 1 if c.by_warp else c.span
            size = c.token_bytes // pieces
            for i in range_constexpr(pieces):
                at = (chunk * QUARTERS + quarter) // c.span * pieces + i
                source = (Int64(at) * part.token_tiles + part.token_tile) * size
                target = stage * c.token_bytes + i * size
                ptx.copy_bulk(
                    smem.tokens + cute.assume(target, divby=ATOM_BYTES),
                    part.workspace.tiles.iterator + cute.assume(source, divby=ATOM_BYTES),
                    size,
                    barrier,
                )
            if const_expr(has_factors):
                source = part.workspace.factors[None, chunk // (c.width // K_TILE), part.token_tile].iterator
                target = cute.assume(stage * c.factor_bytes, divby=4 * ATOM_M)
                ptx.copy_bulk(smem.factors + target, cute.recast_ptr(source, dtype=Uint8), c.factor_bytes, barrier)
