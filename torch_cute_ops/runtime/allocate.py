"""New tensors at the least cost to the host."""

from collections.abc import Callable

import torch

New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

try:
    # What Inductor's generated code allocates with: no argument parser, no dispatcher; on the current device.
    # 0.41 µs instead of 0.87 for torch.empty_strided, and 1.05 for new_empty (CPU twin of it, torch 2.13).
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined, unused-ignore]
except ImportError:
    _empty_strided_cuda = None


def allocator(device: torch.device) -> New:
    """A function of (size, strides, dtype) that makes an uninitialised tensor on ``device``."""
    if _empty_strided_cuda is not None and device.type == "cuda" and torch._C._cuda_getDevice() == device.index:
        new: New = _empty_strided_cuda
        return new
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
