"""Recode an FP4 weight with prepared scales to FP8, for ``kernels.fp8_token_wgmma``, a GEMM with per-token scales.

The kernel writes the e4m3 numbers that ``kernels.fp8_fp4_token_wgmma`` decodes in registers, and each row's unit as
float32. So both GEMMs multiply the same numbers. k is interleaved as ``kernels.interleave_k`` interleaves the
activations. Elements beyond K become zeros.

Eight threads recode 256 elements of a row. Thread (p, i), with p 0 or 1 and i 0 to 3, loads word i of the codes of
elements ``64 c + 32 p`` to ``64 c + 32 p + 31``, for c from 0 to 3, and stores 32 contiguous bytes, starting at byte
``128 p + 32 i``. A thread recodes four neighbouring rows, so that 16 loads of codes are in flight. The threads of a
warp load whole sectors and store whole cache lines. No shared memory is used.

Bytes moved per element of the weight: 1/2 + 1/block_size bytes are read, and 1 byte is written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_token_recode.config import Arguments, Config

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_token_recode.kernel import FP8FP4TokenRecodeKernel

__all__ = ["KERNEL", "Arguments", "Config", "FP8FP4TokenRecodeKernel"]

KERNEL = f"{__name__}.kernel.FP8FP4TokenRecodeKernel"
__getattr__ = on_demand(__name__, "FP8FP4TokenRecodeKernel")
