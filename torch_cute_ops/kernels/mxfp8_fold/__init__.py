"""Fold MXFP8 matrices: convert the scales of each 128 elements of a row, or of a whole row, to one scale.

A *group* consists of four neighbouring blocks of 32 elements, fewer at the end of a row. If ``Config.by_row``, it
consists of all blocks of a row. Its scale is the largest of its blocks' scales. ``y = e4m3(code · 2^(scale of the block
- scale of the group))``, rounded to nearest even. Only numbers below 2^-6 times the group's scale, which are subnormal
in e4m3, can lose bits. The error of an element is at most 2^-10 times the group's scale. (Quantising ops choose scales
for which the largest magnitude in a group is more than 224 times the group's scale.) If a scale of a group is NaN, so
is the group's scale.

Roles and data path. A thread folds 16 elements at a time: it reads 16 bytes of codes and the scale bytes of their
group, and writes 16 bytes. For the scale of a row, the lanes of each warp first divide the row's scale bytes. A CTA
processes ``rows_per_cta`` rows at a time, with ``threads_per_row`` threads per row, in a grid-stride loop over the
rows. No shared memory is used.

Bytes moved per element: 1 for the code and 1/32 for the scale are read; 1 and 1/32 are written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.mxfp8_fold.config import CTAS_PER_SM, GROUP, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.mxfp8_fold.kernel import MXFP8FoldKernel

__all__ = ["CTAS_PER_SM", "GROUP", "KERNEL", "Arguments", "Config", "MXFP8FoldKernel", "plan"]

KERNEL = f"{__name__}.kernel.MXFP8FoldKernel"
__getattr__ = on_demand(__name__, "MXFP8FoldKernel")
