"""Names of modules and parameters in a model, and patterns that match them."""

import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
SHOWN: Final = 8
"""Maximum number of names in a message."""
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Names of linear layers with the same input, keyed by the name of the layer that merges them."""


def as_patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return patterns as a tuple; a ``str`` is one pattern."""
    return (given,) if isinstance(given, str) else tuple(given)


def fits(name: str, pattern: str) -> bool:
    """Return True if ``pattern`` is the name, a wildcard that matches it, or ``re:`` and a regular expression that
    matches it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def is_pattern(text: str) -> bool:
    """Return True if ``text`` is a wildcard, or ``re:`` and a regular expression, and False if it is a plain name."""
    return text.startswith("re:") or any(each in text for each in "*?[")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern fits the name, or is the last component of the name."""
    return any(fits(name, pattern) or pattern == name.rpartition(".")[2] for pattern in patterns)


def parents(name: str) -> list[str]:
    """Return the names of the modules that contain ``name``: ``a`` and ``a.b`` for ``a.b.c``."""
    components = name.split(".")
    return [".".join(components[:end]) for end in range(1, len(components))]


_HOOKS: Final = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
    ("_state_dict_pre_hooks", "state-dict pre-hook"),
    ("_state_dict_hooks", "state-dict hook"),
    ("_load_state_dict_pre_hooks", "load_state_dict pre-hook"),
    ("_load_state_dict_post_hooks", "load_state_dict post-hook"),
)


def reason_bound(module: nn.Module) -> str | None:
    """Return the hook or changed ``forward`` that would be lost if this module was replaced, or None if nothing would
    be lost.

    Hooks are not moved to a new module, because they may read ``weight``, which would then contain codes.
    """
    if "forward" in vars(module):
        return "its forward was replaced"
    for attribute, name in _HOOKS:
        if getattr(module, attribute, None):
            return f"a {name} is registered on it"
    return None


def reason_holds_more(module: nn.Module) -> str | None:
    """Return the reason why a quantised layer could not take over something that was added to an ``nn.Linear``, or None
    if it can take over everything.

    :func:`replace` copies all other attributes.
    """
    for kind, held in (("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules)):
        more = [name for name in held if name not in ("weight", "bias") or kind != "parameter"]
        if more:
            return f"a quantised layer cannot hold its {kind} {more[0]}"
    own = [name for name in vars(module) if name not in _attributes_of_linear()]
    taken = [name for name in own if name in _attributes_of_quantised()]
    return f"a quantised layer has another attribute {taken[0]}" if taken else None


@functools.cache
def _attributes_of_linear() -> frozenset[str]:
    return frozenset(vars(nn.Linear(1, 1, device="meta")))


@functools.cache
def _attributes_of_quantised() -> frozenset[str]:
    from torch_cute_ops.nn.quantize import SCHEMES

    layers = [cls(128, 128, bias=True, has_input_scale=True, device="meta") for cls in SCHEMES.values()]
    return frozenset(name for layer in layers for name in dir(layer))


def reason_unlike_linear(module: nn.Module, types: tuple[type[Tensor], ...] = ()) -> str | None:
    """Return a reason if a module may compute a different function than ``nn.Linear``, or None if it computes the same.

    Args:
        module: module to examine.
        types: tensor classes to accept as weights, in addition to ``nn.Parameter`` of a floating-point dtype.
    """
    if type(module) is not nn.Linear:
        kind = type(module).__name__
        if parametrize.is_parametrized(module):
            return "it is parametrized"
        return f"{kind} is a subclass of nn.Linear" if isinstance(module, nn.Linear) else f"{kind} is not nn.Linear"
    reason = reason_bound(module) or reason_holds_more(module)
    if reason is not None:
        return reason
    for name in ("weight", "bias"):
        tensor = module._parameters.get(name)
        if tensor is None and (name == "weight" or getattr(module, name, None) is not None):
            return f"its {name} is not a parameter"
        reason = None if tensor is None or isinstance(tensor, types) else reason_not_floats(name, tensor)
        if reason is not None:
            return reason
    return None


def reason_not_floats(name: str, tensor: Tensor) -> str | None:
    """Return the reason why a parameter cannot be quantised (not a plain tensor, or a wrong dtype), or None if it
    can."""
    if type(tensor) is not nn.Parameter:
        return f"its {name} is a {type(tensor).__name__}"
    return None if tensor.dtype in _DTYPES else f"its {name} is {tensor.dtype}"


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` wherever it occurs in the model.

    Attributes that were set on a linear layer are copied to its replacement, because other code may read them.
    """
    new.train(old.training)
    if type(old) in (nn.Linear, type(new)):
        for name, value in vars(old).items():
            vars(new).setdefault(name, value)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module by name. Submodules are not included."""
    buffers = {key: each for key, each in module._buffers.items() if key not in module._non_persistent_buffers_set}
    return {key: each for key, each in {**module._parameters, **buffers}.items() if each is not None}


def identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that start at the same address, such as tied weights."""
    return id(tensor) if tensor.is_meta or not tensor.numel() else (tensor.device, tensor.data_ptr())


def owners_of_parameters(model: nn.Module) -> dict[object, dict[nn.Module, str]]:
    """Map the ``identity`` of each parameter to the modules that contain the parameter, and to their names."""
    owners: defaultdict[object, dict[nn.Module, str]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[identity(parameter)][module] = name
    return owners


def listed(names: Sequence[str]) -> str:
    """Return a text for messages that lists at most ``SHOWN`` of the names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
