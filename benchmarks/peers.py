"""Peers: implementations of other libraries that our ops are compared with. Each function returns a callable, or a
`str` with the reason why the peer is missing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .case import Case

_compiled: tuple[Hashable, Any] | None = None


def quack_rmsnorm() -> Callable[..., tuple[torch.Tensor, ...]] | str:
    """Return a function `f(x, weight, eps, residual)` that calls QuACK's RMSNorm (forward only).

    `f` returns the normalised rows in a new tensor. With a residual, `f` returns the normalised rows of x + residual,
    and the sum x + residual. QuACK does not quantise, so its time shows the cost of reading and of the row reduction
    alone. QuACK patches classes of the CuTe DSL when it is imported, so our kernels must be compiled earlier
    (`runner.warm_up`).
    """
    try:
        from quack.rmsnorm import rmsnorm_fwd
    except Exception as error:  # a peer that cannot be imported, for any reason, is reported as missing
        return f"QuACK cannot be imported ({type(error).__name__}: {error})"
    return lambda x, weight, eps, residual: rmsnorm_fwd(x, weight, residual=residual, eps=eps)[:2]


def inductor(function: Callable[..., Any], case: Case, inputs: list[torch.Tensor]) -> Callable[..., Any] | str:
    """Return `function` compiled by Inductor according to `case.inductor`.

    In the dynamic mode, dimension 0 of `inputs` is symbolic. If consecutive cases have the same mode, row length and
    choices, they use the same compiled function.
    """
    if not case.inductor:
        return "not compiled at this size"
    global _compiled
    dynamic = case.inductor == "dynamic"
    fixed = tuple((name, size) for name, size in case.sizes.items() if not (dynamic and name == "M"))
    key = (function, case.inductor, fixed, tuple(case.choices.items()))
    if _compiled is None or _compiled[0] != key:
        # Reset Dynamo. Otherwise Dynamo may reuse a function that was compiled for another shape, or make the row
        # length dynamic because it changed.
        torch._dynamo.reset()
        _compiled = (key, torch.compile(function, fullgraph=True, dynamic=None if dynamic else False))
    if dynamic:
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
    return _compiled[1]
