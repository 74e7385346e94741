"""Reference of ``fp4_quantize``, and the block quantisation that all references with FP4 outputs use."""

import torch

from torch_cute_ops.formats import MXFP4, FP4Format, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.formats.fp4 import (
    E2M1_MAX,
    E4M3_NAN,
    UE8M0_BIAS,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
)
from torch_cute_ops.formats.scale_layout import from_linear


def quantize_rows(
    value: torch.Tensor, fmt: FP4Format, global_scale: torch.Tensor | None, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise fp32 rows (..., K) to packed codes (..., K/2) and scales in ``scale_layout``.

    ``global_scale`` contains one element, or one element per row, (..., 1).
    """
    layout = resolve_scale_layout(scale_layout)
    blocks = value.unflatten(-1, (-1, fmt.block_size))
    amax = blocks.abs().amax(-1)
    scale, inverse = _block_scale(amax, fmt, global_scale)
    # A block whose scale is zero, infinite or NaN stores zeros with a positive sign.
    live = amax.isfinite() & (inverse != 0) & ~inverse.isnan()
    scaled = torch.where(live.unsqueeze(-1), blocks * inverse.unsqueeze(-1), 0.0)
    packed = pack_e2m1(encode_e2m1(scaled).flatten(-2))
    if layout.is_linear:
        return packed, scale
    return packed, from_linear(scale.reshape(-1, scale.shape[-1]), layout)


def _block_scale(
    amax: torch.Tensor, fmt: FP4Format, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored scale of blocks with this ``amax``, and the fp32 factor by which their values are multiplied
    before they are rounded to e2m1."""
    if fmt == MXFP4:
        byte = encode_ue8m0(amax, E2M1_MAX)
        inverse = decode_ue8m0(2 * UE8M0_BIAS - byte)
        return byte, torch.where(amax == 0, 0.0, inverse)
    g = amax.new_ones(()) if global_scale is None else global_scale
    if g.numel() == 1:
        g = g.reshape(())
    scale = encode_e4m3(amax * g * (1 / 6))
    nan = torch.full((), E4M3_NAN, dtype=torch.uint8, device=amax.device).view(torch.float8_e4m3fn)
    inverse = torch.where(scale.float() == 0, 0.0, g / scale.float())
    return torch.where(amax.isfinite(), scale.view(torch.uint8), nan.view(torch.uint8)).view(scale.dtype), inverse


def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None,
    block_size: int,
    scale_format: str | None,
    scale_layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``input`` (..., K) to FP4 blocks; see the op's docstring."""
    return quantize_rows(input.float(), resolve_fp4_format(block_size, scale_format), global_scale, scale_layout)
