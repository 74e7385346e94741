"""Outputs of ``fp8_quantize_per_tensor``."""

from typing import Any

import torch

from torch_cute_ops.fake.rmsnorm_fp8quant import quantised
from torch_cute_ops.formats import FP8_TENSOR
from torch_cute_ops.formats.shapes import OutputShapes


def fp8_quantize_per_tensor(input: torch.Tensor, interleaved: bool, **_: Any) -> OutputShapes:
    """Describe the codes (..., K), or (..., ⌈K/256⌉, 256) if they are interleaved, and the scale (1,)."""
    return quantised(input.shape, FP8_TENSOR.granularity, None, interleaved)
