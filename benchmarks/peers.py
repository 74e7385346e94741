"""What we compare with. Each helper returns something callable, or a `str`: the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .case import Case

_compiled: tuple[Hashable, Any] | None = None


def quack_rmsnorm() -> Callable[..., tuple[torch.Tensor, ...]] | str:
    """QuACK's plain RMSNorm, forward only: `f(x, weight, eps, residual)` returns the normalised rows in a fresh tensor;
    with a residual (or None) those of x + residual, and the sum, in another.

    It normalises and does not quantise: it shows how fast the read and the row reduction can be. QuACK patches CuTe DSL
    classes on import, so our own kernels are compiled before this is called (`runner.warm_up`).
    """
    try:
        from quack.rmsnorm import rmsnorm_fwd
    except Exception as error:  # a peer that cannot be imported, for whatever reason, is only absent
        return f"QuACK cannot be imported ({type(error).__name__}: {error})"
    return lambda x, weight, eps, residual: rmsnorm_fwd(x, weight, residual=residual, eps=eps)[:2]


def inductor(function: Callable[..., Any], case: Case, inputs: list[torch.Tensor]) -> Callable[..., Any] | str:
    """`function` compiled by Inductor as `case.inductor` says; `inputs` are the tensors whose rows (dimension 0) become
    symbolic in the dynamic mode. One compile serves consecutive cases that share mode, row length and choices."""
    if not case.inductor:
        return "not compiled at this size"
    global _compiled
    dynamic = case.inductor == "dynamic"
    fixed = tuple((name, size) for name, size in case.sizes.items() if not (dynamic and name == "M"))
    key = (function, case.inductor, fixed, tuple(case.choices.items()))
    if _compiled is None or _compiled[0] != key:
        # So that no entry for another shape fits too, and no row length is dynamic because it changed.
        torch._dynamo.reset()
        _compiled = (key, torch.compile(function, fullgraph=True, dynamic=None if dynamic else False))
    if dynamic:
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
    return _compiled[1]
