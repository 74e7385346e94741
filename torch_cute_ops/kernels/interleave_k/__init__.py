"""Kernel of ``torch_cute_ops.interleave_k``: interleave k of FP8 activations for ``kernels.fp8_fp4_token_wgmma``.

Within each 256 elements of a row, element 64 c + 32 p + 8 i + 4 h + e moves to place 128 p + 32 i + 16 h + 4 c + e,
where c, i and e are 0 to 3, and p and h are 0 or 1. Words of four elements move as a whole. Elements beyond K become
zeros.

Sixteen threads handle 256 elements. Each thread loads four words that are 64 bytes apart, and stores these words as 16
contiguous bytes. So the threads together load and store whole sectors. Bytes moved: each element is read and written
once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.interleave_k.config import Arguments, Config

if TYPE_CHECKING:
    from torch_cute_ops.kernels.interleave_k.kernel import InterleaveKKernel

__all__ = ["KERNEL", "Arguments", "Config", "InterleaveKKernel"]

KERNEL = f"{__name__}.kernel.InterleaveKKernel"
__getattr__ = on_demand(__name__, "InterleaveKKernel")
