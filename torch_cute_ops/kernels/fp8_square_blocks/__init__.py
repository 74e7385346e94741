"""Quantise matrices to FP8 with one fp32 scale per block of 128 × 128 elements, the format of block-scaled weights.

A CTA processes one block. Eight neighbouring threads hold 128 elements of a row, and each thread holds the same 16
columns of four rows, 32 rows apart. A thread issues all its loads at once, and keeps the values in registers while the
block's amax is reduced: over a warp by shuffles, and over the eight warps through shared memory, with one barrier of
the CTA. Every thread then computes the scale, and stores its codes. Blocks at the end of a matrix have fewer rows or 64
columns; their missing elements are loaded as zeros, which change neither amax nor scale, and are not stored.

Bytes moved: each element is read once and written once, and the scales are written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_square_blocks.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_square_blocks.kernel import FP8SquareBlocksKernel

__all__ = ["KERNEL", "Arguments", "Config", "FP8SquareBlocksKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8SquareBlocksKernel"
__getattr__ = on_demand(__name__, "FP8SquareBlocksKernel")
