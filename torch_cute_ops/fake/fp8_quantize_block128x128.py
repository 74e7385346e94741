"""Outputs of ``fp8_quantize_block128x128``."""

from typing import Any

import torch

from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.formats.shapes import OutputShapes


def fp8_quantize_block128x128(input: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the codes (..., N, K) and the scales (..., ⌈N/128⌉, ⌈K/128⌉)."""
    *lead, n, k = input.shape
    block = FP8_BLOCK128.block_size
    scale = *lead, (n + block - 1) // block, (k + block - 1) // block
    return [(tuple(input.shape), torch.float8_e4m3fn), (scale, torch.float32)]
