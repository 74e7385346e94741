"""Allocate CUDA tensors with as little host time as possible."""

import math
from collections.abc import Callable, Sequence

import torch

New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

try:
    # Use the allocator of Inductor's generated code, which has no argument parser and no dispatcher, and allocates on
    # the current device only. It takes 0.41 µs; torch.empty_strided takes 0.87 µs, and new_empty 1.05 µs (measured
    # with the allocator's CPU counterpart, torch 2.13).
    from torch._C import _cuda_getDevice as _current_device  # type: ignore[attr-defined, unused-ignore]
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined, unused-ignore]
except ImportError:

    def _current_device() -> int:
        return -1

    _empty_strided_cuda = None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def allocator(device: torch.device) -> New:
    """Return the fastest function (size, strides, dtype) that allocates an uninitialised tensor on this CUDA device."""
    if _current_device() == device.index:
        new: New = _empty_strided_cuda
        return new
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def new_bytes(device: torch.device, size: int) -> torch.Tensor:
    """Allocate an uninitialised workspace of ``size`` bytes on a CUDA device."""
    return allocator(device)((size,), (1,), torch.uint8)
