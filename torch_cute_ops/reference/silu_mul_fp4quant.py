"""Reference of ``silu_mul_fp4quant``, and the product that the silu_mul references share."""

import torch

from torch_cute_ops.formats import resolve_fp4_format
from torch_cute_ops.reference.fp4_quantize import quantize_rows


def silu_mul_rows(input: torch.Tensor) -> torch.Tensor:
    """``a / (1 + exp(-a)) · b`` of the halves ``a`` and ``b`` of each row (..., 2I), in fp32 and not rounded further.

    SwiGLU without its matrix products: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6.
    """
    gate, up = input.float().chunk(2, -1)
    # The exponential in float64, rounded: torch's in fp32 depends in the last bit on where in a vector an element is.
    return gate / (1 + torch.exp(-gate.double()).float()) * up


def silu_mul_fp4quant(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu_mul_rows`` of ``input`` (..., 2I) as FP4 blocks; see the op's docstring."""
    fmt = resolve_fp4_format(block_size, scale_format)
    return quantize_rows(silu_mul_rows(input), fmt, global_scale, scale_layout)
