"""Re-encoding of an FP4 weight in FP8, in NumPy, written from the text of docs/numerics.md."""

import numpy as np
import torch
from support import spec

from expected._fp8_gemm import BLOCK, Weight

POWERS = 2.0 ** np.arange(-140, 140)


def fp4_weight(codes: torch.Tensor, scale: torch.Tensor, layout: str, block_size: int) -> Weight:
    """Re-encode codes (N, K/2) with scales in this layout as an FP8 weight.

    In each row and block of 128 elements, the result is ``e4m3(e2m1 · scale / 2^t)`` with the scale 2^t. The exponent t
    is the least integer for which 6 times the largest scale magnitude, NaN ignored, is at most 448 · 2^t; it is 0 if
    all scales are zero.
    """
    packed = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    rows, k = len(packed), packed.shape[1] * 2
    stored = scale.detach().cpu().contiguous().view(torch.uint8).numpy()
    bytes_ = spec.collect(stored, layout, rows, k // block_size)
    scales = spec.scale_value(bytes_, {16: "e4m3", 32: "ue8m0"}[block_size]).astype(np.float64)
    elements = spec.e2m1_value(spec.unpack(packed)).astype(np.float64)
    encoded, factors = np.empty((rows, k)), np.empty((rows, -(-k // BLOCK)))
    each = BLOCK // block_size
    for block in range(factors.shape[1]):
        own = scales[:, block * each : (block + 1) * each]
        largest = np.where(np.isnan(own), 0.0, np.abs(own)).max(1, initial=0.0)
        fits = 6 * largest[:, None] <= 448 * POWERS
        power = np.where(largest == 0, 1.0, POWERS[fits.argmax(1)])
        within = slice(block * BLOCK, (block + 1) * BLOCK)
        value = elements[:, within] * (own / power[:, None]).repeat(block_size, 1)
        encoded[:, within] = spec.scale_value(spec.e4m3(value), "e4m3")
        factors[:, block] = power
    return Weight(encoded, factors)
