"""Reference of ``fp4_quantize_four_over_six``."""

import torch
from torch import Tensor

from torch_cute_ops.formats import NVFP4, resolve_scale_layout
from torch_cute_ops.formats.fp4 import E4M3_NAN, FOUR_OVER_SIX, decode_e2m1, encode_e2m1, encode_e4m3, pack_e2m1
from torch_cute_ops.formats.scale_layout import from_linear


def quantize_rows_four_over_six(value: Tensor, global_scale: Tensor | None, scale_layout: str) -> tuple[Tensor, Tensor]:
    """Quantise fp32 rows (..., K) to NVFP4, each block with the better of two scales. Return packed codes (..., K/2)
    and scales in ``scale_layout``."""
    layout = resolve_scale_layout(scale_layout)
    blocks = value.unflatten(-1, (-1, NVFP4.block_size))
    amax = blocks.abs().amax(-1)
    g = amax.new_ones(()) if global_scale is None else global_scale.reshape(())
    sixth = amax * g * (1 / 6)
    scale, codes, error = _encode(blocks, sixth, g)
    larger_scale, larger_codes, larger_error = _encode(blocks, sixth * FOUR_OVER_SIX, g)
    takes_larger = larger_error < error
    byte = torch.where(takes_larger, larger_scale.view(torch.uint8), scale.view(torch.uint8))
    codes = torch.where(takes_larger.unsqueeze(-1), larger_codes, codes)
    byte = torch.where(amax.isfinite(), byte, E4M3_NAN)
    packed = pack_e2m1(torch.where(amax.isfinite().unsqueeze(-1), codes, 0).flatten(-2))
    stored = byte.to(torch.uint8).view(NVFP4.scale_dtype)
    return packed, stored if layout.is_linear else from_linear(stored.reshape(-1, stored.shape[-1]), layout)


def _encode(blocks: Tensor, wanted_scale: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode blocks with the scale ``e4m3(wanted_scale)``. Return the scales, the codes, and the sums of the squared
    errors of the decoded values times the global scale ``g``."""
    scale = encode_e4m3(wanted_scale)
    inverse = torch.where(scale.float() == 0, 0.0, g / scale.float()).unsqueeze(-1)
    codes = encode_e2m1(torch.where((inverse != 0) & ~inverse.isnan(), blocks * inverse, 0.0))
    # The first product is exact.
    squares = (decode_e2m1(codes) * scale.float().unsqueeze(-1) - blocks * g).square()
    # Add neighbours, then neighbouring sums, and so on, in the order of the kernel.
    while squares.shape[-1] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
    return scale, codes, squares.squeeze(-1)


def fp4_quantize_four_over_six(input: Tensor, global_scale: Tensor | None, scale_layout: str) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` (..., K) to NVFP4, each block with the better of two scales; see the op's docstring."""
    return quantize_rows_four_over_six(input.float(), global_scale, scale_layout)
