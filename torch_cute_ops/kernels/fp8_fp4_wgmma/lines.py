"""Stages of two K blocks, whose codes are whole lines of memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint8
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Smem, Tile
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines_config import SPAN, LinesConfig
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights import FP4WeightStages

PIECES = BLOCK // 2 // VECTOR_BYTES
"""Pieces of 16 bytes that a row has codes in a K block."""


class LineStages(FP4WeightStages):
    """``FP4WeightStages`` of a ``LinesConfig``, whose weight is the A operand, in registers. A place is that of a K
    block in the ring, of which a stage has ``SPAN``; each of a team's helpers has one."""

    config: LinesConfig
    m_source = warpgroup.OperandSource.RMEM

    def _weight_layout(self, stages: int):
        c = self.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Uint8)
        return cute.tile_to_shape(atom, (c.columns, c.line, stages), order=(0, 1, 2))

    def _load_scales(self, number, tile: Tile, lane, share) -> list:
        """Those of the K blocks of a stage. One that does not exist has no rows of ``a``, and the scales of the last
        one, beside codes that are zero."""
        loaded = []
        for i in range(SPAN):
            block = number * SPAN + i
            exists = block < share.a_scale.shape[0]
            rows = tile._replace(rows=ptx.select(exists, tile.rows, Int32(0)))
            block = cutlass.min(block, share.a_scale.shape[0] - 1)
            loaded.append(super()._load_scales(block, rows, lane, share))
        return loaded

    def _begin_help(self, warp, lane, share) -> Int32:
        """Which K block of a stage is a helper's."""
        return Int32(warp)

    def _code_place(self, place, row, piece) -> Int32:
        """Where a piece of the codes of a row lies, swizzled as the activations."""
        c = self.config
        of_row = (place // SPAN * c.columns + row) * c.line
        return of_row + (place % SPAN * PIECES + piece ^ row % 8) * VECTOR_BYTES

    def _token_operand(self, smem: Smem) -> cute.Tensor:
        """The activations of all K blocks in the ring as the B operand of MMAs."""
        c = self.config
        tokens = self._activations(smem.tokens, c.tokens, c.stages * SPAN)
        mma = self._tiled_mma()
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tokens))

    def _register_operand(self, words, steps: int) -> cute.Tensor:
        """A lane's words of decoded codes, four of each k32 step, as the A operand of MMAs."""
        layout = cute.make_layout(((4, 2, 2), 1, steps), stride=((1, 4, 8), 0, 16))
        return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float8E4M3FN), layout)
