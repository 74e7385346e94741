"""Compare the device code of FP4 conversions with the definitions of the formats. Here the source of the device code
runs on NumPy arrays.

``test_fp4_quantize.py`` runs the same conversions on a GPU, through the op, with the same values.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from support import spec
from support.edge_values import every_finite, fp32_edges, neighbours
from support.ptx_model import Ptx, float32, on_arrays

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels import fp4_dequant
from torch_cute_ops.kernels.common.core import ue8m0
from torch_cute_ops.kernels.common.fp4 import codes as fp4
from torch_cute_ops.kernels.fp4_dequant import kernel as dequant_kernel


@pytest.fixture(params=[-1, 0, 1], ids=lambda error: f"rcp{error:+d}ulp")
def device_code(request, monkeypatch):
    """Return the module with the conversions. Its PTX instructions are replaced by models that compute on NumPy
    arrays."""
    on_arrays(monkeypatch, fp4, Ptx(request.param))
    return fp4


@pytest.fixture
def encode(monkeypatch):
    """Return a function that encodes values as ``encode_e2m1x8`` does on GPUs without a conversion to e2m1."""
    on_arrays(monkeypatch, fp4, Ptx())

    def encode(values: np.ndarray) -> np.ndarray:
        padded = np.pad(values, (0, -len(values) % 8)).astype(np.float32).reshape(-1, 8)
        word = fp4.encode_e2m1x8([padded[:, i] for i in range(8)], False)
        assert word.dtype == np.uint32
        nibbles = np.stack([word >> np.uint32(4 * i) & np.uint32(15) for i in range(8)], -1)
        return nibbles.reshape(-1)[: len(values)].astype(np.uint8)

    return encode


def assert_encodes(encode, values: np.ndarray) -> None:
    got, want = encode(values), spec.e2m1(values)
    wrong = got != want
    assert not wrong.any(), (
        f"{wrong.sum()} of {len(values)}: {list(zip(values[wrong], got[wrong], want[wrong], strict=True))[:5]}"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(encode, dtype):
    values = every_finite(dtype).float().numpy()
    assert len(values) > 60_000
    assert_encodes(encode, values)


def test_fp32_neighbours(encode):
    """Check the codes of numbers within 2 ulp of e2m1's numbers and rounding boundaries, of powers of two, of zero, and
    of the largest number."""
    values = fp32_edges().numpy()
    boundaries = np.array(spec.E2M1_BOUNDARIES, np.float32)
    for shifted in (boundaries, np.nextafter(boundaries, np.float32(9)), np.nextafter(boundaries, np.float32(0))):
        assert np.isin(shifted, values).all() and np.isin(-shifted, values).all()
    assert_encodes(encode, values)


def test_fp32_far_around_each_boundary(encode):
    """Check the codes of numbers within 5,000 ulp of each rounding boundary, and of each point at which the encoder's
    steps change."""
    for centre in (*spec.E2M1_BOUNDARIES, 0.5, 1.0, 2.0, 4.0, 6.0, 6.5, 7.0, 8.0, 10.0 / 7, 1 / 0.7 / 4):
        assert_encodes(encode, neighbours(np.array([centre]), ulps=5000).numpy())


def test_random_fp32(encode):
    """Check the codes of random finite bit patterns, and of many numbers in e2m1's range."""
    bits = torch.randint(0, 2**32, (1 << 20,), dtype=torch.int64).to(torch.uint32).view(torch.float32).numpy()
    assert_encodes(encode, bits[np.isfinite(bits)])
    assert_encodes(encode, (torch.rand(1 << 20) * 16 - 8).numpy())


def test_places(encode):
    """Check that each of the eight elements is encoded in its nibble."""
    for place, code in itertools.product(range(8), range(16)):
        values = np.zeros(8)
        values[place] = spec.e2m1_value(np.array(code))
        want = np.zeros(8, np.uint8)
        want[place] = code
        assert (encode(values) == want).all()


# Scales


def test_nvfp4_scale(device_code):
    """Check the scale byte and the encode factor for amaxes around every rounding boundary, and for infinity and
    NaN."""
    amax = np.abs(
        np.concatenate([neighbours(spec.E4M3_POSITIVE * 6, 4).numpy(), fp32_edges().numpy(), [np.inf, np.nan]])
    )
    amax = float32(
        np.concatenate([amax, neighbours((spec.E4M3_POSITIVE[1:] + spec.E4M3_POSITIVE[:-1]) * 3, 4).abs().numpy()])
    )
    byte, factor = device_code.nvfp4_scale(amax, None)
    want = spec.quantise(np.repeat(amax[:, None], 16, 1), 16).scales[:, 0]
    assert np.array_equal(byte, want)
    live = (want != 0) & (want != 0x7F)
    assert np.array_equal(device_code.is_live_nvfp4(byte), live)
    assert np.array_equal(factor[live], np.float32(1) / spec.scale_value(want[live], "e4m3"))


def test_nvfp4_factor_is_correctly_rounded(device_code):
    """Check that the encode factor is exactly ``g / scale``, rounded once, for every scale and many g, however the
    hardware rounds its reciprocal."""
    scales = spec.E4M3_POSITIVE[1:].astype(np.float32)
    g = (torch.rand(20_000) + 1).numpy() * np.exp2(torch.randint(-60, 60, (20_000,)).numpy()).astype(np.float32)
    g = np.concatenate([g, neighbours(np.exp2(np.arange(-60, 61.0)), 8).abs().numpy(), np.float32([2688, 448, 6])])
    for scale in scales:
        # Choose the amax that gives ``scale`` for each g: the encode factor depends only on g and the scale.
        with np.errstate(over="ignore"):
            amax = float32(scale * 6.0 / g.astype(np.float64))
        byte, factor = device_code.nvfp4_scale(amax, g)
        got = spec.scale_value(byte, "e4m3")
        assert (got == scale).all()
        assert np.array_equal(factor, g / got)


@pytest.mark.parametrize(("largest", "fraction"), [(6, 1.5), (448, 1.75)])
def test_ue8m0_scale(largest, fraction, monkeypatch):
    on_arrays(monkeypatch, ue8m0, Ptx())
    points = np.concatenate([fraction * 2.0 ** np.arange(-149, 128), 2.0 ** np.arange(-149, 128)])
    amax = float32(np.concatenate([neighbours(points, 3).abs().numpy(), fp32_edges().abs().numpy(), [np.inf, np.nan]]))
    byte, factor = ue8m0.ue8m0_scale(amax, float(largest))
    want = spec.ue8m0_of_amax(amax, largest)
    assert np.array_equal(byte, want)
    live = np.isfinite(amax) & (amax > 0)
    assert np.array_equal(ue8m0.is_live(amax), live)
    value = spec.scale_value(want, "ue8m0")
    assert np.array_equal(ue8m0.float_of_ue8m0(byte), value, equal_nan=True)
    assert np.array_equal(factor[live] * value[live], np.ones(live.sum(), np.float32))


# Decoding


@pytest.mark.parametrize(
    ("fmt", "global_scale"), [(NVFP4, None), (NVFP4, 0.7), (NVFP4, 2.0**-60), (NVFP4, 2.0**60), (MXFP4, None)]
)
def test_decode(fmt, global_scale, monkeypatch):
    """Check that the source of the dequantising kernel decodes every code with every scale byte."""
    on_arrays(monkeypatch, dequant_kernel, Ptx())
    config = fp4_dequant.plan(torch.float32, 64, fmt, SCALE_LAYOUTS["linear"], global_scale is not None)
    kernel = fp4_dequant.FP4DequantKernel(config)
    bytes_ = np.repeat(np.arange(256, dtype=np.uint32), 2)
    words = np.tile(np.array([0x76543210, 0xFEDCBA98], np.uint32), 256)
    divisor = None if global_scale is None else np.float32(global_scale)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.stack(kernel._decode([words], kernel._scale(bytes_), divisor), -1).reshape(256, 16)
    row = np.tile(np.arange(16, dtype=np.uint8), (256, fmt.block_size // 16))
    want = spec.dequantise(row, np.arange(256, dtype=np.uint8)[:, None], global_scale)[:, :16]
    np.testing.assert_array_equal(values, want)
    number = ~np.isnan(want)
    assert np.array_equal(np.signbit(values[number]), np.signbit(want[number]))


# The models of instructions


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_fma_is_exact():
    """Check the model of ``fma`` against exact rational numbers, for operands like the encoder's and for random
    operands."""
    generator = np.random.default_rng(torch.randint(0, 2**31, ()).item())
    v = generator.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    v = v[np.isfinite(v)]
    other = np.exp2(generator.uniform(-30, 30, len(v))).astype(np.float32)
    for a, b, c in ((v, np.full_like(v, fp4._TIE_SHIFT), v), (v, other, -v), (v, other, other), (-v, other, v * other)):
        keep = np.isfinite(a * b) & np.isfinite(c)
        for got, x, y, z in zip(Ptx.fma_rn(a, b, c)[keep], a[keep], b[keep], c[keep], strict=True):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
            if np.isfinite([below, got, above]).all():
                distance = abs(Fraction(float(got)) - exact)
                for neighbour in (below, above):
                    away = abs(Fraction(float(neighbour)) - exact)
                    assert distance < away or (distance == away and got.view(np.uint32) % 2 == 0)
