"""Names of modules and parameters in a model, and patterns that match them."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, nn

MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Linear layers with the same input, by the name of the layer that merges them."""


def as_patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return patterns as a tuple; a ``str`` is one pattern."""
    return (given,) if isinstance(given, str) else tuple(given)


def fits(name: str, pattern: str) -> bool:
    """Return True if a pattern equals the name or matches it, as a wildcard or, after ``re:``, as a regular
    expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def is_pattern(text: str) -> bool:
    """Return True if ``text`` is a wildcard or, after ``re:``, a regular expression instead of a name."""
    return text.startswith("re:") or any(each in text for each in "*?[")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern fits the name or equals its last component."""
    return any(fits(name, pattern) or pattern == name.rpartition(".")[2] for pattern in patterns)


def parents(name: str) -> list[str]:
    """Return the names of the modules that contain ``name``: ``a`` and ``a.b`` for ``a.b.c``."""
    components = name.split(".")
    return [".".join(components[:end]) for end in range(1, len(components))]


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Return each ``nn.Linear`` of the model by one of its names. Subclasses are excluded: their ``forward`` may
    differ."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` wherever it occurs in the model."""
    new.train(old.training)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and persistent buffers."""
    buffers = {key: each for key, each in module._buffers.items() if key not in module._non_persistent_buffers_set}
    return {key: each for key, each in {**module._parameters, **buffers}.items() if each is not None}


def identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that share memory from their start, such as tied weights."""
    return id(tensor) if tensor.is_meta or not tensor.numel() else (tensor.device, tensor.data_ptr())


def shared_parameters(model: nn.Module) -> set[object]:
    """Return the ``identity`` of each parameter that several modules share."""
    owners = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[identity(parameter)].add(id(module))
    return {key for key, modules in owners.items() if len(modules) > 1}
