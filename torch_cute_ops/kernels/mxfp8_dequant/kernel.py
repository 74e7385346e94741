"""Device code of the kernel that decodes MXFP8 matrices. The package's docstring describes the roles and the data
path."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, Int64, Uint8, Uint32, Uint64

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping
from torch_cute_ops.kernels.common.core.memory import load_words, pack, store_words, unpack, words_per
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.mxfp8_dequant.config import THREADS, VECTOR, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class MXFP8DequantKernel:
    """Kernel that decodes rows, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config

    def arguments(self) -> Arguments:
        c = self.config
        rows = Dim("rows")
        return Arguments(
            codes=TensorArg("Float8E4M3FN", (rows, c.width), (c.width, 1), align=16),
            scale=scale_argument(MXFP8, c.layout, rows, c.blocks, align=1),
            out=TensorArg("BFloat16", (rows, c.width), (c.width, 1), align=16),
            max_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, codes, scale, out, max_ctas: Int32, stream):
        ctas = cutlass.min(cute.ceil_div(codes.shape[0], self.config.rows_per_cta), max_ctas)
        ctas = ctas_unless_overlapping(ctas, written=(out,), read=(codes, scale))
        self.kernel(codes, scale_matrix(scale, self.config.layout), out).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, codes, scale, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        for row in range(cta * c.rows_per_cta + tid // c.threads_per_row, codes.shape[0], ctas * c.rows_per_cta):
            row_scales = cute.recast_ptr(scale.iterator, dtype=Uint8) + c.layout.row_offset(Uint64(row), c.blocks)
            for vector in range(tid % c.threads_per_row, c.vectors, c.threads_per_row):
                block = Uint64(c.layout.block_offset(Uint32(vector) // (MXFP8.block_size // VECTOR)))
                byte = Uint32(cute.make_tensor(row_scales + block, cute.make_layout(1))[0])
                words = load_words(self._vector(codes, row, vector, cutlass.Float8E4M3FN))
                values = self._decode(words, float_of_ue8m0(byte))
                store_words(pack(values, BFloat16), self._vector(out, row, vector, BFloat16))

    def _vector(self, tensor, row, vector, dtype) -> cute.Tensor:
        """Return eight elements of a row, the ``vector``-th of these vectors, as a tensor of words."""
        start = tensor.iterator + cute.assume(Int64(row) * self.config.width + vector * VECTOR, divby=VECTOR)
        return cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), cute.make_layout(words_per(VECTOR, dtype)))

    def _decode(self, words: list, scale: cutlass.Float32) -> list:
        """Return the values of four codes per word, times ``scale``."""
        pairs = [ptx.f16x2_of_e4m3x2(pair) for word in words for pair in (word & Uint32(0xFFFF), word >> 16)]
        return [ptx.mul_rn(value, scale) for value in unpack(pairs, Float16)]
