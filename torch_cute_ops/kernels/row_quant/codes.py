"""From values in a thread's registers to codes and scales, or to rounded values, a block at a time.

``rstd`` is the norm's row factor where the values have not been multiplied by it yet; 1 where they have, and ``None``
without a norm.
"""

from cutlass import Float32, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, pack
from torch_cute_ops.kernels.common.fp4.encode import fp4_block
from torch_cute_ops.kernels.common.fp8.encode import Divisor, divide_e4m3, dynamic_scale, scale_divisor
from torch_cute_ops.kernels.common.fp8.layouts import SCALE_THREADS
from torch_cute_ops.kernels.row_quant.config import Config
from torch_cute_ops.kernels.row_quant.shared_blocks import SharedBlocks


class Encoder:
    """The arithmetic of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config

    @property
    def shared(self) -> SharedBlocks:
        """How threads share FP8 blocks of 128 elements."""
        return SharedBlocks(SCALE_THREADS, self.config.thread_blocks)

    def _scaled(self, amax: Float32, rstd: Float32 | None) -> Float32:
        """``amax`` of values that still lack the row factor, times that factor."""
        return amax if rstd is None else ptx.mul_rn(amax, rstd)

    def rounded(self, products, rstd) -> list:
        """The words of a block's values in the input dtype, unquantised."""
        values = [products[i] for i in range(self.config.problem.unit)]
        if rstd is not None:
            values = [ptx.mul_rn(value, rstd) for value in values]
        return pack(values, DSL_DTYPES[self.config.problem.dtype])

    def fp4_block(self, products, amax, rstd, g) -> tuple[list, Uint32]:
        """The words of codes and the scale byte of one block."""
        c = self.config
        return fp4_block(products, amax[0], g, c.problem.fmt, c.has_e2m1_cvt, rstd)

    def fp8(self, blocks, rstd, amax, g) -> list:
        """The words of codes of each block, and the fp32 scale: the given ``g``, or the row's."""
        is_static = self.config.problem.fmt.is_static
        scale = g if is_static else dynamic_scale(self._scaled(amax, rstd))
        divisor = scale_divisor(scale, rstd, is_dynamic=not is_static)
        return [(divide_e4m3(products, divisor), scale) for products, _ in blocks]

    def fp8_blocks(self, blocks, rstd, amax, t) -> tuple[list, Float32]:
        """The words of codes of each block; and the scale of the block that this thread computes it for, which has this
        ``amax``."""
        scale = dynamic_scale(self._scaled(amax, rstd))
        mine = scale_divisor(scale, rstd, is_dynamic=True)
        words = []
        for j, (products, _) in enumerate(blocks):
            factor, near_one, inverse = (self.shared.broadcast(value, j, t.lane) for value in mine[:3])
            words.append(divide_e4m3(products, Divisor(factor, near_one, inverse, near_one > Float32(0.0))))
        return words, scale
