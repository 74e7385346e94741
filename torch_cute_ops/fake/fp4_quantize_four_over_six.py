"""Outputs of ``fp4_quantize_four_over_six``."""

from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_outputs
from torch_cute_ops.formats import NVFP4
from torch_cute_ops.formats.shapes import OutputShapes


def fp4_quantize_four_over_six(input: torch.Tensor, scale_layout: str, **_: Any) -> OutputShapes:
    """Describe the codes (..., H/2) and the block scales."""
    return fp4_outputs(input.shape, NVFP4.block_size, None, scale_layout)
