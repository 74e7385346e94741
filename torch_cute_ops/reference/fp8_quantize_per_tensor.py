"""Reference of ``fp8_quantize_per_tensor``."""

import torch
from torch import Tensor

from torch_cute_ops.formats.fp8 import FP8_DYNAMIC_TENSOR, ROW
from torch_cute_ops.formats.interleave import interleave_k
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows


def fp8_quantize_per_tensor(input: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` (..., K) to FP8 with one scale for all its elements; see the op's docstring."""
    if input.numel():
        y, scale = quantize_fp8_rows(input.float(), FP8_DYNAMIC_TENSOR, None, ROW)
    else:
        y, scale = torch.empty_like(input, dtype=torch.float8_e4m3fn), input.new_zeros(1, dtype=torch.float32)
    return interleave_k(y) if interleaved else y, scale
