"""Peers: other implementations to compare with. Each function returns a callable, or a `str` with the reason that the
peer is missing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .case import Case

_compiled: tuple[Hashable, Any] | None = None


def quack_rmsnorm() -> Callable[..., tuple[torch.Tensor, ...]] | str:
    """Return QuACK's RMSNorm, forward only: `f(x, weight, eps, residual)`.

    The function returns the normalised rows in a new tensor; with a residual, the normalised rows of x + residual and
    the sum. It does not quantise, so it shows the speed of reading and of the row reduction alone. QuACK patches CuTe
    DSL classes on import, so our kernels are compiled before this is called (`runner.warm_up`).
    """
    try:
        from quack.rmsnorm import rmsnorm_fwd
    except Exception as error:  # a peer that cannot be imported, for any reason, is reported as missing
        return f"QuACK cannot be imported ({type(error).__name__}: {error})"
    return lambda x, weight, eps, residual: rmsnorm_fwd(x, weight, residual=residual, eps=eps)[:2]


def inductor(function: Callable[..., Any], case: Case, inputs: list[torch.Tensor]) -> Callable[..., Any] | str:
    """Return `function` compiled by Inductor according to `case.inductor`.

    Dimension 0 of `inputs` is symbolic in the dynamic mode. One compile serves consecutive cases with equal mode, row
    length and choices.
    """
    if not case.inductor:
        return "not compiled at this size"
    global _compiled
    dynamic = case.inductor == "dynamic"
    fixed = tuple((name, size) for name, size in case.sizes.items() if not (dynamic and name == "M"))
    key = (function, case.inductor, fixed, tuple(case.choices.items()))
    if _compiled is None or _compiled[0] != key:
        # Without a reset, a compiled entry for another shape may match, and Dynamo makes the row length dynamic as soon
        # as it changes.
        torch._dynamo.reset()
        _compiled = (key, torch.compile(function, fullgraph=True, dynamic=None if dynamic else False))
    if dynamic:
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
    return _compiled[1]
