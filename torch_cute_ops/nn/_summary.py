"""Summary of the modules that a function of this package replaced in a model."""

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import QuantLinear
from torch_cute_ops.nn.experts import QuantExperts
from torch_cute_ops.nn.float_experts import float_experts

logger = logging.getLogger(__name__)

_SUMMARIES: weakref.WeakKeyDictionary[nn.Module, "Summary"] = weakref.WeakKeyDictionary()


class Summary(NamedTuple):
    """Modules of a model that were replaced, and modules that were not. ``print`` shows both, grouped.

    Attributes:
        function: name of the function that replaced modules, such as ``"quantize_"``.
        replaced: class of each new module, keyed by the old module's name.
        left: reason why a module was not replaced, keyed by the module's name. Only modules that own a parameter of two
            or more dimensions are listed.
        bytes_before: bytes of the model's parameters and buffers before the change; tied tensors count once.
        bytes_after: bytes of the model's parameters and buffers after the change.
    """

    function: str
    replaced: Mapping[str, str]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        changed = (f"  {kind}: {_names.listed(names)}" for kind, names in grouped(self.replaced).items())
        stayed = (f"  unchanged: {_names.listed(names)}: {reason}" for reason, names in grouped(self.left).items())
        return "\n".join((self.line(), *changed, *stayed))

    def line(self) -> str:
        """Return the numbers of modules and the sizes in one line."""
        counts = ", ".join(f"{len(found)} by {kind}" for kind, found in grouped(self.replaced).items())
        return (
            f"{self.function}: {len(self.replaced)} replaced{f' ({counts})' if counts else ''}, "
            f"{len(self.left)} unchanged; {self.bytes_before:,} bytes before, {self.bytes_after:,} after"
        )


def summary(model: nn.Module) -> Summary:
    """Return which modules of this model were replaced by the last function of this package that changed the model.

    The functions are :func:`quantize_`, :func:`random_`, :func:`torch_cute_ops.checkpoint.load_`, and the functions of
    ``integrations.transformers``.

    Raises:
        ValueError: for a model that none of these functions changed.
    """
    found = _SUMMARIES.get(model)
    if found is None:
        raise ValueError(f"summary: no function of this package replaced modules of this {type(model).__name__}")
    return found


def record(model: nn.Module, found: Summary) -> None:
    """Store the summary for :func:`summary`, and log it in one line."""
    _SUMMARIES[model] = found
    logger.info("%s", found.line())


def record_loaded(function: str, model: nn.Module, before: Mapping[str, nn.Module], bytes_before: int) -> None:
    """Store and log the summary of a model that was loaded.

    Args:
        function: name of the function that loaded.
        model: model after the load.
        before: modules of the model before the load, by name.
        bytes_before: bytes of the model before the load.
    """
    after = dict(model.named_modules(remove_duplicate=False))
    replaced, left = {}, {}
    for name, module in before.items():
        now = after.get(name)
        if now is not module and isinstance(now, (QuantLinear, QuantExperts)):
            replaced[name] = type(now).__name__
        elif isinstance(now, nn.Linear) or float_experts(module) is not None:
            left[name] = "the checkpoint does not quantise it"
    record(model, Summary(function, replaced, left, bytes_before, bytes_of(model)))


def grouped(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Invert the mapping: return the names that map to each value, keyed by the value."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, group in names.items():
        groups[group].append(name)
    return dict(groups)


def bytes_of(model: nn.Module) -> int:
    """Return the total size of a model's parameters and buffers, bytes. Tensors that share memory count once."""
    tensors: Iterable[object] = (*model.parameters(), *model.buffers())
    sizes = {_names.identity(tensor): tensor.nbytes for tensor in tensors}  # type: ignore[attr-defined, arg-type]
    return sum(sizes.values())
