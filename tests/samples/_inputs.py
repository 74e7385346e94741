"""Good and bad inputs of an op, in the manner of PyTorch's ``OpInfo``."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """Arguments that an op accepts.

    Attributes:
        name: feature that the sample tests; unique among the op's samples.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorInput:
    """Arguments that an op refuses, and the expected error.

    Attributes:
        name: fault of the arguments; unique among the op's error inputs.
        args: positional arguments.
        kwargs: keyword arguments.
        error: type of the exception.
        match: regular expression that its message matches somewhere.
        out: output tensors, if these are the fault. Only forms of the op that take outputs then refuse the call.
        is_address: True if the fault is an address, which fake tensors do not have.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: type[Exception]
    match: str
    out: tuple[torch.Tensor, ...] | None = None
    is_address: bool = False
