"""Reference of ``silu_mul_fp8quant``."""

import torch

from torch_cute_ops.formats import resolve_fp8_format
from torch_cute_ops.reference.rmsnorm_fp8quant import quantize_fp8_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul_fp8quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    granularity: str = "token",
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu_mul_rows`` of ``input`` (..., 2I) in FP8; see the op's docstring."""
    fmt, layout = resolve_fp8_format(granularity, scale_layout)
    return quantize_fp8_rows(silu_mul_rows(input), fmt, scale, layout)
