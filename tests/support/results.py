"""Results of samples, computed once per process, because most checks compare with them."""

from __future__ import annotations

from functools import cache

from expected import Tensors

from support.cases import get_sample, run
from torch_cute_ops.ops._define import OpSpec
from torch_cute_ops.registry import OPS


def results_of(op: OpSpec, name: str, device: str) -> Tensors:
    """Return the results of ``run`` with a sample. A check must not write to them."""
    results, versions = _results(op.name, name, device)
    assert versions == _versions(results), f"a check has changed results of {op.name} {name}"
    return results


@cache
def _results(op: str, name: str, device: str) -> tuple[Tensors, tuple[int, ...]]:
    results = run(OPS[op], get_sample(OPS[op], name, device))
    return results, _versions(results)


def _versions(results: Tensors) -> tuple[int, ...]:
    return tuple(result._version for result in results)
