"""Epilogue of a work tile, which the last warp of each chain runs. The warps of a chain divide the work tile's k.

For every eight tokens, a lane holds the accumulators of two of these tokens: gate and up of one column. The threads
write the results to shared memory as float32 (tokens, columns). Then each thread stores one block: codes and their
scale, or 16 bytes of 16-bit values.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, Uint64, const_expr, range_constexpr

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import GATES, load_terms, swiglu
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, pack, store_byte, store_words
from torch_cute_ops.kernels.common.fp4.codes import acc_scale, fp4_block, scale_argument
from torch_cute_ops.kernels.fp4_gated_experts.config import Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WARP = 32


class Outputs(NamedTuple):
    """Tensors of ``Arguments`` that the epilogue reads and writes. ``gate`` holds the three parameters of the general
    gate, or None."""

    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    global_scale: cute.Tensor | None
    row_scale: cute.Tensor | None
    y: cute.Tensor
    scale: cute.Tensor | None
    gate: tuple | None


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


class GatedEpilogueOps:
    """Device code of the epilogue that a ``GatedEpilogue`` describes."""

    def __init__(self, config: Config):
        self.config, self.epilogue = config, config.epilogue
        self.is_fp4 = isinstance(self.epilogue.out, FP4Format)

    def arguments(self, m: Dim, experts: Dim, n: Dim) -> dict[str, Any]:
        """Return descriptions of the arguments that the epilogue reads or writes. The bias is (experts, ``n``)."""
        f = self.epilogue
        factors = {"expert": ((experts,), (1,)), "expert_half": ((experts, 2), (2, 1))}
        scales = {"one": ((1,), (1,)), "expert": ((experts,), (1,))}
        gate = ScalarArg("Float32") if f.has_gate_parameters else None
        bias = None
        if f.bias_dtype is not None:
            bias = TensorArg(DSL_DTYPES[f.bias_dtype].__name__, (experts, n), (n, 1), align=16)
        width = Dim("y_width", divisibility=32)
        dtype = "Uint8" if self.is_fp4 else DSL_DTYPES[f.out].__name__
        scale = None
        if self.is_fp4:
            scale = scale_argument(f.out, f.out_layout, Dim("y_scale_rows"), Dim("y_blocks", divisibility=2), name="y_")
        return {
            "alpha": None if f.alpha is None else TensorArg("Float32", *factors[f.alpha], align=4),
            "bias": bias,
            "global_scale": None if f.global_scale is None else TensorArg("Float32", *scales[f.global_scale], align=4),
            "row_scale": TensorArg("Float32", (m,), (1,), align=4) if f.has_row_scale else None,
            "y": TensorArg(dtype, (m, width), (width, 1), align=16),
            "scale": scale,
            "swiglu_alpha": gate,
            "swiglu_beta": gate,
            "swiglu_limit": gate,
        }

    def terms(self, expert, first_column, work, consumer) -> Terms:
        """Load alpha, bias and global scale for this lane's column of an n tile, in the warps that run the epilogue.

        ``first_column`` is the n tile's first column among the expert's columns.
        """
        f, outputs, is_last = self.epilogue, work.outputs, consumer.is_last
        column = first_column + consumer.column
        alpha = bias = scale = None
        if f.alpha is not None:
            each = 1 if f.alpha == "expert" else 2
            start = outputs.alpha.iterator + Int64(expert) * each
            alpha = [ptx.float_of(ptx.load_if(start, is_last, 1, 4 * i)[0]) for i in range(each)]
            alpha = [alpha[0], alpha[-1]]
        if f.bias_dtype is not None:
            bias = [load_terms(outputs.bias, expert, column + half * work.width, 0, 1, is_last)[0] for half in range(2)]
        if f.global_scale is not None:
            place = 0 if f.global_scale == "one" else Int64(expert)
            scale = ptx.float_of(ptx.load_if(outputs.global_scale.iterator + place, is_last, 1)[0])
        return Terms(alpha, bias, scale)

    def gated(
        self, gate: Float32, up: Float32, terms: Terms, outputs: Outputs, row_scale: Float32 | None = None
    ) -> Float32:
        """Compute one element of the result from its accumulators of gate and up. ``row_scale`` is the scale of the
        token's row, or None."""
        operands = self.config.operands
        scale = acc_scale(operands.fmt, operands.decodes_both)
        values = []
        for half, total in enumerate((gate, up)):
            value = total if scale == 1.0 else ptx.mul_rn(total, Float32(scale))
            if row_scale is not None:
                value = ptx.mul_rn(value, row_scale)
            if terms.alpha is not None:
                value = ptx.mul_rn(value, terms.alpha[half])
            if terms.bias is not None:
                value = ptx.add_rn(value, terms.bias[half])
            values.append(value)
        return GATES[self.epilogue.gate](*values) if outputs.gate is None else swiglu(*values, *outputs.gate)

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
                value = self.gated(acc[4 * group + e], acc[4 * group + 2 + e], terms, outputs, row_scale)
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
                self._store_codes(numbers, token, at, terms.global_scale, outputs)
            else:
                self._store(pack(numbers, DSL_DTYPES[self.epilogue.out]), token, at, outputs.y)
        # Synchronise before the next work tile's results overwrite ``values``.
        cute.arch.barrier(barrier_id=1, number_of_threads=c.epilogue_threads)

    def _values_at(self, values: cute.Pointer, place, divby: int, count: int) -> cute.Tensor:
        at = cute.recast_ptr(values, dtype=Uint32) + cute.assume(place, divby=divby)
        return cute.make_tensor(at, cute.make_layout(count))

    def _store(self, words: list, token, column, y) -> None:
        """Store words of 16-bit values or of codes in the token's row of ``y``, starting at element ``column``."""
        size = 4 * len(words) // (y.element_type.width // 8)
        to = y.iterator + cute.assume(Int64(token) * y.shape[1] + column, divby=size)
        store_words(words, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(words))))

    def _store_codes(self, numbers: list, token, column, global_scale, outputs) -> None:
        fmt = self.epilogue.out
        amax = Float32(0.0)
        for number in numbers:
            amax = ptx.max_abs_nan(amax, number)
        words, byte = fp4_block(numbers, amax, global_scale, fmt, has_e2m1_cvt=False)
        self._store(words, token, column // 2, outputs.y)
        at = self._scale_at(token, column // fmt.block_size, outputs)
        store_byte(cute.make_tensor(at, cute.make_layout(1)), byte)

    @cute.jit
    def clear_padding(self, outputs, m, thread, threads):
        """Zero the padding of the scales, with ``threads`` threads. ``thread`` is the index of this thread among
        them."""
        layout = self.epilogue.out_layout
        blocks = self._blocks(outputs)
        # Clear the scales of missing rows. Go through the words of the last row of tiles in memory order, so that
        # stores coalesce.
        rows = layout.tile_rows
        existing = m % rows
        words = ptx.select(existing == 0, Int32(0), layout.padded_blocks(blocks) // 4 * rows)
        for i in range(thread, words, threads):
            line = i % rows
            row = line // 4 + line % 4 * 32 if const_expr(rows == 128) else line
            if row >= existing:
                at = self._scale_at(m - existing + row, i // rows * 4, outputs, divby=4)
                store_words([Uint32(0)], cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1)))
        # An expert's number of columns is a multiple of two blocks, so at most two blocks of a row's last tile are
        # padding.
        if blocks % 4 != 0:
            for row in range(thread, m, threads):
                for i in range_constexpr(2):
                    store_byte(cute.make_tensor(self._scale_at(row, blocks + i, outputs), cute.make_layout(1)), 0)

    def _blocks(self, outputs):
        """Return the number of blocks in a row of the result."""
        return outputs.y.shape[1] * 2 // self.epilogue.block

    def _scale_at(self, row, block, outputs, divby: int = 1) -> cute.Pointer:
        """Return the address of the scale of a block in row ``row``, as a pointer to bytes."""
        layout = self.epilogue.out_layout
        place = layout.row_offset(Uint64(row), self._blocks(outputs)) + Uint64(layout.block_offset(Uint32(block)))
        return cute.recast_ptr(outputs.scale.iterator, dtype=Uint8) + cute.assume(place, divby=divby)
