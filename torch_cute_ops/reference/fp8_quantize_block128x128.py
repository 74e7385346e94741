"""Reference of ``fp8_quantize_block128x128``."""

import torch
from torch import Tensor

from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.formats.fp4 import encode_e4m3
from torch_cute_ops.reference.fp8_quantize import scales_of


def fp8_quantize_block128x128(input: Tensor, scale_format: str | None) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` (..., N, K) to FP8 with a scale per block of 128 × 128 elements; see the op's docstring."""
    n, k = input.shape[-2:]
    size = FP8_BLOCK128.block_size
    # Pad the last blocks with zeros, which change neither their amax nor their scale.
    padded = torch.nn.functional.pad(input.float(), (0, -k % size, 0, -n % size))
    blocks = padded.unflatten(-1, (-(-k // size), size)).unflatten(-3, (-(-n // size), size))
    amax = blocks.abs().amax((-3, -1))
    scale, is_live = scales_of(amax, scale_format)
    divisor, is_live = scale[..., :, None, :, None], is_live[..., :, None, :, None]
    y = encode_e4m3(torch.where(is_live, blocks / divisor, 0.0)).view(padded.shape)
    return y[..., :n, :k].contiguous(), torch.where(amax.isfinite(), scale, torch.nan)
