"""The static properties of an op's calls: what ``warmup``, deployment files and the command line name a kernel by."""

import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import torch

from torch_cute_ops.ops._call import CallPath

LARGEST: Final = 2**63 - 1
"""The largest size that torch takes."""
_IN_WORDS: Final = {bool: "True or False", str: "a string", torch.dtype: "a torch.dtype"}


def size_in_words(value: Any) -> str:
    """What is expected in place of a value that is no size."""
    return f"an integer of at most {LARGEST}" if type(value) is int and value > LARGEST else "a positive integer"


@dataclass(frozen=True)
class Property:
    """What values one static property of an op's calls has.

    Attributes:
        kind: ``int``, ``bool``, ``str`` or ``torch.dtype``.
        default: what calls have that do not name it; ``inspect.Parameter.empty``: it has to be named.
        is_optional: whether it may be ``None``.
        choices: the only values that it has, of strings; empty: any.
    """

    kind: type
    default: Any
    is_optional: bool
    choices: tuple[str, ...] = ()

    @property
    def is_required(self) -> bool:
        """Whether it has to be named."""
        return self.default is inspect.Parameter.empty

    def reason_unfit(self, value: Any) -> str | None:
        """What is expected instead of ``value``; ``None`` if that is a value of this property."""
        if value is None and self.is_optional:
            return None
        # By type: a bool is an instance of int, and no size.
        if self.kind is int:
            return None if type(value) is int and 1 <= value <= LARGEST else size_in_words(value)
        if type(value) is not self.kind:
            return _IN_WORDS[self.kind]
        if self.choices and value not in self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        return None


def properties_of(path: CallPath[Any], function: Callable[..., Any]) -> dict[str, Property]:
    """The properties of an op by name, but for the device: the parameters of ``path.example``, typed as those of the
    op's own function where it has parameters of the same names."""
    hints = get_type_hints(path.example)
    own = get_type_hints(function)
    parameters = inspect.signature(path.example).parameters.items()
    return {
        name: _property(hints[name] if own.get(name, torch.Tensor) in _TENSORS else own[name], parameter.default)
        for name, parameter in parameters
        if name != "device" and path.has_property(name)
    }


_TENSORS: Final = (torch.Tensor, torch.Tensor | None)


def _property(hint: Any, default: Any) -> Property:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not type(None)]
    choices = tuple(itertools.chain(*(get_args(kind) for kind in kinds if get_origin(kind) is Literal)))
    (kind,) = {str if get_origin(kind) is Literal else kind for kind in kinds}
    return Property(kind, default, len(kinds) < len(members), choices)
