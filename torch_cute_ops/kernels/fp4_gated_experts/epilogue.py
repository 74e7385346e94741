"""Epilogue of a work tile, which the last warp of each chain runs. The warps of a chain divide the work tile's k.

For every eight tokens, a lane holds the accumulators of two of these tokens: gate and up of one column. The threads
write the results to shared memory as float32 (tokens, columns). Then each thread stores one block: codes and their
scale, or 16 bytes of 16-bit values.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import load_terms
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, pack
from torch_cute_ops.kernels.common.experts.gated import GatedEpilogueOps
from torch_cute_ops.kernels.common.fp4.codes import operands_acc_scale
from torch_cute_ops.kernels.fp4_gated_experts.config import Config

WARP = 32


class Terms(NamedTuple):
    """Factors and addends of the epilogue for one column. A thread loads them before the accumulators of a work tile
    are complete, to hide the latency of the loads.

    Attributes:
        alpha: factors of gate and up, or None.
        bias: biases of gate and up, or None.
        global_scale: encode scale, or None.
    """

    alpha: list | None
    bias: list | None
    global_scale: Float32 | None


class WorkTileEpilogue(GatedEpilogueOps):
    """Device code of the epilogue of a work tile."""

    def __init__(self, config: Config):
        super().__init__(config.epilogue, operands_acc_scale(config.operands), has_e2m1_cvt=False)
        self.config = config

    def terms(self, expert, first_column, work, consumer) -> Terms:
        """Load alpha, bias and global scale for this lane's column of an n tile. Only warps that run the epilogue load
        these values.

        ``first_column`` is the n tile's first column among the expert's columns.
        """
        outputs, is_last = work.outputs, consumer.is_last
        column = first_column + consumer.column
        alpha, bias = self.load_alpha(expert, is_last, outputs), None
        if self.epilogue.bias_dtype is not None:
            bias = [load_terms(outputs.bias, expert, column + half * work.width, 0, 1, is_last)[0] for half in range(2)]
        return Terms(alpha, bias, self.load_global_scale(expert, is_last, outputs))

    @cute.jit
    def store_work_tile(self, acc, token_id, terms, first_column, consumer, values, outputs):
        """Store the results of a work tile.

        Args:
            acc: accumulators of a lane, four per eight tokens: two of gate, two of up.
            token_id: row of the token whose index in the m tile is this thread's lane, or a negative number if the
                token does not exist.
            terms: result of the method ``terms``.
            first_column: first column of the n tile in the result, counted over all experts.
            consumer: thread of the epilogue. All ``Config.epilogue_threads`` threads call this method.
            values: ``Config.value_bytes`` bytes of shared memory.
            outputs: tensors that the epilogue reads and writes.
        """
        c = self.config
        lane, tid = consumer.lane, consumer.n_warp * WARP + consumer.lane
        own_scale = None
        if const_expr(self.epilogue.has_row_scale):
            # Each lane loads the scale of one token. Shuffles pass the scale to the lanes that hold the token's sums.
            there = outputs.row_scale.iterator + cutlass.max(token_id, Int32(0))
            own_scale = ptx.float_of(ptx.load_if(there, token_id >= 0, 1)[0])
        for group in range_constexpr(c.tile_m // 8):
            for e in range_constexpr(2):
                row_scale = None
                if const_expr(self.epilogue.has_row_scale):
                    row_scale = cute.arch.shuffle_sync(own_scale, 8 * group + lane % 4 * 2 + e)
                value = self.gated(
                    acc[4 * group + e], acc[4 * group + 2 + e], terms.alpha, terms.bias, outputs, row_scale
                )
                place = (8 * group + lane % 4 * 2 + e) * c.value_pitch + consumer.column
                self._values_at(values, place, 1, 1)[0] = ptx.bits_of(value)
        cute.arch.barrier(barrier_id=1, number_of_threads=c.epilogue_threads)
        # The number of blocks is at most the number of threads, so a thread stores at most one block.
        blocks = c.out_columns // self.epilogue.block
        index, block = tid // blocks, tid % blocks
        token = cute.arch.shuffle_sync(token_id, index % WARP)
        if (index < c.tile_m) & (token >= 0):
            place = index * c.value_pitch + block * self.epilogue.block
            words = []
            for i in range_constexpr(0, self.epilogue.block, 4):
                words += load_words(self._values_at(values, place + i, 4, 4))
            numbers = [ptx.float_of(word) for word in words]
            at = first_column + block * self.epilogue.block
            if const_expr(self.is_fp4):
                self.store_codes(numbers, token, at, terms.global_scale, outputs)
            else:
                self.store(pack(numbers, DSL_DTYPES[self.epilogue.out]), token, at, outputs.y)
        # Synchronise before the next work tile's results overwrite ``values``.
        cute.arch.barrier(barrier_id=1, number_of_threads=c.epilogue_threads)

    def _values_at(self, values: cute.Pointer, place, divby: int, count: int) -> cute.Tensor:
        at = cute.recast_ptr(values, dtype=Uint32) + cute.assume(place, divby=divby)
        return cute.make_tensor(at, cute.make_layout(count))
