"""Dequantise FP4 blocks: ``e2m1(code) · scale / global_scale`` in fp32, rounded once to the output dtype.

Roles and data path. A thread processes one block at a time: it reads 8 or 16 bytes of codes and one scale, and writes
16 or 32 values with 128-bit stores. A CTA processes ``rows_per_cta`` rows at a time, with ``threads_per_row`` threads
per row, in a grid-stride loop over the rows. No shared memory is used.

To decode a code, a thread moves the code's exponent and significand bits to their places in an fp32 number, and
multiplies by 2^126. The e2m1 subnormal 0.5 is an fp32 subnormal before this multiplication, so no special case is
needed, and the result is exact. The product with the scale is also exact.

Bytes moved per element: 1/2 for the code and 1/block_size for the scale are read, and the output's itemsize is written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_dequant.config import CTAS_PER_SM, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_dequant.kernel import FP4DequantKernel

__all__ = ["CTAS_PER_SM", "KERNEL", "Arguments", "Config", "FP4DequantKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4DequantKernel"
__getattr__ = on_demand(__name__, "FP4DequantKernel")
