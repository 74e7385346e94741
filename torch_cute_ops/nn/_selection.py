"""Choose the layers and experts of a model that become quantised modules. Give a reason for every other module."""

import dis
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import Activations, QuantLinear
from torch_cute_ops.nn.experts import SwiGLU, reason_unsupported
from torch_cute_ops.nn.float_experts import FloatExperts, experts_or_reason

FilterFn = Callable[[nn.Module, str], bool]

DEFAULT_IGNORE: Final = ("lm_head",)
_MATRIX: Final = 64
"""The warning about unchanged modules names a module only if it has a parameter of at least this height and width."""
_READ_WEIGHTS: Final = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules of torch that pass the weights of their linear layers to a fused function, so these layers cannot be
replaced."""
_LOADS: Final = ("LOAD_ATTR", "LOAD_METHOD")
"""Bytecode instructions of Python that read an attribute."""
_ROUTER_CLASS: Final = re.compile(r"router|top_?k_?gat", re.IGNORECASE)
_ROUTER_NAME: Final = re.compile(r"router|^shared_experts?_gate$", re.IGNORECASE)
_GATE_NAME: Final = re.compile(
    r"^(gate|wg|w_gate|gating|gate_network|switch|classifier|scores?|scorer|dispatch|dispatcher|selector)$",
    re.IGNORECASE,
)
_EXPERTS: Final = re.compile(r"experts?", re.IGNORECASE)
_COUNTS: Final = ("experts", "num_experts", "num_local_experts", "n_routed_experts")


class Left(NamedTuple):
    """Reason that a module stays unchanged.

    Attributes:
        reason: text of the reason.
        is_expected: True if no warning is needed, as for embeddings and for modules that the caller ignores.
    """

    reason: str
    is_expected: bool = False


class Selection(NamedTuple):
    """Result of ``select``: the modules to replace, by name, and the reasons why other modules stay.

    Attributes:
        linears: linear layers to replace.
        experts: experts to replace, with the gate that was verified.
        left: reason for each other module with a parameter of two or more dimensions.
        unmatched: text about each pattern of ``ignore`` that matches nothing.
    """

    linears: dict[str, nn.Linear]
    experts: dict[str, tuple[FloatExperts, SwiGLU]]
    left: dict[str, Left]
    unmatched: list[str]


def select(
    model: nn.Module,
    cls: type[QuantLinear],
    activations: Activations,
    ignore: str | Iterable[str],
    filter_fn: FilterFn | None,
) -> Selection:
    """Choose the modules that ``quantize_`` or ``random_`` replaces.

    Args:
        model: model on any device.
        cls: class of the linear layers.
        activations, ignore, filter_fn: as in ``quantize_``.
    """
    patterns, owners = _names.as_patterns(ignore), _names.owners_of_parameters(model)
    found = Selection({}, {}, {}, [])
    names = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    candidates: list[str] = []
    for module, own in names.items():
        experts, name = experts_or_reason(module), own[0]
        if not (isinstance(module, nn.Linear) or experts is not None or any(_matrices(module))):
            continue
        candidates += own
        given = None
        if any(_names.matches(each, patterns) for each in own):
            left: Left | None = Left("it is in ignore", is_expected=True)
        elif experts is None and not isinstance(module, nn.Linear):
            left = _left_of_other(model, name, module)
        elif is_router(model, name):
            left = Left("it is a router", is_expected=True)
        elif any(component.startswith("lora_") for component in name.split(".")):
            left = Left("it is a LoRA adapter", is_expected=True)
        elif filter_fn is not None and not filter_fn(module, name):
            left = Left("filter_fn returned False", is_expected=True)
        elif name.rpartition(".")[2] == "_orig_mod":
            left = Left("torch.compile wraps it, and would call the old module; quantise before torch.compile")
        elif shared := _left_of_shared(module, name, owners):
            left = shared
        elif experts is None:
            left = _left_of_linear(model, name, module, cls, activations)
        else:
            given, left = _verified(experts, cls.scheme)
        if left is not None:
            found.left[name] = left
        elif given is not None:
            found.experts[name] = given
        elif isinstance(module, nn.Linear):
            found.linears[name] = module
    found.unmatched.extend(_unmatched(patterns, candidates, model, found.linears))
    return found


def is_router(model: nn.Module, name: str) -> bool:
    """Return True if a module routes tokens to experts, or is a part of a router.

    A router is recognised by its class, by its name, or by the number of its outputs: a layer next to E experts with E
    outputs is a router. The experts may also be stacked parameters. A module called ``gate``, ``wg`` or ``classifier``
    next to experts is a router, unless it is a layer with another number of outputs, such as the gate of a shared
    expert. A layer with such a name and E outputs is also a router if a module next to it contains E experts.
    """
    parent, components = model, name.split(".") if name else []
    for component in components:
        module = parent.get_submodule(component)
        if _ROUTER_CLASS.search(type(module).__name__) or _ROUTER_NAME.search(component):
            return True
        siblings = [each for key, each in parent._modules.items() if key != component and _EXPERTS.search(key)]
        if _GATE_NAME.search(component) and siblings:
            counts = {_experts_in(each) for each in siblings} - {None}
            if not isinstance(module, nn.Linear) or not counts or module.out_features in counts:
                return True
        if _has_a_result_for_each_expert(parent, component, module):
            return True
        parent = module
    return False


def _has_a_result_for_each_expert(parent: nn.Module, name: str, module: nn.Module) -> bool:
    """Return True if the number of outputs of a layer, or of a module's last layer, equals the number of experts in a
    sibling module.

    Args:
        parent: module that contains ``module`` and its siblings.
        name: name of ``module`` in its parent. An expert, such as a shared expert, is not a router.
        module: linear layer, or module with linear layers.
    """
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    if not layers or _EXPERTS.search(name) or any(map(_has_experts, module.modules())):
        return False
    count = layers[-1].out_features
    siblings = {key: each for key, each in parent._modules.items() if each is not None and key != name}
    if any(_is_called_experts(key, each) and _experts_in(each) == count for key, each in siblings.items()):
        return True
    # A list of modules, or a stack of matrices, may be experts, whatever its name is. To be safe, count only a single
    # layer as the router.
    if module is not layers[0]:
        return False
    width = layers[0].in_features
    if any(_like_modules(each, width) == count for each in siblings.values()):
        return True
    nearby = [parent, *siblings.values()]
    if _GATE_NAME.search(name):  # a layer with a gate's name may also route to experts inside a sibling module
        inner = [item for sibling in siblings.values() for item in sibling.named_children()]
        if any(_is_called_experts(key, each) and _experts_in(each) == count for key, each in inner):
            return True
        nearby += [each for _, each in inner]
    return any(_has_stack(each, count, width) for each in nearby)


def _is_called_experts(name: str, module: nn.Module) -> bool:
    return bool(_EXPERTS.search(name)) or experts_or_reason(module) is not None


def _has_stack(module: nn.Module, count: int, width: int) -> bool:
    """Return True if the module itself owns matrices for ``count`` experts, with ``width`` rows or columns: a parameter
    with three dimensions, or a list of parameters."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    own = [each for each in module._parameters.values() if each is not None]
    if isinstance(module, nn.ParameterList) and len(own) == count > 1:
        return all(each.dim() == 2 and width in each.shape for each in own)
    return any(each.dim() == 3 and each.shape[0] == count and width in each.shape[1:] for each in own)


def _has_experts(module: nn.Module) -> bool:
    return any(_EXPERTS.search(key) for key in module._modules) or experts_or_reason(module) is not None


def _like_modules(module: nn.Module, width: int) -> int | None:
    """Return the length of a list of experts: at least two modules of one class, each with a layer that has ``width``
    input features. Return None for any other module."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
        return None
    every = list(module.children())
    is_one_class = len({type(each) for each in every}) == 1
    layers = (each for each in every[0].modules() if isinstance(each, nn.Linear))
    return len(module) if is_one_class and any(layer.in_features == width for layer in layers) else None


def _experts_in(module: Any) -> int | None:
    """Return the number of experts in a module, or None if it is unknown."""
    experts = experts_or_reason(module)
    if isinstance(experts, FloatExperts):
        return experts.experts
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module)
    return next((each for key in _COUNTS if isinstance(each := getattr(module, key, None), int)), None)


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) for each floating-point parameter with two or more dimensions that the module itself
    owns. Submodules are not included."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() >= 2 and parameter.is_floating_point():
            yield name, parameter


def _left_of_other(model: nn.Module, name: str, module: nn.Module) -> Left:
    """Return the reason why a module that is neither a linear layer nor experts stays unchanged."""
    kind = type(module).__name__
    if isinstance(module, nn.Embedding) or "Embedding" in kind:
        return Left("it is an embedding", is_expected=True)
    if is_router(model, name):
        return Left("it is a router", is_expected=True)
    is_wide = any(min(parameter.shape[-2:]) >= _MATRIX and "embed" not in key for key, parameter in _matrices(module))
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    reason = f"{kind} is neither nn.Linear nor experts with gate_up_proj and down_proj"
    return Left(reason, is_expected=not is_wide or is_convolution)


def _left_of_shared(module: nn.Module, name: str, owners: dict[object, dict[nn.Module, str]]) -> Left | None:
    for parameter in module._parameters.values():
        others = {} if parameter is None else owners[_names.identity(parameter)]
        if len(others) > 1:
            other, of_other = next((key, value) for key, value in others.items() if key is not module)
            return Left(f"it shares a parameter with {of_other}", isinstance(other, nn.Embedding))
    return None


def _left_of_linear(
    model: nn.Module, name: str, module: nn.Module, cls: type[QuantLinear], activations: Activations
) -> Left | None:
    reason = _names.reason_unlike_linear(module)
    path, _, own = name.rpartition(".")
    parent: Any = model.get_submodule(path)
    kind: Any = type(parent)
    if reason is None and (issubclass(kind, _READ_WEIGHTS) or own in _read_by(kind)):
        reason = f"{kind.__name__} reads its weight, which will be codes"
    if reason is None and isinstance(module, nn.Linear):
        reason = cls.reason_unsupported(module.out_features, module.in_features, activations)
    return None if reason is None else Left(reason)


@functools.cache
def _read_by(cls: Any) -> frozenset[str]:
    """Return the names of layers whose weight the methods of a class use in a computation. A method uses a weight if it
    passes the weight to a function, or converts other tensors to the weight's dtype.

    T5 converts the input of ``wo`` to the dtype of its weight, and WavLM passes the weights of its projections to
    ``multi_head_attention_forward``. Methods that read only a weight's device or shape, or initialise it, do not count.
    """
    found = set()
    methods = [value for base in cls.__mro__ if issubclass(base, nn.Module) for value in vars(base).values()]
    for method in methods:
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if code is None or "weight" not in code.co_names:
            continue
        is_passed = "multi_head_attention_forward" in code.co_names
        loads = [each.argval if each.opname in _LOADS else None for each in dis.get_instructions(code)]
        for layer, weight, attribute in zip(loads, loads[1:], loads[2:], strict=False):
            if layer is not None and weight == "weight" and (is_passed or attribute == "dtype"):
                found.add(layer)
    return frozenset(found)


def _verified(
    experts: FloatExperts | str | None, scheme: str
) -> tuple[tuple[FloatExperts, SwiGLU] | None, Left | None]:
    if not isinstance(experts, FloatExperts):
        return None, Left(str(experts))
    reason = reason_unsupported(scheme, experts.experts, experts.hidden, experts.width)
    for name, parameter in experts.module._parameters.items():
        reason = reason or (None if parameter is None else _names.reason_not_floats(name, parameter))
    if reason is not None:
        return None, Left(reason)
    swiglu = experts.verified()
    return (None, Left(swiglu)) if isinstance(swiglu, str) else ((experts, swiglu), None)


def _unmatched(
    patterns: tuple[str, ...], candidates: list[str], model: nn.Module, linears: dict[str, nn.Linear]
) -> Iterator[str]:
    containers = [name for name, _ in model.named_modules()]
    heads = [name for name in linears if _names.matches(name, DEFAULT_IGNORE)]
    for pattern in patterns:
        if pattern in DEFAULT_IGNORE or any(_names.matches(name, (pattern,)) for name in candidates):
            continue
        text = f"ignore contains {pattern!r}, which matches no layer"
        if any(_names.matches(name, (pattern,)) for name in containers) and not pattern.startswith("re:"):
            prefix = "" if pattern in containers else "*."
            text += f"; for the layers inside that module, write {f'{prefix}{pattern}.*'!r}"
        if heads and not any(_names.matches(name, patterns) for name in heads):
            text += f"; because ignore was given, its default {DEFAULT_IGNORE} does not apply, and {heads[0]} changes"
        yield text
