"""Device code of the kernel that quantises blocks of 128 × 128 elements to FP8. The package's docstring describes its
data path."""

from functools import reduce
from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr, range_constexpr

from torch_cute_ops.formats.fp8 import FP8_BLOCK128, SHORT_BLOCK
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, unpack
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0, is_live, ue8m0_scale
from torch_cute_ops.kernels.common.fp8.encode import (
    E4M3_MAX,
    divide_e4m3,
    dynamic_scale,
    multiply_e4m3,
    scale_divisor,
    warp_amaxes,
)
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS
from torch_cute_ops.kernels.fp8_square_blocks.config import THREADS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg

BLOCK: Final = FP8_BLOCK128.block_size
VECTOR: Final = 16  # number of bytes of a load
WARPS: Final = THREADS // 32
ROWS_AT_ONCE: Final = THREADS // SCALE_THREADS  # rows that a CTA processes at once, one unit per thread


class FP8SquareBlocksKernel:
    """Kernel that quantises blocks of 128 × 128 elements, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> Arguments:
        experts, n, k = Dim("experts"), Dim("n"), Dim("k", divisibility=SHORT_BLOCK)
        step = VECTOR // self.config.dtype.itemsize
        of_expert, of_row = (Dim(name, divisibility=step, bits=64) for name in ("expert_stride", "row_stride"))
        columns = Dim("scale_columns")
        return Arguments(
            input=TensorArg(self.dtype.__name__, (experts, n, k), (of_expert, of_row, 1), align=VECTOR),
            y=TensorArg("Float8E4M3FN", (Dim("rows"), k), (k, 1), align=VECTOR),
            scale=TensorArg("Float32", (Dim("scale_rows"), columns), (columns, 1), align=4),
        )

    @cute.jit
    def __call__(self, input, y, scale, stream):
        ctas = ctas_unless_overlapping(scale.shape[0] * scale.shape[1], written=(y, scale), read=(input,))
        self.kernel(input, y, scale).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, input, y, scale):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        pdl_start(c.pdl)
        n, k = input.shape[1], input.shape[2]
        block_row, block_column = cta // scale.shape[1], cta % scale.shape[1]
        blocks_of_matrix = cute.ceil_div(n, BLOCK)
        matrix, first_row = block_row // blocks_of_matrix, block_row % blocks_of_matrix * BLOCK + tid // SCALE_THREADS
        column = cute.assume(block_column * BLOCK + tid % SCALE_THREADS * FP8_UNIT, divby=FP8_UNIT)
        divisor = VECTOR // c.dtype.itemsize
        start = input.iterator + cute.assume(Int64(matrix) * input.stride[0], divby=divisor) + column
        loaded = []
        for i in range_constexpr(BLOCK // ROWS_AT_ONCE):
            row = first_row + i * ROWS_AT_ONCE
            exists = (row < n) & (column < k)
            at = start + cute.assume(Int64(row) * input.stride[1], divby=divisor)
            words = []
            for j in range_constexpr(FP8_UNIT * c.dtype.itemsize // VECTOR):
                words += ptx.load_if(at, exists, VECTOR // 4, VECTOR * j)
            loaded.append((row, exists, words))
        units = [(row, exists, unpack(words, self.dtype)) for row, exists, words in loaded]
        own_amax = reduce(ptx.max_abs_nan, [v for *_, unit in units for v in unit], Float32(0.0))
        of_warps = warp_amaxes(own_amax, tid, WARPS)
        amax = reduce(ptx.max_abs_nan, [of_warps[i] for i in range(WARPS)])
        if const_expr(c.scale_format == "ue8m0"):
            byte, inverse = ue8m0_scale(amax, E4M3_MAX)
            own = float_of_ue8m0(byte)
            encoded = [multiply_e4m3(unit, inverse, is_live(amax)) for *_, unit in units]
        else:
            own = dynamic_scale(amax)
            prepared = scale_divisor(own, None, is_dynamic=True)
            encoded = [divide_e4m3(unit, prepared) for *_, unit in units]
        for i in range_constexpr(len(units)):
            row, exists, _ = units[i]
            to = (Int64(matrix) * n + row) * k + column
            ptx.store_if(y.iterator + cute.assume(to, divby=FP8_UNIT), encoded[i], exists)
        if tid == 0:
            scale[block_row, block_column] = own
