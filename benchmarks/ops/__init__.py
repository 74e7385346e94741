"""One file per op, named as the op, that binds `BENCHMARK`. Nothing else has to be edited to add one."""

from __future__ import annotations

import importlib
import pkgutil

from ..case import Benchmark


def names() -> list[str]:
    """The ops that have a benchmark, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> Benchmark:
    """The benchmark of one op."""
    benchmark = importlib.import_module(f"{__name__}.{name}").BENCHMARK
    if benchmark.op != name:
        raise ValueError(f"benchmarks/ops/{name}.py is named after one op and benchmarks another: {benchmark.op}")
    return benchmark
