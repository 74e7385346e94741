"""FP4 blocks back to numbers: ``e2m1(code) · scale / global_scale`` in fp32, rounded once to the output dtype.

Roles and data path. Threads take blocks: 8 or 16 bytes of codes and one scale in, 16 or 32 numbers out, with 128-bit
stores. A CTA works on ``rows_per_cta`` rows at a time, ``threads_per_row`` threads on each, and walks over the rows
with the grid's stride. Nothing is shared.

A code becomes fp32 by placing its exponent and significand bits where fp32 has them and multiplying by 2^126: the e2m1
subnormal 0.5 is then an fp32 subnormal, and exact. The product with the scale is exact too.

Bytes moved an element: 1/2 + 1/block_size read, the output's itemsize written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_dequant.config import CTAS_PER_SM, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_dequant.kernel import FP4DequantKernel

__all__ = ["CTAS_PER_SM", "KERNEL", "Config", "FP4DequantKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4DequantKernel"
__getattr__ = on_demand(__name__, "FP4DequantKernel")
