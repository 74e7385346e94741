"""Outputs of ``silu_mul_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.fake.rmsnorm_fp8quant import quantised
from torch_cute_ops.fake.silu_mul_fp4quant import halved
from torch_cute_ops.formats.shapes import OutputShapes


def silu_mul_fp8quant(
    input: torch.Tensor,
    granularity: str,
    scale_layout: str | None,
    interleaved: bool,
    scale_format: str | None,
    **_: Any,
) -> OutputShapes:
    """Describe the codes (..., I), or (..., ⌈I/256⌉, 256) if they are interleaved, and the scales of an input (...,
    2I)."""
    return quantised(halved(input), granularity, scale_layout, interleaved, scale_format)
