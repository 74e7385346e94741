"""Reference of ``silu_mul_fp4quant``, and the gate that all SwiGLU references use."""

import math
from typing import Any, Final

import torch

from torch_cute_ops.reference.fp4_quantize import fp4_quantize

_GELU_TANH: Final = (math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715)


def silu_mul_rows(
    input: torch.Tensor,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    gate: str = "silu",
) -> torch.Tensor:
    """Apply a gate, the first half of each row (..., 2I), to the second half. Return (..., I) fp32, not rounded.

    The formula is ``g · sigmoid(alpha · g) · (u + beta)`` with ``g = min(gate, limit)`` and
    ``u = clip(up, -limit, limit)``; by default ``silu(gate) · up``. NaN passes the clamps. If ``exp(-alpha · g)``
    overflows fp32, the sigmoid is 0. Gates with GELU are ``gate · sigmoid(gate · (c + d · gate²)) · up``, where
    ``c`` is 2 sqrt(2/π) and ``d`` is ``0.044715 c``, and ``gate · Φ(gate) · up``, where Φ is the normal distribution
    function. The gate with squared ReLU is ``max(gate, 0)² · up``.

    Sources: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6; the parameters are from gpt-oss. Hendrycks and
    Gimpel, "Gaussian Error Linear Units" (2016): GELU's tanh is computed as a sigmoid, because (1 + tanh(z)) / 2 =
    sigmoid(2 z). D. So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021): squared
    ReLU.
    """
    first, up = input.float().chunk(2, -1)
    if gate == "gelu":
        # Compute in float64, like the exponential below. Unlike 1 + erf(x), erfc(-x) loses no digits by cancellation.
        return first * (0.5 * torch.special.erfc(first.double() * -math.sqrt(0.5))).float() * up
    if gate == "relu2":
        return first.relu().square() * up
    if gate == "gelu_tanh":
        inner = first * (first * first * _GELU_TANH[1] + _GELU_TANH[0])
        return first / (1 + torch.exp(-inner.double()).float()) * up
    alpha, beta = (torch.tensor(value, dtype=torch.float32) for value in (swiglu_alpha, swiglu_beta))
    if swiglu_limit is not None:
        limit = torch.tensor(swiglu_limit, dtype=torch.float32)
        first, up = torch.minimum(first, limit), torch.maximum(torch.minimum(up, limit), -limit)
    if (swiglu_alpha, swiglu_beta, swiglu_limit) != (1.0, 0.0, None):
        # Skip this addition for the default gate: -0 + 0 would be +0.
        up = up + beta
    # Compute the exponential in float64, then round: the last bit of torch's fp32 exp depends on the element's position
    # in the tensor.
    return first / (1 + torch.exp(-(first * alpha).double()).float()) * up


def silu_mul_fp4quant(
    input: torch.Tensor, swiglu_alpha: float, swiglu_beta: float, swiglu_limit: float | None, gate: str, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SwiGLU of ``input`` (..., 2I), then apply ``fp4_quantize``; see the op's docstring."""
    return fp4_quantize(silu_mul_rows(input, swiglu_alpha, swiglu_beta, swiglu_limit, gate), **named)
