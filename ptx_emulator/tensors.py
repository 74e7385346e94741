"""Copies of torch tensors to and from the emulator's global memory."""

from __future__ import annotations

import numpy as np
import torch

from ptx_emulator.layout import GlobalMemory
from ptx_emulator.values import Array


def span(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the start of a tensor's first element to the end of its last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _raw(tensor: torch.Tensor) -> Array:
    """Return the bytes that a tensor spans, as an array that shares memory with the tensor."""
    flat = torch.as_strided(tensor, (span(tensor) // tensor.dtype.itemsize,), (1,))
    return flat.view(torch.uint8).numpy()


def _of_elements(tensor: torch.Tensor, raw: Array) -> Array:
    """Return a view of ``raw`` in the tensor's shape, with a last dimension for the bytes of an element."""
    size = tensor.dtype.itemsize
    strides = tuple(stride * size for stride in tensor.stride())
    return np.lib.stride_tricks.as_strided(raw, (*tensor.shape, size), (*strides, 1))


def bytes_of(tensor: torch.Tensor) -> tuple[Array, Array]:
    """Return the bytes that a tensor spans, and a mask of the bytes that belong to its elements."""
    if tensor.numel() == 0:
        return np.zeros(0, np.uint8), np.zeros(0, bool)
    raw = _raw(tensor)
    accessible = np.zeros(len(raw), bool)
    _of_elements(tensor, accessible)[...] = True
    return raw, accessible


def copy_back(memory: GlobalMemory, address: int, tensor: torch.Tensor) -> None:
    """Copy a tensor's elements from global memory back into the tensor."""
    if tensor.numel():
        raw = _raw(tensor)
        contents = memory.contents(address, len(raw))
        _of_elements(tensor, raw)[...] = _of_elements(tensor, contents)
