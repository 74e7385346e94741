"""Reference of ``fp8_quantize``, and the quantisation that all references with FP8 outputs use."""

import torch
from torch import Tensor

from torch_cute_ops.formats import MXFP8, FP8Format, ScaleLayout, resolve_fp8_format
from torch_cute_ops.formats.fp4 import E4M3_MAX, decode_ue8m0, encode_e4m3, encode_ue8m0
from torch_cute_ops.formats.fp8 import COLUMN, FP8_DYNAMIC_TENSOR, FP8_TOKEN, new_column_scales
from torch_cute_ops.formats.interleave import interleave_k
from torch_cute_ops.formats.scale_layout import from_linear


def quantize_fp8_rows(
    value: Tensor, fmt: FP8Format, scale: Tensor | None, layout: ScaleLayout
) -> tuple[Tensor, Tensor]:
    """Quantise fp32 rows (..., K). Return codes (..., K), and scales, (..., ⌈K/128⌉) for block scales.

    MXFP8 scales have the shape of ``layout``.

    A format with a static scale uses the given ``scale``. For other formats ``scale`` is None, and the scales are
    computed.
    """
    if scale is not None:
        return _packed(encode_e4m3(value / scale.reshape(()))), scale.reshape(1).clone()
    if fmt == FP8_DYNAMIC_TENSOR:
        y, row_scale = quantize_fp8_rows(value.reshape(1, -1), FP8_TOKEN, None, layout)
        return y.view(value.shape), row_scale.view(1)
    width = value.shape[-1]
    block = fmt.block_size or width
    # Pad the last block with zeros, which change neither its amax nor its scale.
    blocks = torch.nn.functional.pad(value, (0, -width % block)).unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1)
    block_scale, live = scales_of(amax, fmt.scale_format)
    # A block whose scale is zero, infinite or NaN, or whose elements are all zero, stores zeros with a positive sign.
    y = encode_e4m3(torch.where(live.unsqueeze(-1), blocks / block_scale.unsqueeze(-1), 0.0)).flatten(-2)[..., :width]
    if fmt == MXFP8:
        byte = encode_ue8m0(amax, E4M3_MAX)
        scales = byte if layout.is_linear else from_linear(byte.reshape(-1, byte.shape[-1]), layout)
        return _packed(y), _packed(scales)
    stored = torch.where(amax.isfinite(), block_scale, torch.nan)
    return _packed(y), new_column_scales(stored).copy_(stored) if layout == COLUMN else _packed(stored)


def scales_of(amax: Tensor, scale_format: str | None) -> tuple[Tensor, Tensor]:
    """Return the fp32 scales of blocks with this ``amax``, and a mask of the blocks whose elements are divided by their
    scale. All other blocks get codes 0."""
    if scale_format == "ue8m0":
        return decode_ue8m0(encode_ue8m0(amax, E4M3_MAX)), amax.isfinite() & (amax != 0)
    # Divide by a tensor, because torch on a GPU replaces the division by a Python number by a multiplication with the
    # reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    return scale, amax.isfinite() & (scale != 0)


def _packed(tensor: Tensor) -> Tensor:
    """Copy ``tensor`` to contiguous strides. ``contiguous()`` would not copy a tensor with unusual strides in a
    dimension of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def fp8_quantize(
    input: Tensor,
    scale: Tensor | None,
    granularity: str,
    scale_layout: str | None,
    interleaved: bool,
    scale_format: str | None,
) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` (..., K) to FP8; see the op's docstring."""
    fmt, layout = resolve_fp8_format(granularity, scale_layout, scale_format)
    y, factors = quantize_fp8_rows(input.float(), fmt, scale, layout)
    return interleave_k(y) if interleaved else y, factors
