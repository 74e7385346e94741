"""Outputs of ``silu_mul_fp4quant_per_token``."""

from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize_per_token import per_token_outputs
from torch_cute_ops.fake.silu_mul_fp4quant import halved
from torch_cute_ops.formats.shapes import OutputShapes


def silu_mul_fp4quant_per_token(input: torch.Tensor, scale_layout: str, **_: Any) -> OutputShapes:
    """Describe the codes (..., I/2), the block scales and the row scales of an input (..., 2I)."""
    return per_token_outputs(halved(input), scale_layout)
