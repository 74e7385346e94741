"""Output of ``moe_fc1_fp4_weight_only``."""

from typing import Any

import torch

from torch_cute_ops.fake.moe_fc1_fp4 import gated_columns
from torch_cute_ops.formats.shapes import OutputShapes


def moe_fc1_fp4_weight_only(a: torch.Tensor, w: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the result (M, E·I) in the dtype of ``a``."""
    return [((a.shape[0], gated_columns(w)), a.dtype)]
