"""Reference of ``silu_mul_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.reference.fp8_quantize import fp8_quantize
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul_fp8quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    granularity: str = "token",
    scale_layout: str = "row",
    *gate: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu_mul_rows`` of ``input`` (..., 2I), with the other arguments, in FP8; see the op's docstring."""
    return fp8_quantize(silu_mul_rows(input, *gate, **named), scale, granularity, scale_layout)
