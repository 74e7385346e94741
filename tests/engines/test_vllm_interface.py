"""Stubs of vLLM in ``make test`` have the signatures of the installed vLLM."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from support import vllm_stub

LAYERS = ("LinearBase", "ParallelLMHead")
"""Classes that the integration only tests for."""
BUILT = ("RoutedExperts", "FusedMoEConfig")
"""Classes that tests build with fewer arguments than vLLM does."""
CONFIGURED = ("__init__", "from_config")
"""Methods of configurations that the stubs simplify; the integration passes the checkpoint's settings on."""


def signatures() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each function of the stubs, the function, and vLLM's function."""
    for module, names in vllm_stub.MODULES.items():
        real = importlib.import_module(module)
        for name, stub in names.items():
            theirs = getattr(real, name)
            if inspect.isclass(stub):
                yield from _methods(f"{module}.{name}", stub, theirs)
            elif callable(stub):
                native = theirs.impls["native"].impl_fn if hasattr(theirs, "impls") else theirs  # of an op of the IR
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
        is_own = getattr(getattr(function, "__func__", function), "__module__", None) == vllm_stub.__name__
        if is_own and name not in simplified and not (name.startswith("__") and name != "__init__"):
            real = inspect.getattr_static(theirs, name)
            yield f"{where}.{name}", function, real.fget if isinstance(real, property) else real


def parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or method, without ``self`` or ``cls``."""
    own = list(inspect.signature(getattr(function, "__func__", function)).parameters.values())
    return own[1:] if own and own[0].name in ("self", "cls") else own


@pytest.mark.parametrize(("name", "stub", "theirs"), [pytest.param(*each, id=each[0]) for each in signatures()])
def test_signature(name: str, stub: Any, theirs: Any) -> None:
    ours, real = parameters(stub), parameters(theirs)
    assert [(each.name, each.kind) for each in ours] == [(each.name, each.kind) for each in real]
    assert [each.default is each.empty for each in ours] == [each.default is each.empty for each in real]


def test_settings_of_experts() -> None:
    """vLLM's settings of experts have the attributes that the integration reads."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

    known = {*dir(FusedMoEConfig), *(field.name for field in dataclasses.fields(FusedMoEConfig))}
    assert {field.name for field in dataclasses.fields(vllm_stub.FusedMoEConfig)} <= known
    assert "enable_eplb" in {field.name for field in dataclasses.fields(FusedMoEParallelConfig)}
