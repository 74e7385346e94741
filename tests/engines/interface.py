"""Comparison of the signatures of stubs with an engine's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

STUBS = ("support.vllm_stub", "support.sglang_stub")
LAYERS = ("LinearBase", "ParallelLMHead")
"""Classes that the integration uses only in ``isinstance``."""
BUILT = ("RoutedExperts", "FusedMoE", "FusedMoEConfig")
"""Classes that tests build with fewer arguments than the engine does."""
CONFIGURED = ("__init__", "from_config")
"""Methods of configurations that the stubs simplify; the integration passes the checkpoint's settings on."""


def signatures(stubs: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each function of the stubs, the function, and the engine's function."""
    for module, names in stubs.MODULES.items():
        real = importlib.import_module(module)
        for name, stub in names.items():
            theirs = getattr(real, name)
            if inspect.isclass(stub):
                yield from _methods(f"{module}.{name}", stub, theirs)
            elif callable(stub):
                # theirs may be an op of vLLM's IR: compare with its native implementation
                native = theirs.impls["native"].impl_fn if hasattr(theirs, "impls") else theirs
                yield f"{module}.{name}", stub, native


def _methods(where: str, stub: type, theirs: type) -> Iterator[tuple[str, Any, Any]]:
    if stub.__name__ in LAYERS:
        return
    simplified = CONFIGURED if stub.__name__.endswith("Config") else ()
    if stub.__name__ in BUILT:
        simplified = (*CONFIGURED, "__post_init__")
    for name in dict.fromkeys(name for base in stub.__mro__ for name in vars(base)):
        function = inspect.getattr_static(stub, name)
        function = function.fget if isinstance(function, property) else function
        is_own = getattr(getattr(function, "__func__", function), "__module__", None) in STUBS
        if is_own and name not in simplified and not (name.startswith("__") and name != "__init__"):
            real = inspect.getattr_static(theirs, name)
            yield f"{where}.{name}", function, real.fget if isinstance(real, property) else real


def parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or method, without ``self`` or ``cls``."""
    own = list(inspect.signature(getattr(function, "__func__", function)).parameters.values())
    return own[1:] if own and own[0].name in ("self", "cls") else own


def check_signature(stub: Any, theirs: Any) -> None:
    """Compare the parameters of a stub with the engine's function."""
    ours, real = parameters(stub), parameters(theirs)
    assert [(each.name, each.kind) for each in ours] == [(each.name, each.kind) for each in real]
    assert [each.default is each.empty for each in ours] == [each.default is each.empty for each in real]
