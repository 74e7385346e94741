"""Data classes of valid calls and error inputs, in the manner of PyTorch's ``OpInfo``."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """A call that an op accepts.

    Attributes:
        name: name of the feature that the sample tests; unique among the op's samples.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorInput:
    """A call that an op refuses, and the expected error.

    Attributes:
        name: name of the mistake; unique among the op's error inputs.
        args: positional arguments.
        kwargs: keyword arguments.
        error: type of the exception.
        match: regular expression that must match somewhere in the exception's message.
        out: wrong output tensors, or None. Forms of the op that take no outputs then accept the call.
        is_address: True if only an address is wrong. Fake tensors have no addresses.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: type[Exception]
    match: str
    out: tuple[torch.Tensor, ...] | None = None
    is_address: bool = False
