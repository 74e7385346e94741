"""Outputs of ``rmsnorm_fp4quant_with_norm``."""

from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_quantize
from torch_cute_ops.formats.shapes import OutputShapes


def rmsnorm_fp4quant_with_norm(input: torch.Tensor, **choices: Any) -> OutputShapes:
    """Describe the codes (..., H/2), the scales, and the normalised rows (..., H) in the input's dtype."""
    return [*fp4_quantize(input, **choices), (input.shape, input.dtype)]
