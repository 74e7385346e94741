"""Outputs as they are before an op has written them: poisoned, so that what it leaves out shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

BYTE = 0x5A
FLOAT = 12345.0  # a number: NaN would not equal itself where an op leaves a part of an output alone
INTEGER = -(2**31)


def poisoned_outputs(op: str, call: Callable[[Callable[..., Any]], Any]) -> dict[str, torch.Tensor]:
    """Poisoned outputs of an op by name, with the shapes and dtypes that its fake gives; `call(function)` calls a
    function with the op's arguments."""
    spec = OPS[op]
    return {name: poisoned(output) for name, output in zip(spec.outputs, as_tuple(call(spec.fake)), strict=True)}


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A poisoned tensor of this shape and dtype, where it is."""
    if like.dtype.itemsize == 1:
        return torch.full(like.shape, BYTE, dtype=torch.uint8, device=like.device).view(like.dtype)
    return torch.full_like(like, FLOAT if like.dtype.is_floating_point else INTEGER)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: PyTorch has no `where` for all float8 dtypes."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
