"""``fp8_weight`` compared with exact arithmetic, and the rounding error that it adds to NVFP4."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support import spec

from torch_cute_ops import fp4_dequantize, fp4_quantize
from torch_cute_ops.formats import MXFP4, NVFP4, nvfp4_global_scale, resolve_scale_layout
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight

LINEAR = resolve_scale_layout("linear")
FORMATS = {"e4m3": NVFP4, "ue8m0": MXFP4}


def exponent(scales):
    """Return the least t with 6 · (largest |scale|) · 2^-t <= 448, or 0 if all scales are zero or NaN."""
    largest = max((Fraction(abs(float(s))) for s in scales if not np.isnan(s)), default=Fraction(0))
    if not largest:
        return 0
    t = -150
    while largest * 6 > 448 * Fraction(2) ** t:
        t += 1
    return t


def assert_reencoded(codes, scale_bytes, scale_format):
    """Compare ``fp8_weight`` with exact arithmetic, for codes (N, K) and scale bytes (N, K / block size)."""
    fmt = FORMATS[scale_format]
    packed = torch.from_numpy(codes[:, 0::2] | (codes[:, 1::2] << 4))
    given = torch.from_numpy(scale_bytes).view(fmt.scale_dtype)
    weight, powers = fp8_weight(packed, given, fmt, LINEAR)
    scales = spec.scale_value(scale_bytes, scale_format).astype(np.float64)
    each = 128 // fmt.block_size
    t = np.array([[exponent(row[i : i + each]) for i in range(0, len(row), each)] for row in scales])
    assert np.array_equal(powers.double().numpy(), np.ldexp(1.0, t))
    of_elements = np.repeat(t, 128, 1)[:, : codes.shape[1]]
    want = np.ldexp(spec.e2m1_value(codes).astype(np.float64) * np.repeat(scales, fmt.block_size, 1), -of_elements)
    got = weight.view(torch.uint8).numpy()
    isnan = np.isnan(want)
    assert np.array_equal((got & 0x7F) == 0x7F, isnan)
    exact = spec.e4m3(np.where(isnan, 0, want).astype(np.float32))
    assert np.array_equal(got[~isnan], exact[~isnan])


@pytest.mark.parametrize("k", [64, 128, 320])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_any_codes_and_scales(scale_format, k):
    """Check any scale bytes, including negative numbers, zero and NaN. The last block of K may be 64 elements long."""
    blocks = k // FORMATS[scale_format].block_size
    codes = torch.randint(0, 16, (64, k), dtype=torch.uint8).numpy()
    scales = torch.randint(0, 256, (64, blocks), dtype=torch.uint8).numpy()
    scales[1::4] = 0x7F if scale_format == "e4m3" else 0xFF  # rows in which all scales are NaN
    scales[2::4] = 0x80 if scale_format == "e4m3" else 0  # rows in which all scales are zero, or the smallest number
    assert_reencoded(codes, scales, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_every_scale_with_every_code(scale_format):
    """Check every code with every scale byte. Each byte is the scale of one row."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 4))
    blocks = 64 // FORMATS[scale_format].block_size
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], blocks, 1)
    assert_reencoded(codes, scales, scale_format)


def test_rounding_error_of_nvfp4():
    """Check the rms error for Gaussian weights: 9.69 % after re-encoding, 9.51 % for NVFP4 alone."""
    weight = torch.randn(1024, 2048)
    # Use a fixed amax instead of the weight's own, because the error depends on where scales lie between powers of two
    # (9.68 to 9.75 %).
    factor = nvfp4_global_scale(torch.tensor(5.0))
    codes, scale = fp4_quantize(weight, factor, scale_layout="linear")
    decoded = fp4_dequantize(codes, scale, factor, scale_layout="linear", out_dtype=torch.float32).double()
    w8, powers = fp8_weight(codes, scale, NVFP4, LINEAR)
    reencoded = w8.double() * powers.double().repeat_interleave(128, 1) / factor.double()
    lost = [((one - weight).square().mean() / weight.double().square().mean()).sqrt() for one in (decoded, reencoded)]
    assert [one.item() for one in lost] == pytest.approx([0.0951, 0.0969], abs=4e-4)
    off = (reencoded - decoded).abs()
    # Below e4m3's normal range, numbers are equally spaced.
    least = powers.double().repeat_interleave(128, 1) / factor.double() * 2.0**-10
    assert (off <= torch.maximum(decoded.abs() * 0.0477, least) * (1 + 1e-6)).all()
