"""Outputs of ``moe_swiglu_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.fake.rmsnorm_fp8quant import quantised
from torch_cute_ops.fake.silu_mul_fp4quant import halved
from torch_cute_ops.formats.shapes import OutputShapes


def moe_swiglu_fp8quant(input: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe codes (R, I) and column-major scales (R, ⌈I/128⌉). In the masked layout, both have a first dimension
    E."""
    return quantised(halved(input), "block128", None)
