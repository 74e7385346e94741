"""Outputs of ``moe_swiglu_fp8quant``."""

import torch

from torch_cute_ops.fake.silu_mul_fp4quant import halved
from torch_cute_ops.formats import FP8_BLOCK128


def moe_swiglu_fp8quant(
    input: torch.Tensor, offsets: torch.Tensor | None = None, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (R, I) and scales (I/128, R), or (E, max_rows, I) and (I/128, E, max_rows)."""
    *lead, width = halved(input.shape)
    y = input.new_empty((*lead, width), dtype=torch.float8_e4m3fn)
    return y, input.new_empty((width // FP8_BLOCK128.block_size, *lead), dtype=torch.float32)
