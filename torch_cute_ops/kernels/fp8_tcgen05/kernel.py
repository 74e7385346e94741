"""Device code of the FP8 tcgen05 GEMM. The package's docstring describes the roles and the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.blackwell.fp8_gemm import FP8GemmKernel
from torch_cute_ops.kernels.common.blackwell.layouts import (
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
