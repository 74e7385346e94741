"""Device code of the FP8 x MXFP4 tcgen05 GEMM. The package's docstring describes the roles and the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from torch_cute_ops.formats.prepared_scales import INDEX_NAN
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.fp8_gemm import (
    MMA_K_BYTES,
    MMAS_PER_K_TILE,
    FP8GemmKernel,
    weight_source,
)
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import WARP, OperandCopies
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp4.layouts import SCALE_TILE_BYTES
from torch_cute_ops.kernels.common.fp8.gemm import arrive, store_token_scales, token_scales
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import PreparedWeight, piece_at
from torch_cute_ops.kernels.fp8_mxfp4_tcgen05.config import ALIGN, FACTOR_SLOTS, SCALE_LOADERS, SCALES_AHEAD, Config

ONE = 0x7F7F7F7F  # four ue8m0 scales of 1
INDEX_BIAS = 127 - 14  # ue8m0 byte of a prepared scale, minus its index


class CodeCopies(OperandCopies):
    """Device code that copies FP4 codes to stages by TMA. For every 16 codes, TMA writes 16 bytes: 8 bytes of codes and
    8 bytes that MMAs ignore."""

    def map(self, codes: cute.Tensor, rows: int) -> tuple:
        """Return the TMA descriptor of FP4 codes. ``codes`` are bytes (rows, K/2, experts), but the elements of the
        descriptor are codes (rows, K, experts)."""
        n, half, experts = codes.shape
        of_row, _, of_expert = codes.stride
        pointer = cute.recast_ptr(codes.iterator, dtype=Float4E2M1FN)
        layout = cute.make_layout((n, 2 * half, experts), stride=(2 * of_row, 1, 2 * of_expert))
        tiler, op = (rows, self.line, 1), cpasync.CopyBulkTensorTileG2SOp()
        # The DSL chooses the spreading format for elements of 4 bits with an 8-bit internal type.
        return cpasync.make_tiled_tma_atom(
            op, cute.make_tensor(pointer, layout), self._box(rows, 3), tiler, internal_type=Uint8
        )


class FP8MXFP4Tcgen05Kernel(FP8GemmKernel):
    """GEMM kernel, compiled for a ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, weight_source(config, K_TILE_BYTES, ALIGN))
        self.weight_copies = CodeCopies()

    def _weight_map(self, b: cute.Tensor) -> tuple:
        return self.weight_copies.map(b, MMA_M)

    def _init_barriers(self, smem) -> None:
        super()._init_barriers(smem)
        ones = smem.stages + self.config.ones_offset
        for offset in range(0, SCALE_TILE_BYTES, 16):
            store_words([Uint32(ONE)] * 4, piece_at(ones, offset))
        fence_async()

    # Copies

    @cute.jit
    def _load_scales(self, loader, work, smem):
        """Run a scale-loader warp. For every second k tile, the warp stores the weight's scales to the stage, in the
        128x4 layout. With block scales, the warp also writes the tokens' scales to a slot of the factor pipeline."""
        c = self.config
        own, lane = loader // WARP, loader % WARP
        before = Int32(0)  # number of k tiles of this CTA's earlier tiles
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, lane, work, smem)
            start = work.begin + (own + SCALE_LOADERS - before % SCALE_LOADERS) % SCALE_LOADERS
            for first in cutlass.range(start, work.end, SCALE_LOADERS * SCALES_AHEAD, unroll=1):
                loaded = []
                for i in range_constexpr(SCALES_AHEAD):
                    k_tile = cutlass.min(first + i * SCALE_LOADERS, work.end - 1)
                    of_tokens = token_scales(c.tile_m, k_tile, tile, lane, work) if const_expr(c.has_blocks) else []
                    loaded.append((of_tokens, self._weight_scales(k_tile, tile, lane, work)))
                for i in range_constexpr(SCALES_AHEAD):
                    if first + i * SCALE_LOADERS < work.end:
                        turn = before + (first + i * SCALE_LOADERS - work.begin)
                        stage = turn % c.stages
                        smem.pipeline.wait_empty(stage, turn // c.stages % 2 ^ 1)
                        at = self.stage.scales_offset + lane * 16
                        store_words(loaded[i][1], piece_at(self._stage_at(stage, smem), at))
                        fence_async()
                        arrive(smem.pipeline.full + stage, lane)
                        if const_expr(c.has_blocks):
                            slot = turn % FACTOR_SLOTS
                            smem.factor_pipeline.wait_empty(slot, turn // FACTOR_SLOTS % 2 ^ 1)
                            store_token_scales(c.tile_m, self._factors(slot, smem), loaded[i][0], lane)
                            arrive(smem.factor_pipeline.full + slot, lane)
            before += work.end - work.begin
        if const_expr(c.split_k > 1 and not c.has_blocks):
            self._await_stage_writers()

    def _weight_scales(self, k_tile, tile: Tile, lane, work) -> list:
        """Load the weight's scales of a k tile, in rows ``lane``, ``lane + 32``, ``lane + 64`` and ``lane + 96``.

        Return a word per row. Scales of rows that do not exist are undefined.
        """
        c, words = self.config, []
        for after in range(0, MMA_M, WARP):
            column = tile.column + lane + after
            if isinstance(self.weight, PreparedWeight):
                at = self.weight.row_of_slab(work.b_scale, tile.expert, 1 + k_tile // c.slab_tiles, column)
                at = at + cute.assume(k_tile % c.slab_tiles * c.tile_scales, divby=c.tile_scales)
                words.append(_scales_of_indices(ptx.load_if(at, column < work.n, 1)[0]))
            else:
                given = work.n, tile.expert, column, column < work.n, Int64(k_tile) * c.tile_scales, c.tile_scales
                words += self.weight.row_scales(work.b_scale, *given)
        return words

    # MMAs

    def _issue_mmas(self, tmem, work, smem) -> None:
        ones = tcgen05.scale_descriptor(Uint32(smem.stages.toint()) + Uint32(self.config.ones_offset))
        tcgen05.copy_scales(tmem + Uint32(self.config.ones_column), ones, 1)
        super()._issue_mmas(tmem, work, smem)

    @cute.jit
    def _multiply(self, tmem, acc, stage, num_mmas, adds, first_token, smem):
        """Copy a k tile's scales to tensor memory, and issue its MMAs.

        Each stage has its own columns for scales, so the copy overwrites only scales whose MMAs have ended.
        (``num_mmas`` is a run-time value, because ptxas of CUDA 12 crashes if it is a constant.)
        """
        c = self.config
        at = Uint32(smem.stages.toint()) + Uint32(stage * self.stage.size_bytes)
        scales = tmem + Uint32(c.acc_columns) + Uint32(stage * TILE_BLOCKS)
        ones = tmem + Uint32(c.ones_column)
        tcgen05.copy_scales(scales, tcgen05.scale_descriptor(at + self.stage.scales_offset), 1)
        for step in range_constexpr(MMAS_PER_K_TILE):
            if step < num_mmas:
                a = tcgen05.operand_descriptor(at + step * MMA_K_BYTES)
                b = tcgen05.operand_descriptor(at + MMA_M * K_TILE_BYTES + step * MMA_K_BYTES)
                instruction = tcgen05.mx_instruction_descriptor(MMA_M, c.tile_m, "e2m1", step, 0)
                tcgen05.multiply_mx(acc, a, b, instruction, scales, ones, adds if step == 0 else True, 1)


def _scales_of_indices(indices: Uint32) -> Uint32:
    """Convert four indices of prepared scales to ue8m0. Index 0 becomes the smallest scale, 2^-127."""
    scales = Uint32(0)
    for i in range(TILE_BLOCKS):
        index = Int32(indices >> 8 * i & Uint32(0xFF))
        byte = ptx.select(index == Int32(INDEX_NAN), Int32(0xFF), index + INDEX_BIAS)
        scales |= Uint32(ptx.select(index == Int32(0), Int32(0), byte)) << 8 * i
    return scales
