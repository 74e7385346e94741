"""What goes with a GEMM: which gates and quantisations are a part of it, and what it may bring into L2 for the next."""

from typing import Final

import torch

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.ops._backend_path import gemm_package

MOST_GATED_ROWS: Final = 1
"""Most rows for which ``gates_with_gemm`` holds: with 4 and 8, a layer of an 8B model is 2 µs faster with one launch on
an H100, and 6 µs slower on an H200."""
MOST_QUANTISED_ROWS: Final = 8
"""Most rows for which ``quantises_with_gemm`` holds without a gate: with 2 and 8, a layer of an 8B model in W4A4 is
1 µs faster with one launch for o on an H100; with one for the gate and down it is as fast as with two."""
PREFETCH_MULTIPLE: Final = 16
"""Bytes of a row of what is prefetched are a multiple of this."""
MOST_PREFETCHING_ROWS: Final = 16
MOST_PREFETCHING_FP8_ROWS: Final = 64
"""Most rows for which ``prefetches_with_gemm`` holds, as kernels have it: beside an FP4 weight, and an FP8 one."""


def is_prefetchable(matrix: torch.Tensor) -> bool:
    """Whether kernels can bring it into L2: a contiguous matrix of bytes, a multiple of 16 in each row."""
    is_matrix = matrix.dim() == 2 and matrix.dtype.itemsize == 1 and matrix.is_contiguous()
    return is_matrix and matrix.shape[1] % PREFETCH_MULTIPLE == 0


def gates_with_gemm(rows: int, device: torch.device) -> bool:
    """Whether a compiled model has one op in place of a gate and the GEMM with 16-bit activations behind it: for
    one row, on GPUs that have one launch for it. (The op may still choose two, of weights with far more k than rows. On
    a CPU, where it changes no time, tests have it too.)"""
    return rows <= MOST_GATED_ROWS and _has_wgmma(device)


def quantises_with_gemm(rows: int, device: torch.device, block_size: int, *, gated: bool = False) -> bool:
    """Whether one op is called in place of a quantisation to FP4, ``gated`` or not, and the GEMM behind it: for few
    rows in NVFP4, where GPUs have one launch for it."""
    most = MOST_GATED_ROWS if gated else MOST_QUANTISED_ROWS
    return block_size == NVFP4.block_size and rows <= most and _has_wgmma(device)


def prefetches_with_gemm(rows: int, device: torch.device, *, has_fp8_weight: bool = False) -> bool:
    """Whether a GEMM of so many rows is to bring something into L2, on GPUs with kernels that do: one of few rows, and
    of more where its own weight is in FP8."""
    return rows <= (MOST_PREFETCHING_FP8_ROWS if has_fp8_weight else MOST_PREFETCHING_ROWS) and _has_wgmma(device)


def _has_wgmma(device: torch.device) -> bool:
    """Whether it is a GPU with warpgroup MMA, or a CPU, where tests are to see what such a GPU does."""
    if device.type not in ("cpu", "cuda"):
        return False
    arch = gemm_package().select.target_of(device).arch
    return device.type == "cpu" or (arch is not None and arch.has_wgmma)
