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


def vllm_qkv_append() -> Callable[..., torch.Tensor] | str:
    """Return a function that takes the arguments of `qkv_norm_rope_append`, with `cos_sin` in the dtype of `qkv`, and
    calls two kernels of vLLM.

    The first kernel normalises and rotates q and k in place, the second writes k and v to 16-bit or FP8 caches. The
    function returns q, a view of `qkv`.
    """
    try:
        from vllm._custom_ops import fused_qk_norm_rope, reshape_and_cache_flash
    except Exception as error:  # a peer that cannot be imported, for any reason, is reported as missing
        return f"vLLM cannot be imported ({type(error).__name__}: {error})"

    def append(
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        q_heads: int,
        kv_heads: int,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> torch.Tensor:
        heads = q_heads, kv_heads, kv_heads
        fused_qk_norm_rope(qkv, *heads, q_norm.shape[0], eps, q_norm, k_norm, cos_sin, True, positions)
        q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, 1)
        is_fp8 = key_cache.dtype == torch.float8_e4m3fn
        caches = [each.view(torch.uint8) if is_fp8 else each for each in (key_cache, value_cache)]
        reshape_and_cache_flash(k, v, *caches, slots, "fp8" if is_fp8 else "auto", k_scale, v_scale)
        return q

    return append


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
