"""Reference of ``silu_mul_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.reference.fp8_quantize import fp8_quantize
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul_fp8quant(
    input: torch.Tensor, swiglu_alpha: float, swiglu_beta: float, swiglu_limit: float | None, gate: str, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SwiGLU of ``input`` (..., 2I), then apply ``fp8_quantize``; see the op's docstring."""
    return fp8_quantize(silu_mul_rows(input, swiglu_alpha, swiglu_beta, swiglu_limit, gate), **named)
