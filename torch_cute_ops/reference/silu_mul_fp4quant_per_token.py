"""Reference of ``silu_mul_fp4quant_per_token``."""

from torch import Tensor

from torch_cute_ops.reference.fp4_quantize_per_token import quantize_rows_per_token
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul_fp4quant_per_token(
    input: Tensor, scale_layout: str, swiglu_alpha: float, swiglu_beta: float, swiglu_limit: float | None, gate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute SwiGLU of ``input`` (..., 2I), then apply ``fp4_quantize_per_token``; see the op's docstring."""
    return quantize_rows_per_token(silu_mul_rows(input, swiglu_alpha, swiglu_beta, swiglu_limit, gate), scale_layout)
