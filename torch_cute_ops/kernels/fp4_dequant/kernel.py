"""Device code of the kernel that dequantises FP4 blocks. The package's docstring describes the roles and the data
path."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, Uint64, const_expr

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, pack, store_words, words_per
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.fp4_dequant.config import THREADS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class FP4DequantKernel:
    """Kernel that dequantises rows, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.out_dtype = DSL_DTYPES[config.out_dtype]

    def arguments(self) -> Arguments:
        c = self.config
        rows = Dim("rows")
        return Arguments(
            y=TensorArg("Uint8", (rows, c.width // 2), (c.width // 2, 1), align=16),
            scale=scale_argument(c.fmt, c.layout, rows, c.blocks)._replace(dtype="Uint8"),
            global_scale=TensorArg("Float32", (1,), (1,), align=4) if c.global_scale else None,
            out=TensorArg(self.out_dtype.__name__, (rows, c.width), (c.width, 1), align=16),
            max_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, y, scale, global_scale, out, max_ctas: Int32, stream):
        ctas = cutlass.min(cute.ceil_div(y.shape[0], self.config.rows_per_cta), max_ctas)
        ctas = ctas_unless_overlapping(ctas, written=(out,), read=(y, scale, global_scale))
        self.kernel(y, scale_matrix(scale, self.config.layout), global_scale, out).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, y, scale, global_scale, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        column = tid % c.threads_per_row
        divisor = None
        if const_expr(global_scale is not None):
            divisor = global_scale[0]
        for row in range(cta * c.rows_per_cta + tid // c.threads_per_row, y.shape[0], ctas * c.rows_per_cta):
            row_scales = cute.recast_ptr(scale.iterator, dtype=Uint8) + c.layout.row_offset(Uint64(row), c.blocks)
            for block in range(column, c.blocks, c.threads_per_row):
                offset = Uint64(c.layout.block_offset(Uint32(block)))
                byte = Uint32(cute.make_tensor(row_scales + offset, cute.make_layout(1))[0])
                codes = self._block(y, row, block, Uint8, c.width // 2)
                values = self._decode(load_words(codes), self._scale(byte), divisor)
                store_words(pack(values, self.out_dtype), self._block(out, row, block, self.out_dtype, c.width))

    def _block(self, tensor, row, block, dtype, row_elements: int) -> cute.Tensor:
        """Return a block of a contiguous matrix as a tensor of words. The matrix has ``row_elements`` elements per
        row."""
        words = words_per(row_elements // self.config.blocks, dtype)
        start = tensor.iterator + cute.assume(Int64(row) * row_elements, divby=row_elements // self.config.blocks)
        layout = cute.make_layout((words, self.config.blocks), stride=(1, words))
        return cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), layout)[None, block]

    def _scale(self, byte: Uint32) -> Float32:
        """Return the fp32 value of a scale byte."""
        if self.config.fmt == NVFP4:
            return ptx.float_of_e4m3(byte)
        # A ue8m0 byte is the exponent field of the same fp32 number, except for two values: 2^-127 is subnormal, and
        # 0xFF is NaN.
        bits = ptx.select(byte == Uint32(0), Uint32(0x00400000), byte << 23)
        return ptx.float_of(ptx.select(byte == Uint32(0xFF), Uint32(0x7FC00000), bits))

    def _decode(self, words: list, scale: Float32, divisor: Float32 | None) -> list:
        """Return the values of packed codes, times ``scale`` and divided by ``divisor``. Element 0 is the lowest
        nibble."""
        values = []
        for word in words:
            for i in range(8):
                code = word >> (4 * i) if i else word
                bits = ((code & Uint32(7)) << 22) | ((code & Uint32(8)) << 28)
                value = ptx.mul_rn(ptx.mul_rn(ptx.float_of(bits), Float32(2.0**126)), scale)
                values.append(value if divisor is None else ptx.div_rn(value, divisor))
        return values
