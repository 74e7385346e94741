"""Inputs of an op, good and bad, in the manner of PyTorch's ``OpInfo``."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """Arguments that an op takes.

    Attributes:
        name: what is special about it; unique among the op's samples.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorInput:
    """Arguments that an op refuses, and how.

    Attributes:
        name: what is wrong; unique among the op's error inputs.
        args: positional arguments.
        kwargs: keyword arguments.
        error: type of the exception.
        match: regular expression that its message matches somewhere.
        out: output tensors, where they are what is wrong: only the forms of the op that take outputs refuse this.
        is_address: whether an address is what is wrong, which fake tensors have none of.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: type[Exception]
    match: str
    out: tuple[torch.Tensor, ...] | None = None
    is_address: bool = False
