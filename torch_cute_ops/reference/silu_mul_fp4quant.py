"""Reference of ``silu_mul_fp4quant``, and the product that the silu_mul references share."""

import torch

from torch_cute_ops.formats import resolve_fp4_format
from torch_cute_ops.reference.fp4_quantize import quantize_rows


def silu_mul_rows(input: torch.Tensor) -> torch.Tensor:
    """``a / (1 + exp(-a)) · b`` of the halves ``a`` and ``b`` of each row (..., 2I), in fp32 and not rounded further.

    SwiGLU without its matrix products: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6.
    """
    # Contiguous, so that a row meets the same vector instructions whatever lies beside it.
    gate, up = input.float().contiguous().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


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
