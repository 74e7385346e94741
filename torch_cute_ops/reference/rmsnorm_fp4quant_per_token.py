"""Reference of ``rmsnorm_fp4quant_per_token``."""

from torch import Tensor

from torch_cute_ops.reference.fp4_quantize_per_token import quantize_rows_per_token
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows


def rmsnorm_fp4quant_per_token(
    input: Tensor, weight: Tensor, eps: float, scale_layout: str, weight_plus_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS-normalise ``input`` (..., H), then apply ``fp4_quantize_per_token``; see the op's docstring."""
    return quantize_rows_per_token(rmsnorm_rows(input, weight, eps, weight_plus_one), scale_layout)
