"""Output of ``fp4_dequantize``."""

from typing import Any

import torch

from torch_cute_ops.formats.shapes import OutputShapes


def fp4_dequantize(y: torch.Tensor, out_dtype: torch.dtype | None, **_: Any) -> OutputShapes:
    """Describe the decoded values (..., K)."""
    return [((*y.shape[:-1], y.shape[-1] * 2), out_dtype or torch.bfloat16)]
