"""Outputs of ``moe_swiglu_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.fake.silu_mul_fp4quant import halved
from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.formats.shapes import OutputShapes


def moe_swiglu_fp8quant(input: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe codes (R, I) and scales (⌈I/128⌉, R), or codes (E, max_rows, I) and scales (⌈I/128⌉, E, max_rows)."""
    *lead, width = halved(input)
    scale = (FP8_BLOCK128.scales_per_row(width), *lead)
    return [((*lead, width), torch.float8_e4m3fn), (scale, torch.float32)]
