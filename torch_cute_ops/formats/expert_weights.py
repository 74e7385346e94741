"""Convert the stacked weights of all experts to one matrix, the weight of an expert layer's second GEMM."""

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.scale_layout import FP4ScaleLayout, convert_scales, from_linear, resolve_scale_layout


def moe_fc2_weight(
    codes: torch.Tensor, scale: torch.Tensor, scale_layout: FP4ScaleLayout = "128x4"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rearrange the stacked FP4 weights of experts into the weight of :func:`moe_fc2_fp4`. No value changes.

    ``w[e · I/2 + i, n]`` is ``codes[e, n, i]``. Call this function once, after loading, because it copies the codes.

    Args:
        codes: (E, N, I/2) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte: the down projections of E experts, as
            checkpoints store them and as :func:`fp4_quantize` writes them.
        scale: block scales of ``codes``: linear (E, N, I/B), or 128x4 tiles over the E·N rows, as :func:`fp4_quantize`
            writes them. :func:`as_tiles` converts the shape of other libraries' tiles. The dtype is float8_e4m3fn
            (NVFP4, B = 16), or uint8 or float8_e8m0fnu (MXFP4, B = 32).
        scale_layout: layout of the returned scales: ``"128x4"`` or ``"linear"``.

    Returns:
        ``w``: (E·I/2, N) in the dtype of ``codes``, the transposed view of a row-major (N, E·I/2).
        ``w_scale``: block scales of the (N, E·I) matrix, in ``scale_layout`` and the dtype of ``scale``.

    Raises:
        ValueError: for a wrong shape or layout, or more than 1,024 experts.
        TypeError: for a wrong dtype.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, moe_fc2_fp4_weight_only, moe_fc2_weight
        >>> down = torch.stack([6 * torch.eye(8, 64), 3 * torch.eye(8, 64)])  # 2 experts, N = 8, I = 64
        >>> w, w_scale = moe_fc2_weight(*fp4_quantize(down))
        >>> x = torch.ones(1, 128).bfloat16()  # the activations of both experts, one after the other
        >>> moe_fc2_fp4_weight_only(x, w, w_scale, torch.tensor([[1.0, 0.5]])).tolist()[0][:2]
        [7.5, 7.5]
    """
    for name, tensor in (("codes", codes), ("scale", scale)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"moe_fc2_weight: {name} is {tensor!r}, a {type(tensor).__name__}; expected a tensor")
    if codes.dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
        raise TypeError(f"moe_fc2_weight: got codes with dtype {codes.dtype}; expected uint8 or float4_e2m1fn_x2")
    if codes.dim() != 3 or not 1 <= codes.shape[0] <= MAX_EXPERTS:
        raise ValueError(
            f"moe_fc2_weight: got codes with shape {tuple(codes.shape)}; expected (E, N, I/2), with E from 1 to "
            f"{MAX_EXPERTS}"
        )
    try:
        layout = resolve_scale_layout(scale_layout)
        if layout.tile_rows == 8:
            raise ValueError("scale_layout='8x4' is for activations; use '128x4' or 'linear'")
        experts, n, half = codes.shape
        # Recognise only linear scales here: ``convert_scales`` checks the shape of tiled scales.
        is_linear = scale.dim() == 3 and scale.shape[:2] == codes.shape[:2]
        linear = convert_scales(scale, experts * n, 2 * half, "linear" if is_linear else "128x4", "linear")
    except (ValueError, TypeError) as error:
        raise type(error)(f"moe_fc2_weight: {error}") from None
    weight, scales = (
        each.view(torch.uint8).reshape(experts, n, -1).transpose(0, 1).flatten(1) for each in (codes, linear)
    )
    return weight.view(codes.dtype).mT, from_linear(scales.view(scale.dtype), layout)
