"""Decode MXFP8 matrices to bfloat16: ``e4m3(code) · 2^(scale - 127)``.

The result is exact for scales from 2^-124 to 2^119. With larger scales, results of at least 2^128 become infinite. With
smaller scales, results are rounded to multiples of 2^-133, the smallest subnormal number.

Roles and data path. A thread decodes eight elements at a time: it reads eight bytes of codes and the scale of their
block, and writes 16 bytes, so that both accesses of a warp are contiguous. A CTA processes ``rows_per_cta`` rows at a
time, with ``threads_per_row`` threads per row, in a grid-stride loop over the rows. No shared memory is used.

Bytes moved per element: 1 for the code and 1/32 for the scale are read, and 2 are written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.mxfp8_dequant.config import CTAS_PER_SM, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.mxfp8_dequant.kernel import MXFP8DequantKernel

__all__ = ["CTAS_PER_SM", "KERNEL", "Arguments", "Config", "MXFP8DequantKernel", "plan"]

KERNEL = f"{__name__}.kernel.MXFP8DequantKernel"
__getattr__ = on_demand(__name__, "MXFP8DequantKernel")
