"""Reference of ``mm_fp8_fp4``, and the conversion of the op's FP4 weight to FP8."""

from typing import Any

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format
from torch_cute_ops.formats.fp4 import E2M1_MAX, E4M3_MAX, decode_e2m1, decode_scale, encode_e4m3, unpack_e2m1
from torch_cute_ops.formats.interleave import deinterleave_k
from torch_cute_ops.formats.prepared_scales import is_prepared, scales_of_prepared
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.formats.token_scales import has_token_scales, is_interleaved
from torch_cute_ops.reference.mm_fp4 import formats_of
from torch_cute_ops.reference.mm_fp8 import scaled_gemm
from torch_cute_ops.reference.mm_fp8_block import BLOCK, block_scaled_gemm


def mm_fp8_fp4(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, **named: Any
) -> torch.Tensor:
    """Re-encode the FP4 weight ``b`` in FP8 and compute ``alpha · a @ b + bias``, (M, N); see the op's docstring."""
    if not has_token_scales(a, b, a_scale, b_scale, named["block_size"]):
        fmt, _, layout = formats_of(b_scale, **named)
        weight, factors = fp8_weight(b.t(), b_scale, fmt, layout)
        return block_scaled_gemm(a=a, weight=weight, a_scale=a_scale, factors=factors, **named)
    weight, powers = row_weight(b, b_scale, **named)
    alpha, bias, out_dtype = (named[name] for name in ("alpha", "bias", "out_dtype"))
    factor = powers if alpha is None else powers * alpha.reshape(-1)
    return scaled_gemm(ordinary_rows(a, b), weight, a_scale, factor, bias, out_dtype or torch.bfloat16)


def ordinary_rows(a: torch.Tensor, b: torch.Tensor, is_masked: bool = False) -> torch.Tensor:
    """Return the activations of a call with the weight ``b`` in the order of k, (..., K)."""
    return deinterleave_k(a, 2 * b.shape[-2]) if is_interleaved(a, is_masked) else a


def row_weight(
    b: torch.Tensor, b_scale: torch.Tensor, *, block_size: int, scale_format: str | None, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the FP4 weight of a call with per-token scales to FP8. Return the weight (..., N, K) float8_e4m3fn, and
    the power of two of each row, (..., N) float32."""
    if is_prepared(b, b_scale, block_size):
        return prepared_weight(b.mT, b_scale, resolve_fp4_format(block_size, scale_format))
    fmt, _, layout = formats_of(b_scale, block_size=block_size, scale_format=scale_format, **named)
    weight, powers = fp8_weight(b.mT, b_scale, fmt, layout, by_row=True)
    return weight, powers.squeeze(-1)


def prepared_weight(codes: torch.Tensor, prepared: torch.Tensor, fmt: FP4Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert an FP4 weight (..., N, K/2) with prepared scales to FP8. The results are as for ``row_weight``."""
    s, powers = scales_of_prepared(prepared, 2 * codes.shape[-1], fmt)
    numbers = decode_e2m1(unpack_e2m1(codes.view(torch.uint8))).unflatten(-1, (-1, fmt.block_size))
    return encode_e4m3((numbers * s[..., None]).flatten(-2)), powers


def fp8_weight(
    codes: torch.Tensor, scale: torch.Tensor, fmt: FP4Format, layout: ScaleLayout, *, by_row: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert an FP4 weight to FP8 with powers of two as scales.

    In each row and block of 128 elements of k, a weight is ``w8 = e4m3(e2m1 · block scale · 2^-t)``. The exponent t is
    the least integer with ``6 · (largest |block scale|) · 2^-t <= 448``, or 0 if all scales are zero or NaN. Elements
    with a NaN block scale become NaN and do not affect t.

    Args:
        codes: (..., K/2) packed FP4 codes; K is a multiple of 64.
        scale: block scales of the flattened rows in ``layout``.
        fmt: format of the weight.
        layout: layout of ``scale``.
        by_row: True if all elements of a row share one exponent.

    Returns:
        Weight (..., K) float8_e4m3fn, and its scales 2^t (..., ⌈K/128⌉) float32, or (..., 1) if ``by_row``.
    """
    lead, k = codes.shape[:-1], codes.shape[-1] * 2
    rows, blocks = lead.numel(), k // fmt.block_size
    linear = to_linear(scale.view(fmt.scale_dtype), layout, rows, blocks).reshape(rows, blocks)
    # Compute in float64, because 6 times the largest ue8m0 scale exceeds the range of float32.
    scales = decode_scale(linear, fmt).double()
    each = blocks if by_row else BLOCK // fmt.block_size
    padded = torch.nn.functional.pad(scales.abs().nan_to_num(0.0), (0, -blocks % each))
    largest = padded.unflatten(1, (-1, each)).amax(2)
    # frexp splits 6 · largest / 448 into 2^t and a number in [1/2, 1). The number is never 1/2, because 3/7 times a
    # scale's significand is not a power of 2.
    _, t = torch.frexp(largest * (E2M1_MAX / E4M3_MAX))
    powers = torch.where(largest == 0, 0, t).double().exp2()
    inverse = (1 / powers).repeat_interleave(each, 1)[:, :blocks]
    numbers = decode_e2m1(unpack_e2m1(codes.view(torch.uint8))).double().view(rows, blocks, fmt.block_size)
    # The conversion to float32 is exact, because the product has few significant bits. Only products that e4m3 rounds
    # to zero may be too small for float32.
    value = (numbers * (scales * inverse)[..., None]).float().view(*lead, k)
    return encode_e4m3(value), powers.float().view(*lead, powers.shape[1])
