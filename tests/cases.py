"""Registry × samples as test parameters, and the ways to call an op."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from expected import Tensors

from torch_cute_ops.ops._spec import OpSpec, as_tuple
from torch_cute_ops.registry import OPS
from torch_cute_ops.testing import ErrorInput, Sample


def sample_cases(*names: str) -> list[Any]:
    """Parameters (op, name of a sample): of all samples, or of those with these names."""
    return [
        pytest.param(op, sample.name, id=f"{op.name}-{sample.name}")
        for op in OPS.values()
        for sample in op.sample_inputs("meta")
        if not names or sample.name in names
    ]


def error_cases(device: str) -> list[Any]:
    """Parameters (op, name of an error input)."""
    return [
        pytest.param(op, error.name, id=f"{op.name}-{error.name}")
        for op in OPS.values()
        for error in op.error_inputs(device)
    ]


def op_cases() -> list[Any]:
    return [pytest.param(op, id=op.name) for op in OPS.values()]


def get_sample(op: OpSpec, name: str, device: str) -> Sample:
    return _named(op.sample_inputs(device), name)


def get_error(op: OpSpec, name: str, device: str) -> ErrorInput:
    return _named(op.error_inputs(device), name)


def _named(inputs: Iterable[Any], name: str) -> Any:
    return next(entry for entry in inputs if entry.name == name)


def expected_of(op: OpSpec) -> ModuleType:
    """The module ``expected/<op>.py``."""
    return importlib.import_module(f"expected.{op.name}")


def overload(op: OpSpec, name: str = "default") -> Any:
    """``torch.ops.cute.<op>.<name>``."""
    return getattr(getattr(torch.ops.cute, op.name), name)


def run(op: OpSpec, sample: Sample) -> Tensors:
    """The op's outputs, always as a tuple."""
    return as_tuple(overload(op)(*sample.args, **sample.kwargs))


def run_out(op: OpSpec, sample: Sample | ErrorInput, outputs: Tensors) -> None:
    """Call the op's ``.out`` overload."""
    overload(op, "out")(*sample.args, **sample.kwargs, **dict(zip(op.outputs, outputs, strict=True)))


def run_function(op: OpSpec, sample: Sample | ErrorInput, outputs: Tensors | None = None) -> Any:
    """Call the typed Python function, with ``out=`` if there are outputs."""
    kwargs = dict(sample.kwargs)
    if outputs is not None:
        kwargs["out"] = outputs if len(op.outputs) > 1 else outputs[0]
    return op.function(*sample.args, **kwargs)


def arguments(op: OpSpec, sample: Sample | ErrorInput) -> dict[str, Any]:
    """The sample's arguments by name, defaults filled in."""
    bound = inspect.signature(op.function).bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    bound.arguments.pop("out")
    return dict(bound.arguments)


# Tensors


def poisoned(like: Iterable[torch.Tensor]) -> Tensors:
    """Tensors of these shapes whose every byte is 0xAA, or that are NaN where a float can be."""
    return tuple(_poison(t) for t in like)


def _poison(like: torch.Tensor) -> torch.Tensor:
    if like.dtype.itemsize > 1:
        return torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device)
    return torch.full(like.shape, 0xAA, dtype=torch.uint8, device=like.device).view(like.dtype)


def tensors_in(sample: Sample | ErrorInput) -> list[torch.Tensor]:
    values = [*sample.args, *sample.kwargs.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]
