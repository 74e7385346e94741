"""Device code of the epilogue with a gate, which kernels of the first GEMM of a mixture of experts share."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, Uint64, const_expr, range_constexpr

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import GATES, swiglu
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, store_byte, store_words
from torch_cute_ops.kernels.common.experts.gated_layouts import GatedEpilogue
from torch_cute_ops.kernels.common.fp4.codes import fp4_block, scale_argument
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class Outputs(NamedTuple):
    """Tensors of a launch that the epilogue reads and writes. ``gate`` holds the three parameters of the general
    gate, or None."""

    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    global_scale: cute.Tensor | None
    row_scale: cute.Tensor | None
    y: cute.Tensor
    scale: cute.Tensor | None
    gate: tuple | None


class GatedEpilogueOps:
    """Device code of the epilogue that a ``GatedEpilogue`` describes.

    Args:
        epilogue: description of the epilogue.
        acc_scale: power of two by which accumulators are multiplied (``kernels.common.fp4.codes.acc_scale``).
        has_e2m1_cvt: True if the GPU has an instruction that converts to e2m1.
    """

    def __init__(self, epilogue: GatedEpilogue, acc_scale: float, has_e2m1_cvt: bool):
        self.epilogue, self.acc_scale, self.has_e2m1_cvt = epilogue, acc_scale, has_e2m1_cvt
        self.is_fp4 = isinstance(epilogue.out, FP4Format)

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

    # Factors

    def load_alpha(self, expert, exists, outputs: Outputs) -> list | None:
        """Load the factors of gate and up for an expert if ``exists``, or return None without factors."""
        if self.epilogue.alpha is None:
            return None
        each = 1 if self.epilogue.alpha == "expert" else 2
        start = outputs.alpha.iterator + Int64(expert) * each
        alpha = [ptx.float_of(ptx.load_if(start, exists, 1, 4 * i)[0]) for i in range(each)]
        return [alpha[0], alpha[-1]]

    def load_global_scale(self, expert, exists, outputs: Outputs) -> Float32 | None:
        """Load the encode scale of an expert's results if ``exists``, or return None if the results have no encode
        scale."""
        if self.epilogue.global_scale is None:
            return None
        place = 0 if self.epilogue.global_scale == "one" else Int64(expert)
        return ptx.float_of(ptx.load_if(outputs.global_scale.iterator + place, exists, 1)[0])

    def gated(
        self,
        gate: Float32,
        up: Float32,
        alpha: list | None,
        bias: list | None,
        outputs: Outputs,
        row_scale: Float32 | None = None,
    ) -> Float32:
        """Compute one element of the result from its accumulators of gate and up.

        Args:
            gate, up: accumulators.
            alpha, bias: factors and biases of gate and up, or None.
            outputs: tensors of the launch.
            row_scale: scale of the token's row, or None.
        """
        scale = self.acc_scale
        values = []
        for half, total in enumerate((gate, up)):
            value = total if scale == 1.0 else ptx.mul_rn(total, Float32(scale))
            if row_scale is not None:
                value = ptx.mul_rn(value, row_scale)
            if alpha is not None:
                value = ptx.mul_rn(value, alpha[half])
            if bias is not None:
                value = ptx.add_rn(value, bias[half])
            values.append(value)
        return GATES[self.epilogue.gate](*values) if outputs.gate is None else swiglu(*values, *outputs.gate)

    # Stores

    def store(self, words: list, token, column, y) -> None:
        """Store words of 16-bit values or of codes in the token's row of ``y``, starting at element ``column``."""
        size = 4 * len(words) // (y.element_type.width // 8)
        to = y.iterator + cute.assume(Int64(token) * y.shape[1] + column, divby=size)
        store_words(words, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(words))))

    def store_codes(self, numbers: list, token, column, global_scale, outputs) -> None:
        """Quantise a block, and store its codes and scale. ``column`` is the block's first column in the result."""
        fmt = self.epilogue.out
        amax = Float32(0.0)
        for number in numbers:
            amax = ptx.max_abs_nan(amax, number)
        words, byte = fp4_block(numbers, amax, global_scale, fmt, self.has_e2m1_cvt)
        self.store(words, token, column // 2, outputs.y)
        at = self._scale_at(token, column // fmt.block_size, outputs)
        store_byte(cute.make_tensor(at, cute.make_layout(1)), byte)

    @cute.jit
    def clear_padding(self, outputs, m, thread, threads):
        """Zero the padding of the scales, with ``threads`` threads. ``thread`` is the index of this thread among
        them."""
        layout = self.epilogue.out_layout
        blocks = self._blocks(outputs)
        # Clear the scales of missing rows. Visit the words of the last row of tiles in memory order, so that stores
        # coalesce.
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
