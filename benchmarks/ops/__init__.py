"""One file per op, named after the op, that defines `BENCHMARK`. To add a benchmark, add a file here."""

from __future__ import annotations

import importlib
import pkgutil

from ..case import Benchmark


def names() -> list[str]:
    """Return the names of the ops with a benchmark, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> Benchmark:
    """Return the benchmark of an op."""
    benchmark = importlib.import_module(f"{__name__}.{name}").BENCHMARK
    if benchmark.op != name:
        raise ValueError(f"benchmarks/ops/{name}.py benchmarks the op {benchmark.op}, not {name}")
    return benchmark
