"""Reference of ``silu_mul_fp4quant``, and the gate that all SwiGLU references use."""

from typing import Any

import torch

from torch_cute_ops.reference.fp4_quantize import fp4_quantize


def silu_mul_rows(
    input: torch.Tensor,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """Apply SwiGLU's gate, the first half of each row (..., 2I), to the second half. Return (..., I) fp32, not rounded.

    The formula is ``g · sigmoid(alpha · g) · (u + beta)`` with ``g = min(gate, limit)`` and
    ``u = clip(up, -limit, limit)``; by default ``silu(gate) · up``. NaN passes the clamps. If ``exp(-alpha · g)``
    overflows fp32, the sigmoid is 0.

    Sources: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6; the parameters are from gpt-oss.
    """
    gate, up = input.float().chunk(2, -1)
    alpha, beta = (torch.tensor(value, dtype=torch.float32) for value in (swiglu_alpha, swiglu_beta))
    if swiglu_limit is not None:
        limit = torch.tensor(swiglu_limit, dtype=torch.float32)
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
    if (swiglu_alpha, swiglu_beta, swiglu_limit) != (1.0, 0.0, None):
        # Skip this addition for the default gate: -0 + 0 would be +0.
        up = up + beta
    # Compute the exponential in float64, then round: the last bit of torch's fp32 exp depends on the element's position
    # in the tensor.
    return gate / (1 + torch.exp(-(gate * alpha).double()).float()) * up


def silu_mul_fp4quant(
    input: torch.Tensor, swiglu_alpha: float, swiglu_beta: float, swiglu_limit: float | None, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SwiGLU of ``input`` (..., 2I), then apply ``fp4_quantize``; see the op's docstring."""
    return fp4_quantize(silu_mul_rows(input, swiglu_alpha, swiglu_beta, swiglu_limit), **named)
