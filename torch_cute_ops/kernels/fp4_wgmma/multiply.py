"""The consumers: what each warp multiplies, one segment after the other."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.kernels.fp4_wgmma.config import BAND_ROWS, Config
from torch_cute_ops.kernels.fp4_wgmma.mma import Consumer, Mma, Stages
from torch_cute_ops.kernels.fp4_wgmma.part import segment_before
from torch_cute_ops.kernels.fp4_wgmma.results import Results


class Consumers:
    """The consumer warps of one ``Config``."""

    def __init__(self, config: Config, mma: Mma, results: Results):
        self.config, self.mma, self.ring, self.results = config, mma, mma.ring, results

    @cute.jit
    def consume(self, factor, tid, part, smem):
        """A consumer warp: its 16 rows of each of the worker's tiles, in a warpgroup where this multiplies."""
        c = self.config
        group = tid // WARPGROUP
        lane = tid % 32
        band, turn, turns = self._band_of(tid // 32)
        row = band * BAND_ROWS + lane // 4
        consumer = Consumer(
            group=group,
            lane=lane,
            thread=tid % WARPGROUP,
            quad=lane % 4,
            row=row,
            scale_row=row,
            turn=turn,
            existing=self.ring.existing(part.blocks - (part.chunks - 1) * self.ring.blocks, lane % 4),
            leads=Uint32(lane == 0),
        )
        start = self.mma.start_of(smem)
        sums = cute.make_rmem_tensor((c.sums,), Float32)
        # Over experts the sums, each multiplied by its factor
        totals = cute.make_rmem_tensor((c.sums,), Float32) if c.width is not None else sums
        stages = Stages(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        unit = part.end
        while unit > part.begin:
            tile, first, count = segment_before(unit, part)
            # (Over experts the first MMAs replace them; but without this ptxas spills.)
            sums.fill(0.0)
            own = consumer._replace(scale_row=consumer.row + self.ring.first_scale_row(tile))
            if const_expr(c.width is None):
                for i in range(count):
                    if const_expr(c.turns == 1):
                        stages = self.mma.multiply(start, True, first, i, stages, sums, own, part, smem)
                    elif i & (turns - 1) == turn:
                        stages = self.mma.multiply(start, True, first, i, stages, sums, own, part, smem)
                    else:
                        stages = self.mma.pass_by(stages, consumer, smem)
            else:
                totals.fill(0.0)
                width, i = c.width // K_TILE, Int32(0)
                while i < count:
                    begin = i
                    end = cutlass.min(((first + i) // width + 1) * width - first, count)
                    while i < end:
                        stages = self.mma.multiply(start, i > begin, first, i, stages, sums, own, part, smem)
                        i += 1
                    self.mma.wait()
                    self.results.add_expert(sums, totals, stages.last, consumer, smem)
            self.mma.end(stages, consumer, smem)
            unit -= count
            if const_expr(c.pdl and not c.static_weight):
                if unit <= part.begin:
                    cute.arch.griddepcontrol_launch_dependents()
            self.mma.add_up(sums)
            self.results.end_segment(totals, tile, first, count, factor, tid, consumer, part, smem)

    def _band_of(self, warp) -> tuple:
        """A consumer warp's band; which chunks of a segment it has: the first, and the step to the next, a power of
        two."""
        c = self.config
        if c.turns == 1:
            return warp, 0, 1
        whole = c.bands - c.shared_bands
        is_shared, place = warp >= whole, warp - whole
        band = ptx.select(is_shared, whole + place % c.shared_bands, warp)
        turn = ptx.select(is_shared, place // c.shared_bands, Int32(0))
        return band, turn, ptx.select(is_shared, Int32(c.turns), Int32(1))
