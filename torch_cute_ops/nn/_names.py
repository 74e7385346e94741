"""Where modules and parameters stand in a model, and patterns of their names."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, nn

PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Linear layers with the same input, by the name of the one that merges them."""


def as_patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a ``str`` is one pattern, and not one for each letter."""
    return (given,) if isinstance(given, str) else tuple(given)


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern is the name, or fits as a wildcard, or behind ``re:`` as a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits, or is the last part of the name."""
    return any(fits(name, pattern) or pattern == name.rpartition(".")[2] for pattern in patterns)


def parents(name: str) -> list[str]:
    """The names of the modules that ``name`` is in: ``a`` and ``a.b`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Each ``nn.Linear`` of the model by one of its names; subclasses, which may compute anything, are left out."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever the model has ``old``."""
    new.train(old.training)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself that belong into a state dict."""
    buffers = {key: each for key, each in module._buffers.items() if key not in module._non_persistent_buffers_set}
    return {key: each for key, each in {**module._parameters, **buffers}.items() if each is not None}


def identity(tensor: Tensor) -> object:
    """The same for tensors that share memory from their start, such as tied weights."""
    return id(tensor) if tensor.is_meta or not tensor.numel() else (tensor.device, tensor.data_ptr())


def shared_parameters(model: nn.Module) -> set[object]:
    """The ``identity`` of each parameter that several modules have."""
    owners = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[identity(parameter)].add(id(module))
    return {key for key, modules in owners.items() if len(modules) > 1}
