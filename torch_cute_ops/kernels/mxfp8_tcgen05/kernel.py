"""Device code of the MXFP8 tcgen05 GEMM. The package's docstring describes the roles and the data path."""

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled import as_bytes, copy_tile_row
from torch_cute_ops.kernels.common.blackwell.fp8_gemm import MMA_K_BYTES, MMAS_PER_K_TILE, FP8GemmKernel
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import WARP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp4.codes import scale_argument
from torch_cute_ops.kernels.common.fp4.layouts import SCALE_TILE_BYTES
from torch_cute_ops.kernels.common.fp8.tiles import Tile, by_expert
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight, fp8_argument
from torch_cute_ops.kernels.mxfp8_tcgen05.config import SCALE_COLUMNS, TILED, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class MXFP8Weight(FP8Weight):
    """Weight source for an MXFP8 weight, whose scales are tiled."""

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        return fp8_argument(n, k, experts), scale_argument(MXFP8, TILED, n, blocks, name="b_")

    def views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the weight as (N, K, 1), and the bytes of its scales."""
        return by_expert(b, is_transposed=True), as_bytes(b_scale, TILED)


class MXFP8Tcgen05Kernel(FP8GemmKernel):
    """GEMM kernel, compiled for a ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, MXFP8Weight(config.tile_n, is_plain=True))

    def arguments(self) -> Arguments:
        scale = scale_argument(MXFP8, TILED, Dim("rows"), Dim("blocks"), name="a_")
        return super().arguments()._replace(a_scale=scale)

    # Copies

    @cute.jit
    def _expect(self, tile, k_tile, base, full, b_policy, work):
        """Make a stage's barrier expect the bytes of a k tile, and start the copies of both operands' scales."""
        # The second CTA of a pair may have no rows of the weight.
        has_weight = Int32(tile.column < work.n) if const_expr(self.stage.cta_group == 2) else Int32(1)
        to = base + self.stage.code_bytes
        size = SCALE_TILE_BYTES
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage.code_bytes + size * (1 + has_weight))
            copy_tile_row(as_bytes(work.a_scale, TILED), tile.row // MMA_M, k_tile, size, to, full, None)
            if has_weight == 1:
                copy_tile_row(work.b_scale, tile.column // MMA_M, k_tile, size, to + size, full, b_policy)

    # MMAs

    def _first_token(self, number, work, smem) -> Int32:
        return self._find(number, 0, work, smem).row

    @cute.jit
    def _multiply(self, tmem, acc, stage, num_mmas, adds, first_token, smem):
        """Copy a k tile's scales to tensor memory, and issue its MMAs.

        The tile's first token is one of the 128 rows of the tokens' scales. Such a row is a lane of tensor memory,
        modulo 32, in one of four columns. The copy skips lanes, and the MMAs skip columns, before the first token.
        (ptxas of CUDA 12 crashes if the number of MMAs is a constant.)
        """
        c = self.config
        at = Uint32(smem.stages.toint()) + Uint32(stage * self.stage.size_bytes)
        scales = tmem + Uint32(c.acc_columns) + Uint32(stage * SCALE_COLUMNS)
        of_tokens = scales + Uint32(TILE_BLOCKS)
        row = Uint32(first_token % MMA_M)
        source = at + self.stage.code_bytes
        tcgen05.copy_scales(scales, tcgen05.scale_descriptor(source + SCALE_TILE_BYTES), c.cta_group)
        tcgen05.copy_scales(of_tokens, tcgen05.scale_descriptor(source + row % WARP * 16), c.cta_group)
        of_tokens = of_tokens + row // WARP
        for step in range_constexpr(MMAS_PER_K_TILE):
            if step < num_mmas:
                a = tcgen05.operand_descriptor(at + step * MMA_K_BYTES)
                b = tcgen05.operand_descriptor(at + MMA_M * K_TILE_BYTES + step * MMA_K_BYTES)
                instruction = tcgen05.mx_instruction_descriptor(MMA_M * c.cta_group, c.tile_m, "e4m3", step, step)
                scaled = scales, of_tokens, adds if step == 0 else True
                tcgen05.multiply_mx(acc, a, b, instruction, *scaled, c.cta_group)

    # Results

    def _stage_token_scales(self, tile: Tile, tid, work, smem) -> None:
        """Return at once, because the MMAs have applied all scales."""

    def _scaled(self, words: list, scales: None, first) -> list:
        return [ptx.float_of(word) for word in words]
