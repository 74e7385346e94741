"""Producer warp of the tcgen05 GEMMs whose decoder warps decode an FP4 weight."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_cute_ops.kernels.common.blackwell.fp8_gemm import FP8GemmKernel
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import CODE_BYTES, FP8TileConfig
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import WARP, OperandCopies
from torch_cute_ops.kernels.common.core import ptx


class CodeCopies(OperandCopies):
    """Device code that copies FP4 codes to stages by TMA."""

    line = CODE_BYTES


class DecodedWeightKernel(FP8GemmKernel):
    """Base class of GEMM kernels whose decoder warps decode an FP4 weight. The stage is a ``DecodedStage`` with the
    property ``codes_offset``, the offset of the FP4 codes. A subclass defines ``_copy_activations``, and the decoder
    warps' code in ``_load_scales``."""

    def __init__(self, config: FP8TileConfig, weight):
        super().__init__(config, weight)
        self.code_copies = CodeCopies()

    def _weight_map(self, b: cute.Tensor) -> tuple:
        return self.code_copies.map(b, MMA_M)

    def _init_barriers(self, smem) -> None:
        super()._init_barriers(smem)
        for i in range(self.config.stages):
            cute.arch.mbarrier_init(smem.copied + i, 1)

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which copies activations and FP4 codes to the stages."""
        tid, _, _ = cute.arch.thread_idx()
        c, rows = self.stage, self.stage.mma_n
        b_boxes = self.code_copies.boxes(b_map, MMA_M)
        b_policy = ptx.EVICT_FIRST if const_expr(self.config.streams_weight) else None
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, tid % WARP, work, smem)
            # Boxes begin at multiples of their height. An expert's first row need not be such a multiple, so move the
            # origin of the matrix to this row.
            of_tile = a_map[0], cute.domain_offset((tile.row, 0), a_map[1])
            a_boxes = self.copies.boxes(of_tile, rows)
            begin, end = self._k_range(number, work)
            for k_tile in cutlass.range(begin, end, unroll=1):
                smem.pipeline.wait_empty(stage, parity)
                base, copied = self._stage_at(stage, smem), smem.copied + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(copied, c.code_bytes)
                place = tile.column // MMA_M, k_tile, tile.expert
                self.code_copies.copy_box(b_map, b_boxes, MMA_M, base + c.codes_offset, place, copied, b_policy)
                self._copy_activations(of_tile, a_boxes, k_tile, base, copied)
                stage, parity = smem.pipeline.next(stage, parity)

    def _copy_activations(self, of_tile: tuple, boxes: Any, k_tile, base: cute.Pointer, copied: cute.Pointer) -> None:
        """Start the copies of a tile's activations in a k tile to the stage at ``base``. The barrier ``copied`` counts
        the bytes."""
        raise NotImplementedError
