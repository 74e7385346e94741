"""Reference of ``grouped_mm_fp8_fp4``."""

from typing import Any

import torch

from torch_cute_ops.formats.token_scales import has_token_scales
from torch_cute_ops.reference.grouped_mm_fp8 import defined, grouped_gemm, grouped_token_gemm
from torch_cute_ops.reference.mm_fp4 import formats_of
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight, ordinary_rows, row_weight

__all__ = ["defined", "grouped_mm_fp8_fp4"]


def grouped_mm_fp8_fp4(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, **named: Any
) -> torch.Tensor:
    """Apply ``mm_fp8_fp4`` to each expert's rows with the expert's weight, alpha and bias; see the op's docstring."""
    is_masked = named["offsets"] is None
    if has_token_scales(a, b, a_scale, b_scale, named["block_size"], is_masked):
        weights, powers = row_weight(b, b_scale, **named)
        return grouped_token_gemm(ordinary_rows(a, b, is_masked), weights, a_scale, powers, **named)
    fmt, _, layout = formats_of(b_scale, **named)
    weights, factors = fp8_weight(b.mT, b_scale, fmt, layout)
    return grouped_gemm(a=a, weights=weights, a_scale=a_scale, factors=factors, **named)
