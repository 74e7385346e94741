"""Reference of ``silu_mul_fp4quant_mm_fp4``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.fp4quant_mm_fp4 import quantized_gemm
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul_fp4quant_mm_fp4(a: Tensor, gate: str, **named: Any) -> Tensor:
    """Apply ``silu_mul_fp4quant`` to ``a`` (M, 2K), then ``mm_fp4``; see the op's docstring."""
    return quantized_gemm(silu_mul_rows(a, gate=gate), out_dtype=named.pop("out_dtype") or a.dtype, **named)
