"""Reference of ``silu_mul_fp4quant``, and the gate that every reference with SwiGLU shares."""

from typing import Any

import torch

from torch_cute_ops.reference.fp4_quantize import fp4_quantize


def silu_mul_rows(
    input: torch.Tensor,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """The second half of each row (..., 2I) gated by its first, in fp32 and not rounded further: (..., I).

    ``g · sigmoid(alpha · g) · (u + beta)`` with ``g = min(gate, limit)`` and ``u = clip(up, -limit, limit)``, which is
    ``silu(gate) · up`` by default. NaN passes the clamps; where ``exp(-alpha · g)`` overflows fp32 the sigmoid is 0.

    SwiGLU without its GEMMs: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6; with parameters as
    gpt-oss has it.
    """
    gate, up = input.float().chunk(2, -1)
    alpha, beta = (torch.tensor(value, dtype=torch.float32) for value in (swiglu_alpha, swiglu_beta))
    if swiglu_limit is not None:
        limit = torch.tensor(swiglu_limit, dtype=torch.float32)
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
    if (swiglu_alpha, swiglu_beta, swiglu_limit) != (1.0, 0.0, None):
        # Not by default: -0 + 0 is +0.
        up = up + beta
    # The exponential in float64, rounded: torch's in fp32 depends in the last bit on where in a vector an element is.
    return gate / (1 + torch.exp(-(gate * alpha).double()).float()) * up


def silu_mul_fp4quant(
    input: torch.Tensor, swiglu_alpha: float, swiglu_beta: float, swiglu_limit: float | None, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fp4_quantize`` of the gated ``input`` (..., 2I), with the other arguments; see the op's docstring."""
    return fp4_quantize(silu_mul_rows(input, swiglu_alpha, swiglu_beta, swiglu_limit), **named)
