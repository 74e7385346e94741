"""Re-encoding of an FP4 weight in FP8, in NumPy, as docs/numerics.md specifies it."""

import numpy as np
import torch
from support import spec

from expected import INTERLEAVED
from expected._epilogue import EPS, moved
from expected._fp8_gemm import BLOCK, PROMOTED, Bounded, Weight, numbers, sum_of_tokens

POWERS = 2.0 ** np.arange(-140, 140)


def fp4_weight(codes: torch.Tensor, scale: torch.Tensor, layout: str, block_size: int, span: int = BLOCK) -> Weight:
    """Re-encode codes (N, K/2) with scales in this layout as an FP8 weight.

    In each row and block of ``span`` elements, the result is ``e4m3(e2m1 · scale / 2^t)`` with the scale 2^t. The
    exponent t is the least integer for which 6 times the largest scale magnitude, NaN ignored, is at most 448 · 2^t; it
    is 0 if all scales are zero.
    """
    packed = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    rows, k = len(packed), packed.shape[1] * 2
    stored = scale.detach().cpu().contiguous().view(torch.uint8).numpy()
    bytes_ = spec.collect(stored, layout, rows, k // block_size)
    scales = spec.scale_value(bytes_, {16: "e4m3", 32: "ue8m0"}[block_size]).astype(np.float64)
    elements = spec.e2m1_value(spec.unpack(packed)).astype(np.float64)
    encoded, factors = np.empty((rows, k)), np.empty((rows, -(-k // span)))
    each = span // block_size
    for block in range(factors.shape[1]):
        own = scales[:, block * each : (block + 1) * each]
        largest = np.where(np.isnan(own), 0.0, np.abs(own)).max(1, initial=0.0)
        fits = 6 * largest[:, None] <= 448 * POWERS
        power = np.where(largest == 0, 1.0, POWERS[fits.argmax(1)])
        within = slice(block * span, (block + 1) * span)
        value = elements[:, within] * (own / power[:, None]).repeat(block_size, 1)
        encoded[:, within] = spec.scale_value(spec.e4m3(value), "e4m3")
        factors[:, block] = power
    return Weight(encoded, factors)


def token_weight(codes: torch.Tensor, scale: torch.Tensor, layout: str, block_size: int) -> Weight:
    """Re-encode codes (N, K/2) with scales in this layout as an FP8 weight with one power of two per row, (N, 1).

    The exponent is computed as in ``fp4_weight``, for all elements of a row together.
    """
    return fp4_weight(codes, scale, layout, block_size, span=2 * codes.shape[1])


def prepared_weight(codes: torch.Tensor, prepared: torch.Tensor, block_size: int) -> Weight:
    """Re-encode codes (N, K/2) with prepared scales (1 + ⌈K/256⌉, N, 256/B) as an FP8 weight."""
    packed = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    slabs = prepared.detach().cpu().contiguous().numpy()
    n, blocks = len(packed), 2 * packed.shape[1] // block_size
    first, index = slabs[0], slabs[1:].transpose(1, 0, 2).reshape(n, (len(slabs) - 1) * slabs.shape[2])
    assert not first[:, 4:].any() and not index[:, blocks:].any()
    index = index[:, :blocks].astype(np.int64)
    nvfp4 = (8 + (index - 1) % 8) / 8 * 2.0 ** ((index - 1) // 8 - 13.0)
    s = nvfp4 if block_size == 16 else 2.0 ** (index - 14.0)
    s = np.where(index == 0, 0.0, np.where(index == 255, np.nan, s))
    value = spec.e2m1_value(spec.unpack(packed)).astype(np.float64) * s.repeat(block_size, 1)
    return Weight(spec.scale_value(spec.e4m3(value), "e4m3"), np.ascontiguousarray(first[:, :4]).view("<f4"))


def weight_of_tokens(codes: torch.Tensor, scale: torch.Tensor, layout: str, block_size: int) -> Weight:
    """Re-encode codes (N, K/2) as an FP8 weight with one power of two per row. Scales with three dimensions are
    prepared scales."""
    if scale.dtype == torch.uint8 and scale.dim() == 3:
        return prepared_weight(codes, scale, block_size)
    return token_weight(codes, scale, layout, block_size)


def has_tokens(given) -> bool:
    """Return True if the call uses per-token scales. For K up to 128, one scale per row counts as a block scale, unless
    the scales of the weight are prepared. The activations must not be interleaved."""
    b, a_scale, is_prepared = given["b"], given["a_scale"], given["b_scale"].dim() == given["b"].dim() + 1
    return a_scale.dim() == 1 or is_prepared or (a_scale.shape[-1] == 1 and b.shape[-2] > 64)


def is_interleaved(given) -> bool:
    """Return True if k of the activations is interleaved."""
    return given["a"].dim() == (4 if "offsets" in given and given["offsets"] is None else 3)


def in_order(given):
    """Return the call with activations in the order of k."""
    if not is_interleaved(given):
        return given
    a, k = given["a"], 2 * given["b"].shape[-2]
    codes = a.view(torch.uint8)[..., INTERLEAVED.to(a.device)].flatten(-2)
    return given | {"a": codes[..., :k].contiguous().view(a.dtype)}


def token_gemm(
    a: torch.Tensor,
    weight: Weight,
    a_scale: torch.Tensor,
    alpha: np.ndarray | None,
    bias: np.ndarray | None,
    fast_accum: bool,
    device: str,
) -> Bounded:
    """Compute ``alpha · a_scale · a @ weight.T + bias`` for ``a`` (rows, K) with scales (rows, 1) or (1,), with the
    error bound."""
    left, right, rows = numbers(a), weight.numbers, a_scale.detach().cpu().double().numpy()
    with np.errstate(all="ignore"):
        total, bound, size = sum_of_tokens(left, right, None if fast_accum else PROMOTED // BLOCK, device)
        factor = rows * weight.factors[:, 0]
        bound = (bound + size * (left.shape[1] / BLOCK + 9) * 2 * EPS) * np.abs(factor)
        total = total * factor
        bound = moved(total, bound, alpha, bias)
        total = total * (1 if alpha is None else alpha) + (0 if bias is None else bias)
    return Bounded(total, bound)
