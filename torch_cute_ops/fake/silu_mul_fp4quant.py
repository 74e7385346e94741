"""Outputs of ``silu_mul_fp4quant``, and the output shape of all ops that apply a gate."""

from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_outputs
from torch_cute_ops.formats.shapes import OutputShapes


def silu_mul_fp4quant(
    input: torch.Tensor, block_size: int, scale_format: str | None, scale_layout: str, **_: Any
) -> OutputShapes:
    """Describe the codes (..., I/2) and the scales of an input (..., 2I)."""
    return fp4_outputs(halved(input), block_size, scale_format, scale_layout)


def halved(input: torch.Tensor) -> tuple[int, ...]:
    """Return (..., I) for an input (..., 2I)."""
    return (*input.shape[:-1], input.shape[-1] // 2)
