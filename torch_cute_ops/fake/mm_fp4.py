"""Output of ``mm_fp4``, and the default dtype of GEMM outputs."""

from typing import Any

import torch

from torch_cute_ops.formats.shapes import OutputShapes


def mm_fp4(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, **_: Any) -> OutputShapes:
    """Describe the product (M, N)."""
    return [((a.shape[0], b.shape[1]), result_dtype(a, out_dtype))]


def result_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return ``out_dtype`` if it is given, or else the dtype of 16-bit activations, or else bfloat16."""
    return out_dtype or (a.dtype if a.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16)
