"""Kernels' classes need the DSL, and packages of kernels are imported without it."""

import importlib
from collections.abc import Callable
from typing import Any


def on_demand(package: str, kernel: str) -> Callable[[str], Any]:
    """A package's ``__getattr__``: the class of this name in its module ``kernel``, only when it is asked for."""

    def get(name: str) -> Any:
        if name != kernel:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.kernel"), kernel)

    return get
