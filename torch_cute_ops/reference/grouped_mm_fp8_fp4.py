"""Reference of ``grouped_mm_fp8_fp4``."""

from typing import Any

import torch

from torch_cute_ops.reference.grouped_mm_fp8 import defined, grouped_gemm
from torch_cute_ops.reference.mm_fp4 import formats_of
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight

__all__ = ["defined", "grouped_mm_fp8_fp4"]


def grouped_mm_fp8_fp4(b: torch.Tensor, b_scale: torch.Tensor, **named: Any) -> torch.Tensor:
    """Apply ``mm_fp8_fp4`` to each expert's rows with the expert's weight, alpha and bias; see the op's docstring."""
    fmt, _, layout = formats_of(b_scale, **named)
    weights, factors = fp8_weight(b.mT, b_scale, fmt, layout)
    return grouped_gemm(weights=weights, factors=factors, **named)
