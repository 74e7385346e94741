"""Static properties of an op's calls. ``warmup``, deployment files and the command line use them to name a kernel.

Each op declares its properties once, in ``CallPath.declare``. The properties of a call, the example calls and the
command-line options are all derived from this declaration.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, get_args

import torch

from torch_cute_ops.ops._signature import Parameter

LARGEST: Final = 2**63 - 1
"""Largest size that a torch tensor can have."""
REQUIRED: Final = inspect.Parameter.empty
_IN_WORDS: Final = {bool: "True or False", str: "a string", torch.dtype: "a torch.dtype"}
_KINDS: Final[dict[str, type]] = {"int": int, "bool": bool, "str": str, "ScalarType": torch.dtype}


def size_in_words(value: Any) -> str:
    """Describe a valid size in words, for an error message about ``value``."""
    return f"an integer of at most {LARGEST}" if type(value) is int and value > LARGEST else "a positive integer"


@dataclass(frozen=True)
class Property:
    """Declaration of one static property of an op's calls.

    Attributes:
        kind: ``int``, ``bool``, ``str`` or ``torch.dtype``.
        default: value for calls that do not name the property, or ``inspect.Parameter.empty`` if they must name it.
        is_optional: True if the value may be None.
        choices: all possible strings; empty if any string is possible.
        of: function that returns the property's value for a call, or None if an error message that shows a ``warmup``
            call may omit the property.
    """

    kind: type
    default: Any
    is_optional: bool
    choices: tuple[str, ...] = ()
    of: Callable[[Any], Any] = field(default=lambda call: None, compare=False, repr=False)

    @property
    def is_required(self) -> bool:
        """True if calls must name the property."""
        return self.default is REQUIRED

    def reason_unfit(self, value: Any) -> str | None:
        """Return a description of the requirement that ``value`` violates, or None if ``value`` is valid."""
        if value is None and self.is_optional:
            return None
        # compare types exactly, because True is an int but not a size
        if self.kind is int:
            return None if type(value) is int and 1 <= value <= LARGEST else size_in_words(value)
        if type(value) is not self.kind:
            return _IN_WORDS[self.kind]
        if self.choices and value not in self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        return None


def size(of: Callable[[Any], int], default: Any = REQUIRED) -> Property:
    """Declare a property that is a positive number."""
    return Property(int, default, False, (), of)


def flag(of: Callable[[Any], bool | None], default: bool = False) -> Property:
    """Declare a property that is True or False."""
    return Property(bool, default, False, (), of)


def dtype(of: Callable[[Any], torch.dtype | None], default: Any = None) -> Property:
    """Declare a property that is a dtype. The dtype may be None unless ``default`` is ``REQUIRED``."""
    return Property(torch.dtype, default, default is None, (), of)


def choice(literal: Any, of: Callable[[Any], str | None]) -> Property:
    """Declare a property that is one of the strings of a ``Literal``, or None."""
    return Property(str, None, True, get_args(literal), of)


def argument(parameter: Parameter) -> Property:
    """Declare a property that is an argument of the op."""
    kind, of = _KINDS[parameter.type], attrgetter(parameter.name)
    return Property(kind, parameter.default, parameter.is_optional, parameter.choices, of)
