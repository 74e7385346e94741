"""Reference of ``rmsnorm_fp8quant``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.fp8_quantize import fp8_quantize
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows


def rmsnorm_fp8quant(
    input: Tensor, weight: Tensor, eps: float, weight_plus_one: bool, **named: Any
) -> tuple[Tensor, Tensor]:
    """RMS-normalise ``input`` (..., H), then apply ``fp8_quantize``; see the op's docstring."""
    return fp8_quantize(rmsnorm_rows(input, weight, eps, weight_plus_one), **named)
