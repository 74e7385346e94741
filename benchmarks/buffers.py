"""Fill outputs with a fixed value (poison) before an op runs, so that elements that the op does not write are
detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

BYTE = 0x5A
FLOAT = 12345.0  # not NaN, because NaN would differ from itself if two results are compared
INTEGER = -(2**31)


def poisoned_outputs(op: str, call: Callable[[Callable[..., Any]], Any]) -> dict[str, torch.Tensor]:
    """Return poisoned outputs of an op by name, with the shapes and dtypes of its fake implementation.

    Args:
        call: function that receives a function `f`, and calls `f` with the arguments of the op.
    """
    spec = OPS[op]
    return {name: poisoned(output) for name, output in zip(spec.outputs, as_tuple(call(spec.fake)), strict=True)}


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Return a poisoned tensor with the shape, dtype and device of `like`."""
    if like.dtype.itemsize == 1:
        return torch.full(like.shape, BYTE, dtype=torch.uint8, device=like.device).view(like.dtype)
    return torch.full_like(like, FLOAT if like.dtype.is_floating_point else INTEGER)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the same size. `torch.where` supports integers, but not all float8 dtypes."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
