"""Outputs of ``fp4_quantize_per_token`` and of other ops that quantise rows to NVFP4 with a scale per row."""

import math
from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_outputs
from torch_cute_ops.formats import NVFP4
from torch_cute_ops.formats.shapes import OutputShapes


def fp4_quantize_per_token(input: torch.Tensor, scale_layout: str, **_: Any) -> OutputShapes:
    """Describe the codes (..., H/2), the block scales and the row scales."""
    return per_token_outputs(input.shape, scale_layout)


def per_token_outputs(shape: tuple[int, ...], scale_layout: str) -> OutputShapes:
    """Describe the codes, block scales and row scales of a tensor of ``shape`` (..., K) that is quantised per token."""
    outputs = fp4_outputs(shape, NVFP4.block_size, None, scale_layout)
    return [*outputs, ((math.prod(shape[:-1]),), torch.float32)]
