"""Lazy imports of kernel classes, so that kernel packages can be imported without the DSL."""

import importlib
from collections.abc import Callable
from typing import Any


def on_demand(package: str, kernel: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` that imports the class named by ``kernel`` from the package's submodule
    ``kernel.py`` on first use."""

    def get(name: str) -> Any:
        if name != kernel:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.kernel"), kernel)

    return get
