"""Rules that decide when a gate or a quantisation is fused into the following GEMM, and when a GEMM prefetches the
next weight."""

from typing import Final

import torch

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.ops._backend_path import gemm_package

MOST_GATED_ROWS: Final = 1
"""Largest number of rows for which ``gates_with_gemm`` fuses a gate into the following GEMM.

Fusing 4 or 8 rows makes a layer of an 8B model 2 µs faster on an H100, but 6 µs slower on an H200."""
MOST_QUANTISED_ROWS: Final = 8
"""Largest number of rows for which ``quantises_with_gemm`` fuses a quantisation without a gate into the following GEMM.

On an H100 with 2 or 8 rows, fusing the quantisation before the output projection makes a W4A4 decoder layer of an 8B
model 1 µs faster. Fusing the gate and quantisation before the down projection does not change the time."""
PREFETCH_MULTIPLE: Final = 16
"""The bytes of a row of a prefetched matrix must be a multiple of this number."""
MOST_PREFETCHING_ROWS: Final = 16
MOST_PREFETCHING_FP8_ROWS: Final = 64
"""Largest numbers of rows for which ``prefetches_with_gemm`` returns True, for an FP4 weight (first) and an FP8 weight
(second). The kernels have the same limits."""


def is_prefetchable(matrix: torch.Tensor) -> bool:
    """Return True if kernels can prefetch a matrix into L2: it is contiguous, and its rows are a multiple of 16
    bytes."""
    is_matrix = matrix.dim() == 2 and matrix.dtype.itemsize == 1 and matrix.is_contiguous()
    return is_matrix and matrix.shape[1] % PREFETCH_MULTIPLE == 0


def gates_with_gemm(rows: int, device: torch.device) -> bool:
    """Return True if a compiled model fuses a gate and the following GEMM with 16-bit activations into one op.

    The answer is True for one row, on GPUs that can compute gate and GEMM in one launch. For weights whose K is far
    larger than N, the fused op itself may still make two launches. On a CPU the function returns True for the same
    calls as on Hopper, so that tests cover the fused ops.
    """
    return rows <= MOST_GATED_ROWS and _has_wgmma(device)


def quantises_with_gemm(rows: int, device: torch.device, block_size: int, *, gated: bool = False) -> bool:
    """Return True if a compiled model fuses a quantisation to FP4, ``gated`` or not, and the following GEMM into one
    op.

    The answer is True for few rows in NVFP4, on GPUs that can compute both in one launch.
    """
    most = MOST_GATED_ROWS if gated else MOST_QUANTISED_ROWS
    return block_size == NVFP4.block_size and rows <= most and _has_wgmma(device)


def prefetches_with_gemm(rows: int, device: torch.device, *, has_fp8_weight: bool = False) -> bool:
    """Return True if a GEMM of ``rows`` rows should prefetch the next weight into L2. Only the kernels of some GPUs can
    prefetch.

    The limit on the number of rows is higher for an FP8 weight than for an FP4 weight.
    """
    return rows <= (MOST_PREFETCHING_FP8_ROWS if has_fp8_weight else MOST_PREFETCHING_ROWS) and _has_wgmma(device)


def _has_wgmma(device: torch.device) -> bool:
    """Return True for a GPU with warpgroup MMA, and for a CPU, so that tests on a CPU cover the fused ops."""
    if device.type not in ("cpu", "cuda"):
        return False
    arch = gemm_package().select.target_of(device).arch
    return device.type == "cpu" or (arch is not None and arch.has_wgmma)
