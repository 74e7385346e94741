"""Prepared scales of an FP4 weight, with which the weight is re-encoded in FP8 with one power of two per row.

Row n has the exponent ``u[n]``, the least integer with ``6 · (largest |block scale| of the row) · 2^-u ≤ 448``, or 0 if
all scales are zero or NaN. The magnitude of a block scale is ``s · 2^u``. In prepared scales a byte holds ``s`` as an
index, so that a kernel finds the e4m3 codes of ``e2m1 · s`` in a table. ``s`` is at most 72.

Prepared scales are uint8 (1 + ⌈K/256⌉, N, 256/B), or (E, 1 + ⌈K/256⌉, N, 256/B) for experts, with B the block size. The
dimension 1 + ⌈K/256⌉ numbers the slabs. In slab 0, the first 4 bytes of row n are ``2^u[n]`` as a little-endian
float32, and the other bytes are 0. In slab 1 + j, byte i of row n is the index of block ``j · 256/B + i``; it is 0
beyond K.

=====  =======================================================================================
index  meaning
=====  =======================================================================================
0      all products of ``s`` and an e2m1 number round to 0 in e4m3
255    ``s`` is NaN
other  NVFP4: ``s = (8 + m)/8 · 2^e``, the index is ``8 · (e + 13) + m + 1``, m from 0 to 7. Bits of s in float16:
       ``(index + 15) << 7``
other  MXFP4: ``s = 2^e``, the index is ``e + 14``. Bits of s in float16: ``(index + 1) << 10``
=====  =======================================================================================
"""

from typing import Any, Final

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.fp4 import E2M1_MAX, E4M3_MAX, MXFP4, UE8M0_BIAS, UE8M0_NAN, FP4Format, resolve_fp4_format
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.scale_layout import (
    FP4ScaleLayout,
    ScaleLayout,
    layout_of_operand,
    reason_no_tiles,
    resolve_scale_layout,
    to_linear,
)

SLAB_K: Final = INTERLEAVED_K
"""Number of elements of k whose indices form one slab."""
INDEX_NAN: Final = 255
_MXFP4_U: Final = 6
"""Exponent of the largest block scale of an MXFP4 row, minus u."""
_SMALLEST: Final = -13
"""Exponent e of the smallest s with an index other than 0. The largest product, 6 · 1.875 · 2^-13, rounds to e4m3's
smallest number, 2^-9. Products with s < 2^-13 are less than 2^-10 and round to 0."""
_FLOAT16_BIAS: Final = 15


def prepared_shape(n: int, k: int, fmt: FP4Format, experts: int | None = None) -> tuple[int, ...]:
    """Return the shape of the prepared scales of a weight (N, K), or (E, N, K) with ``experts``. Sizes may be
    symbols."""
    lead = () if experts is None else (experts,)
    return (*lead, 1 + (k + SLAB_K - 1) // SLAB_K, n, SLAB_K // fmt.block_size)


def is_prepared(b: torch.Tensor, b_scale: torch.Tensor, block_size: int) -> bool:
    """Return True if the scales of the weight ``b``, (K/2, N) or (E, K/2, N), are prepared scales, judged by their
    dtype, their number of dimensions and their last extent. The other extents are not checked."""
    if b_scale.dtype != torch.uint8 or len(b_scale.shape) != len(b.shape) + 1 or block_size not in (16, 32):
        return False
    return bool(b_scale.shape[-1] == SLAB_K // block_size)


def prepare_scales(
    b_scale: torch.Tensor,
    n: int,
    k: int,
    *,
    experts: int | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: FP4ScaleLayout | None = None,
) -> torch.Tensor:
    """Prepare the block scales of an FP4 weight for :func:`mm_fp8_fp4` and :func:`grouped_mm_fp8_fp4` with per-token
    scales of the activations.

    Call this function once, after loading: the ops take the result as ``b_scale`` and compute the same bits as with the
    original scales, which they would have to prepare at each call. On a GPU the function waits for the device, to check
    that no scale is negative. It does not check scales on a meta device, in compiled code, or while a CUDA graph is
    captured.

    Args:
        b_scale: block scales of a weight (N, K): 128x4 (⌈N/128⌉, ⌈K/B/4⌉, 32, 4, 4), or linear (N, K/B), with B the
            block size; float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu (MXFP4). Scales of experts' weights (E, N, K):
            tiles over all E·N rows, or linear (E, N, K/B).
        n: N, the number of rows of the weight, or of the weight of each expert.
        k: K, the number of elements of a row.
        experts: number of experts, or None for a weight without experts.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` or ``"ue8m0"``. ``None`` means the format for
            ``block_size``.
        scale_layout: layout of ``b_scale``, ``"128x4"`` or ``"linear"``. ``None`` derives the layout from the shape. If
            a layout is given, tiled scales may also have another library's shape.

    Returns:
        (1 + ⌈K/256⌉, N, 256/B) uint8, or (E, 1 + ⌈K/256⌉, N, 256/B): power of two of each row, and an index for each
        block. docs/formats.md, "Prepared scales", gives the meaning of the bytes.

    Raises:
        ValueError: if a scale is negative, or a shape, format or layout is wrong.
        TypeError: if a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, fp8_quantize, mm_fp8_fp4, prepare_scales
        >>> a, a_scale = fp8_quantize(torch.randn(2, 256))  # a scale for each token
        >>> b, b_scale = fp4_quantize(torch.randn(8, 256))
        >>> prepared = prepare_scales(b_scale, 8, 256)
        >>> tuple(prepared.shape)
        (2, 8, 16)
        >>> torch.equal(mm_fp8_fp4(a, b.t(), a_scale, prepared), mm_fp8_fp4(a, b.t(), a_scale, b_scale))
        True
    """
    fmt, layout = _checked(b_scale, n, k, experts, block_size, scale_format, scale_layout)
    rows = n * (1 if experts is None else experts)
    linear = to_linear(b_scale.view(fmt.scale_dtype), layout, rows, k // fmt.block_size)
    if fmt != MXFP4 and _may_read(linear) and bool((linear.float() < 0).any()):
        raise ValueError(
            "prepare_scales: b_scale holds negative scales, which prepared scales cannot represent; pass the block "
            "scales themselves to the op, or build the layer with activations='fp8'"
        )
    return prepared_of_linear(linear, n, fmt, experts)


def prepared_of_linear(linear: torch.Tensor, n: int, fmt: FP4Format, experts: int | None = None) -> torch.Tensor:
    """Compute prepared scales from linear scales (rows, K/B) in ``fmt.scale_dtype``, without a check of their signs."""
    blocks, width = linear.shape[1], SLAB_K // fmt.block_size
    count, slabs = 1 if experts is None else experts, (blocks + width - 1) // width
    index, u = _mxfp4_indices(linear) if fmt == MXFP4 else _nvfp4_indices(linear)
    index = torch.nn.functional.pad(index, (0, slabs * width - blocks)).view(count, n, slabs, width)
    powers = _power_of_two(u).float()[:, None].view(torch.uint8).view(count, 1, n, 4)
    prepared = torch.cat((torch.nn.functional.pad(powers, (0, width - 4)), index.transpose(1, 2)), 1)
    return prepared[0] if experts is None else prepared


def _nvfp4_indices(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices (rows, blocks) uint8, and u (rows,) int32, of e4m3 scales."""
    magnitude = scale.float().abs()
    is_nan = magnitude.isnan()
    magnitude = magnitude.masked_fill(is_nan, 0.0)
    largest = magnitude.amax(1)
    # frexp splits 6 · largest / 448 into 2^u and a number in [1/2, 1). The number is never 1/2, because 3/7 times a
    # scale's significand is not a power of 2.
    u = torch.frexp(largest.double() * (E2M1_MAX / E4M3_MAX)).exponent
    u = torch.where(largest == 0, 0, u).to(torch.int32)
    # The product has 4 significant bits and is at least 2^-12 or 0, so float16 represents it exactly.
    s = (magnitude * _power_of_two(-u).float()[:, None]).half()
    index = ((s.view(torch.int16) >> 7) - _FLOAT16_BIAS).clamp(min=0)
    return index.masked_fill(is_nan, INDEX_NAN).to(torch.uint8), u


def _mxfp4_indices(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices (rows, blocks) uint8, and u (rows,) int32, of ue8m0 scales."""
    byte = scale.to(torch.int16)
    is_nan = byte == UE8M0_NAN
    largest = byte.masked_fill(is_nan, -1).amax(1)
    u = torch.where(largest < 0, 0, largest - UE8M0_BIAS - _MXFP4_U).to(torch.int32)
    index = (byte - largest[:, None] + (_MXFP4_U - _SMALLEST + 1)).clamp(min=0)
    return index.masked_fill(is_nan, INDEX_NAN).to(torch.uint8), u


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent as float64, exactly, for exponents in float64's normal range."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def scales_of_prepared(prepared: torch.Tensor, k: int, fmt: FP4Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode prepared scales (..., 1 + ⌈K/256⌉, N, 256/B).

    Returns:
        ``s``: (..., N, K/B) float32, magnitudes of the block scales divided by 2^u, with 0 for magnitudes that are too
            small to matter. ``powers``: (..., N) float32, 2^u.
    """
    index = prepared[..., 1:, :, :].transpose(-3, -2).flatten(-2)[..., : k // fmt.block_size].to(torch.int16)
    bits = (index + 1) << 10 if fmt == MXFP4 else (index + _FLOAT16_BIAS) << 7
    s = bits.to(torch.int16).view(torch.float16).float()
    s = torch.where(index == 0, 0.0, torch.where(index == INDEX_NAN, torch.nan, s))
    return s, prepared[..., 0, :, :4].contiguous().view(torch.float32).squeeze(-1)


def _checked(
    b_scale: Any, n: Any, k: Any, experts: Any, block_size: int, scale_format: str | None, scale_layout: str | None
) -> tuple[FP4Format, ScaleLayout]:
    """Check the arguments of ``prepare_scales``. Return the format and the layout of the scales."""
    try:
        fmt = resolve_fp4_format(block_size, scale_format)
        if not isinstance(b_scale, torch.Tensor):
            raise TypeError(f"b_scale is {b_scale!r}, a {type(b_scale).__name__}; expected a tensor")
        if b_scale.dtype not in fmt.scale_dtypes:
            dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in fmt.scale_dtypes)
            raise TypeError(f"got b_scale with dtype {b_scale.dtype}; expected {dtypes}")
        for name, value, most in (("n", n, None), ("k", k, None), ("experts", experts, MAX_EXPERTS)):
            if name == "experts" and value is None:
                continue
            if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected an int")
            least = 0 if name == "n" else 1
            if value < least or (most is not None and value > most):
                raise ValueError(f"{name} is {value}; expected {least} {'or more' if most is None else f'to {most}'}")
        if k % fmt.block_size:
            raise ValueError(f"k is {k}; expected a multiple of {fmt.block_size}")
        layout = layout_of_operand(b_scale) if scale_layout is None else resolve_scale_layout(scale_layout)
        if layout.tile_rows == 8:
            raise ValueError("8x4 scales are for activations; expected '128x4' or 'linear'")
        lead = (n,) if experts is None else (experts, n)
        blocks = k // fmt.block_size
        expected = layout.shape(lead, blocks)
        if b_scale.shape != expected:
            reason = f"expected {expected}, the {layout.name} scales of the weight"
            if scale_layout is not None and not layout.is_linear:
                reason = reason_no_tiles(b_scale, lead, blocks, layout) or ""
            if reason:
                raise ValueError(f"got b_scale with shape {tuple(b_scale.shape)}; {reason}")
        return fmt, layout
    except (ValueError, TypeError) as error:
        raise type(error)(f"prepare_scales: {error}") from None


def _may_read(tensor: torch.Tensor) -> bool:
    """Return True if Python can read the tensor's elements."""
    if type(tensor) is not torch.Tensor or tensor.is_meta or torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
