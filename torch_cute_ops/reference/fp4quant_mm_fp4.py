"""Reference of ``fp4quant_mm_fp4``."""

from typing import Any

import torch

from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.mm_fp4 import formats_of, fp4_gemm


def fp4quant_mm_fp4(a: torch.Tensor, **named: Any) -> torch.Tensor:
    """Quantise ``a`` (M, K) with ``fp4_quantize``, then apply ``mm_fp4``; see the op's docstring."""
    return quantized_gemm(a.float(), out_dtype=named.pop("out_dtype") or a.dtype, **named)


def quantized_gemm(
    value: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    **formats: Any,
) -> torch.Tensor:
    """Quantise fp32 rows (M, K) to FP4 and multiply them by the weight ``b``."""
    fmt, _, layout = formats_of(b_scale, **formats)
    a, a_scale = quantize_rows(value, fmt, global_scale, layout.name)
    return fp4_gemm(a, a_scale, b.t(), b_scale, alpha, bias, out_dtype, fmt, layout, layout)
