"""Reference of ``grouped_mm_fp8_fp4``."""

import inspect
from typing import Any

import torch

from torch_cute_ops.reference.grouped_mm_fp8 import defined_rows, grouped_gemm
from torch_cute_ops.reference.mm_fp4 import formats_of
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight


def grouped_mm_fp8_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """``mm_fp8_fp4`` of each expert's rows, with its ``alpha`` and bias; zero in other rows; see the op's docstring."""
    fmt, _, layout = formats_of(*rest, **named)
    weights, factors = fp8_weight(b, b_scale, fmt, layout)
    return grouped_gemm(a, weights, a_scale, factors, offsets, counts, alpha, bias, out_dtype or torch.bfloat16)


def defined(outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The result with zeros in rows that no expert has."""
    return defined_rows(outputs, **inspect.signature(grouped_mm_fp8_fp4).bind(*args, **kwargs).arguments)
