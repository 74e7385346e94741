"""Output of ``moe_fc2_fp4``."""

from typing import Any

import torch

from torch_cute_ops.fake.mm_fp4 import result_dtype
from torch_cute_ops.formats.shapes import OutputShapes


def moe_fc2_fp4(a: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None, **_: Any) -> OutputShapes:
    """Describe the weighted sums of the experts' results, (M, N)."""
    return [((a.shape[0], w.shape[1]), result_dtype(a, out_dtype))]
