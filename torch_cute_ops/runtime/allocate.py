"""New tensors at the least cost to the host."""

from collections.abc import Callable

import torch

New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

try:
    # What Inductor's generated code allocates with: no argument parser, no dispatcher; on the current device.
    # 0.41 µs instead of 0.87 for torch.empty_strided, and 1.05 for new_empty (CPU twin of it, torch 2.13).
    from torch._C import _cuda_getDevice as _current_device  # type: ignore[attr-defined, unused-ignore]
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined, unused-ignore]
except ImportError:

    def _current_device() -> int:
        return -1

    _empty_strided_cuda = None


def allocator(device: torch.device) -> New:
    """A function of (size, strides, dtype) that makes an uninitialised tensor on a CUDA device."""
    if _current_device() == device.index:
        new: New = _empty_strided_cuda
        return new
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def new_bytes(device: torch.device, size: int) -> torch.Tensor:
    """An uninitialised workspace of so many bytes on a CUDA device."""
    return allocator(device)((size,), (1,), torch.uint8)
