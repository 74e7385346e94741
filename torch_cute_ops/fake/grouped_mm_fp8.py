"""Output of ``grouped_mm_fp8``."""

from typing import Any

import torch

from torch_cute_ops.fake.mm_fp4 import result_dtype
from torch_cute_ops.formats.shapes import OutputShapes


def grouped_mm_fp8(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None, out_dtype: torch.dtype | None, **_: Any
) -> OutputShapes:
    """Describe the product: (R, N), or (E, rows per expert, N) in the masked layout."""
    rows = a.shape[: 2 if offsets is None else 1]
    return [((*rows, b.shape[2]), result_dtype(a, out_dtype))]
