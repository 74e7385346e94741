"""Outputs of ``silu_mul``."""

from typing import Any

import torch

from torch_cute_ops.fake.silu_mul_fp4quant import halved
from torch_cute_ops.formats.shapes import OutputShapes


def silu_mul(input: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the gated values (..., I) of an input (..., 2I)."""
    return [(halved(input), input.dtype)]
