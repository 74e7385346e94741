"""Device code of the FP8 tcgen05 GEMM. The package's docstring describes the roles and the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.blackwell.fp8_gemm import FP8GemmKernel, bytes_of
from torch_cute_ops.kernels.common.blackwell.layouts import (
    K_TILE_BYTES,
    MMA_M,
)
from torch_cute_ops.kernels.common.blackwell.roles import WARP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp8.gemm import arrive, store_token_scales, token_scales
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight
from torch_cute_ops.kernels.fp8_tcgen05.config import FACTOR_SLOTS, SCALE_LOADERS, SCALES_AHEAD, Config


class FP8Tcgen05Kernel(FP8GemmKernel):
    """GEMM kernel, compiled for a ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, FP8Weight(config.tile_n, config.rows.is_plain, config.has_blocks))

    def _weight_map(self, b: cute.Tensor) -> tuple:
        return self.copies.map(bytes_of(b), MMA_M)

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which fills the stages."""
        tid, _, _ = cute.arch.thread_idx()
        rows = self.stage.cta_mma_n
        half = work.rank if const_expr(self.stage.cta_group == 2) else Int32(0)
        b_boxes = self.copies.boxes(b_map, MMA_M)
        b_policy = ptx.EVICT_FIRST if const_expr(self.config.streams_weight) else None
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, tid % WARP, work, smem)
            # The index of an expert's first row need not be a multiple of the box's height, so move the origin of the
            # matrix to this row.
            of_tile = a_map[0], cute.domain_offset((tile.row, 0), a_map[1])
            a_boxes = self.copies.boxes(of_tile, rows)
            for k_tile in cutlass.range(work.begin, work.end, unroll=1):
                smem.pipeline.wait_empty(stage, parity)
                base, full = self._stage_at(stage, smem), smem.pipeline.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage.code_bytes)
                place = tile.column // MMA_M, k_tile, tile.expert
                self.copies.copy_box(b_map, b_boxes, MMA_M, base, place, full, b_policy)
                to = base + MMA_M * K_TILE_BYTES
                self.copies.copy_box(of_tile, a_boxes, rows, to, (half, k_tile), full, None)
                stage, parity = smem.pipeline.next(stage, parity)

    @cute.jit
    def _load_scales(self, loader, work, smem):
        """Run a scale-loader warp. For every second k tile, it writes the products of both operands' scales to a slot
        of the factor pipeline."""
        own, lane = loader // WARP, loader % WARP
        before = Int32(0)  # number of k tiles of this CTA's earlier tiles
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, lane, work, smem)
            b_block = tile.column // MMA_M
            if const_expr(self.stage.cta_group == 2):
                # The second CTA of a pair may have no rows of the weight.
                b_block = cutlass.min(b_block, work.b_scale.shape[0] - 1)
            start = work.begin + (own + SCALE_LOADERS - before % SCALE_LOADERS) % SCALE_LOADERS
            for first in cutlass.range(start, work.end, SCALE_LOADERS * SCALES_AHEAD, unroll=1):
                loaded = []
                for i in range_constexpr(SCALES_AHEAD):
                    k_tile = cutlass.min(first + i * SCALE_LOADERS, work.end - 1)
                    of_rows = token_scales(self.config.tile_m, k_tile, tile, lane, work)
                    loaded.append((of_rows, work.b_scale[b_block, k_tile, tile.expert]))
                for i in range_constexpr(SCALES_AHEAD):
                    if first + i * SCALE_LOADERS < work.end:
                        turn = before + (first + i * SCALE_LOADERS - work.begin)
                        slot = turn % FACTOR_SLOTS
                        smem.factor_pipeline.wait_empty(slot, turn // FACTOR_SLOTS % 2 ^ 1)
                        products = [ptx.mul_rn(of_row, loaded[i][1]) for of_row in loaded[i][0]]
                        store_token_scales(self.config.tile_m, self._factors(slot, smem), products, lane)
                        arrive(smem.factor_pipeline.full + slot, lane)
            before += work.end - work.begin
