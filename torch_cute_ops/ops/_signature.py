"""Read the parameters of an op from its typed Python function, and derive the op's schemas from them.

This replaces torch's ``infer_schema``, which makes every ``int`` a ``SymInt``, even a block size, and refuses
``Literal``.
"""

import inspect
import numbers
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import torch

from torch_cute_ops.formats.scale_layout import FP4ScaleLayout as FP4ScaleLayout
from torch_cute_ops.runtime.dispatch import is_proxy

Tensor = torch.Tensor
UpdatedTensor = Annotated[Tensor, "updated in place"]
SymInt = Annotated[int, "symbolic"]
"""Integer that depends on shapes. With ``int`` instead, ``torch.compile`` would recompile the graph for each value."""

ScaleFormat = Literal["e4m3", "ue8m0"]
WeightScaleLayout = Literal["linear", "128x4"]
FP8Granularity = Literal["tensor", "token", "block128", "block32"]
FP8ScaleFormat = Literal["ue8m0"]
FP8ScaleLayout = Literal["row", "column", "linear", "128x4", "8x4"]
Scoring = Literal["softmax", "sigmoid"]
AlphaKind = Literal["one", "column", "expert", "expert_column"]
GatedAlphaKind = Literal["expert", "expert_half"]
"""Values of the static property that says which elements of the result share a factor ``alpha``: ``AlphaKind`` for
GEMMs without a gate in their epilogue, ``GatedAlphaKind`` for GEMMs with a gate."""
GlobalScaleKind = Literal["one", "expert"]
"""Kinds of the global scale of a GEMM with a gate: one for all experts, or one per expert."""

_SCHEMA_TYPES: Final[dict[Any, str]] = {
    Tensor: "Tensor",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}
_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "int": ((int,), "an int"),
    "SymInt": ((int, torch.SymInt), "an int"),
    "float": ((float, int, torch.SymFloat), "a number"),
    "bool": ((bool,), "a bool"),
    "str": ((str,), "a string"),
    "ScalarType": ((torch.dtype,), "a torch.dtype"),
}

_NUMBERS: Final[dict[str, type]] = {"int": numbers.Integral, "SymInt": numbers.Integral, "float": numbers.Real}
"""Number types that an argument may have, keyed by its type in the schema. They include types of other libraries, such
as ``numpy.int64``, because the dispatcher accepts these too."""

_LARGEST: Final[dict[str, int]] = {"int": 2**63 - 1, "SymInt": 2**63 - 1, "float": int(sys.float_info.max)}
"""Largest number of each number type of a schema. Python's integers are unlimited."""


class Parameter(NamedTuple):
    """One parameter of an op.

    Attributes:
        name: name in the schema and in the Python function.
        type: type in the schema, without the ``?`` of an optional parameter.
        is_optional: True if the value may be None.
        is_updated: True if the op updates this tensor in place.
        default: default in the schema and in the Python function, or ``inspect.Parameter.empty``.
        choices: possible strings of a ``Literal``; empty if the parameter is not a ``Literal``.
    """

    name: str
    type: str
    is_optional: bool
    is_updated: bool
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.type == "Tensor"

    def schema(self, alias: str) -> str:
        """Return the parameter in the syntax of a schema; ``alias`` is the letter for a tensor that is updated in
        place."""
        type_ = f"Tensor({alias}!)" if self.is_updated else self.type
        text = f"{type_}{'?' if self.is_optional else ''} {self.name}"
        if self.default is inspect.Parameter.empty:
            return text
        default = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        return f"{text}={default}"

    def reason_unfit(self, value: Any) -> str | None:
        """Return an explanation if ``value`` has a wrong Python type, or None if the type is right."""
        if (value is None and self.is_optional) or is_proxy(value):
            return None
        accepted, expected = _KINDS[self.type]
        if isinstance(value, int) and self.type in _LARGEST and abs(value) > _LARGEST[self.type]:
            return f"{self.name} is an int of {value.bit_length()} bits; expected {expected} of 64"
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if isinstance(value, accepted) and (self.type == "bool" or not isinstance(value, bool)):
            return None
        if is_number and isinstance(value, _NUMBERS.get(self.type, ())):
            return None
        shown = "None" if value is None else f"{value!r}, a {type(value).__name__}"
        fix = f": pass torch.tensor([{float(value)!r}], device=…)" if is_number and self.is_tensor else ""
        return f"{self.name} is {shown}; expected {expected}{' or None' if self.is_optional else ''}{fix}"


@dataclass(frozen=True)
class Signature:
    """An op's parameters and outputs.

    Attributes:
        name: name of the op.
        parameters: parameters in order.
        outputs: names of the outputs.
    """

    name: str
    parameters: tuple[Parameter, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], outputs: Iterable[str]) -> "Signature":
        """Read the signature of a typed function. Keyword-only parameters such as ``out`` are left out.

        Raises:
            TypeError: if an annotation has no type in a schema.
        """
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        return cls(
            function.__name__,
            tuple(
                _parameter(parameter)
                for parameter in parameters
                if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            ),
            tuple(outputs),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)

    @cached_property
    def tensors(self) -> tuple[Parameter, ...]:
        """Parameters that are tensors."""
        return tuple(parameter for parameter in self.parameters if parameter.is_tensor)

    @cached_property
    def required_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that cannot be None."""
        return tuple(parameter.name for parameter in self.tensors if not parameter.is_optional)

    @cached_property
    def _usual_types(self) -> tuple[frozenset[type], ...]:
        """For each parameter, the Python types that are accepted without a further check."""
        return tuple(
            frozenset(
                (*(kind for kind in _KINDS[each.type][0] if kind is not int), *([NoneType] if each.is_optional else []))
            )
            for each in self.parameters
        )

    @cached_property
    def updated(self) -> tuple[str, ...]:
        """Names of the tensors that the op updates in place."""
        return tuple(parameter.name for parameter in self.parameters if parameter.is_updated)

    @cached_property
    def out_names(self) -> tuple[str, ...]:
        """Names of the outputs as arguments of the ``.out`` overload. If an output has the name of a parameter,
        ``_out`` is appended."""
        return tuple(f"{output}_out" if output in self.names else output for output in self.outputs)

    @property
    def schema(self) -> str:
        """Schema of the functional op."""
        returns = "Tensor" if len(self.outputs) == 1 else f"({', '.join(f'Tensor {name}' for name in self.outputs)})"
        return f"{self.name}({self._parameters()}) -> {returns}"

    @property
    def out_schema(self) -> str:
        """Schema of the ``.out`` overload. It returns nothing, because ``Tag.out`` with several outputs crashes
        Inductor."""
        letters = iter("abcdefgh"[len(self.updated) :])
        outputs = ", ".join(f"Tensor({next(letters)}!) {name}" for name in self.out_names)
        return f"{self.name}.out({self._parameters()}, *, {outputs}) -> ()"

    @property
    def tags(self) -> tuple[torch.Tag, ...]:
        """Tags of the functional op.

        The tag makes Inductor pass tensors with the strides of the traced program, because the strides of FP8 block
        scales define their layout. Ops that update tensors in place get a weaker tag, which preserves only
        the order of strides. With the stronger tag, Inductor would copy a tensor that has a dimension of one element,
        and torch 2.11 to 2.13 then fails (``KeyError`` in ``compute_ancestors``).
        """
        return (torch.Tag.needs_fixed_stride_order if self.updated else torch.Tag.needs_exact_strides,)

    def _parameters(self) -> str:
        letters = iter("abcdefgh")
        return ", ".join(each.schema(next(letters) if each.is_updated else "") for each in self.parameters)

    def check_kinds(self, values: Iterable[Any]) -> None:
        """Check the Python types of the arguments. None is accepted only for optional parameters.

        Raises:
            TypeError: if a type is wrong; the message names the op, the argument, the value and the expected type.
        """
        for parameter, usual, value in zip(self.parameters, self._usual_types, values, strict=True):
            if type(value) not in usual and (reason := parameter.reason_unfit(value)) is not None:
                raise TypeError(f"cute::{self.name}: {reason}")


def _parameter(parameter: inspect.Parameter) -> Parameter:
    hint, is_optional = parameter.annotation, False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
        is_optional = True
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        notes = tuple(rest)
    choices: tuple[str, ...] = ()
    if get_origin(hint) is Literal:
        hint, choices = str, get_args(hint)
    schema_type = _SCHEMA_TYPES.get(hint)
    if schema_type is None:
        raise TypeError(f"parameter {parameter.name}: {hint!r} has no type in a schema")
    if "symbolic" in notes:
        schema_type = "SymInt"
    is_updated = "updated in place" in notes
    return Parameter(parameter.name, schema_type, is_optional, is_updated, parameter.default, choices)
