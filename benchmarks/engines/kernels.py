"""Kernels of a served model's quantised layers, found by inspecting the model in vLLM's workers.

vLLM does not always use the kernels that `linear_backend` names: vLLM 0.26 multiplies the weights of ModelOpt's
W4A16_NVFP4 by Marlin, whatever `linear_backend` is, and writes no message about it. So the log and the options do not
tell which kernels were timed. This module imports no vLLM, because the command compares results without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

LINEAR, EXPERTS = "linear", "experts"
KINDS = {"LinearMethodBase": LINEAR, "FusedMoEMethodBase": EXPERTS}
"""Kind of a layer, by the base class of its method in vLLM."""
Kernels = dict[str, dict[str, int]]
"""Number of quantised layers by class, by kind ("linear" or "experts")."""


def kernels_of(model: nn.Module) -> Kernels:
    """Count a model's quantised layers by the class that multiplies by their weights.

    vLLM's engine passes this function to its workers, which import it by name.
    """
    found: Kernels = {LINEAR: {}, EXPERTS: {}}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        bases = [base.__name__ for base in type(method).__mro__]
        kind = next((KINDS[base] for base in bases if base in KINDS), None)
        if kind is None or bases[0].startswith("Unquantized"):
            continue
        name = kernel_of(module, method) if kind == LINEAR else bases[0]
        found[kind][name] = found[kind].get(name, 0) + 1
    return found


def kernel_of(layer: nn.Module, method: Any) -> str:
    """Return the name of a linear layer's kernel class, or of its method or scheme if vLLM has no class for the kernel.

    Args:
        layer: linear layer.
        method: method of the layer. compressed-tensors' method leaves the layer to the layer's scheme.
    """
    owner = getattr(layer, "scheme", None) or method
    names = [type(each).__name__ for each in vars(owner).values()]
    return next((name for name in names if name.endswith("Kernel")), type(owner).__name__)


def added(ranks: Iterable[Mapping[str, Mapping[str, int]]]) -> Kernels:
    """Add the numbers of layers of all ranks."""
    total: Kernels = {LINEAR: {}, EXPERTS: {}}
    for rank in ranks:
        for kind, counts in rank.items():
            for name, count in counts.items():
                total[kind][name] = total[kind].get(name, 0) + count
    return total


def listed(counts: Mapping[str, int]) -> str:
    """Return classes and numbers of layers as text, or "none"."""
    return ", ".join(f"{name} in {count} layers" for name, count in counts.items()) or "none"
