"""Compare FP8 quantisation with the specification bit for bit, for every element of 16-bit inputs, edge values of fp32
inputs, and scales.

The tests call ``silu_mul_fp8quant`` with 32 as the gate. silu(32) is exactly 32, so the op quantises 32 times the
second half.
"""

import numpy as np
import pytest
import torch
from expected import assert_same
from expected import silu_mul_fp8quant as expected
from support import spec
from support.edge_values import every_finite, fp32_edges, neighbours

import torch_cute_ops

GATE = 32.0
SOURCES = ("bfloat16", "float16", "float32 edges")


def values_of(source: str) -> torch.Tensor:
    """Return values that stay finite when multiplied by the gate, 32."""
    values = fp32_edges() if source == "float32 edges" else every_finite(getattr(torch, source))
    return values[(values.float() * GATE).isfinite()]


def quantise(
    rows: torch.Tensor,
    granularity: str,
    scale: torch.Tensor | None = None,
    layout: str | None = None,
    scale_format: str | None = None,
):
    """Quantise 32 times ``rows`` (M, K), compare with the specification bitwise, and return ``(y, scale)``."""
    given = {
        "input": torch.cat((torch.full_like(rows, GATE), rows), -1),
        "scale": scale,
        "granularity": granularity,
        "scale_layout": layout or ("linear" if granularity == "block32" else "row"),
        "scale_format": scale_format,
    }
    got = torch_cute_ops.silu_mul_fp8quant(**given)
    assert_same(got, expected.results(given))
    return got


def padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % width)).view(-1, width)


@pytest.mark.parametrize("source", SOURCES)
def test_every_element(source, device):
    """Check that each value becomes its e4m3 code. The static scale is 32, which cancels the gate's factor of 32."""
    rows = padded(values_of(source), 256).to(device)
    scale = torch.full((1,), GATE, device=device)
    y, stored = quantise(rows, "tensor", scale)
    assert np.array_equal(y.view(torch.uint8).cpu().numpy(), spec.e4m3(rows.cpu().double().numpy()))
    assert stored.item() == GATE and stored.data_ptr() != scale.data_ptr()


@pytest.mark.parametrize(("granularity", "layout"), [("token", "row"), ("block128", "row"), ("block128", "column")])
@pytest.mark.parametrize("source", SOURCES)
def test_every_scale(source, granularity, layout, device):
    """Check the scale of 128 elements for every value of ``source`` as their amax. For some values the scale is
    subnormal or zero."""
    values = values_of(source)
    fractions = torch.linspace(-1, 1, 128)
    rows = (values.float()[:, None] * fractions).to(values.dtype)
    _, scale = quantise(rows.to(device), granularity, layout=layout)
    assert (scale == 0).any() and scale.isfinite().all()


@pytest.mark.parametrize("granularity", ["block128", "block32"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_power_of_two(source, granularity, device):
    """Check the power-of-two scale of a block for every value of ``source`` as its amax."""
    values = values_of(source)
    fractions = torch.linspace(-1, 1, int(granularity.removeprefix("block")))
    rows = (values.float()[:, None] * fractions).to(values.dtype)
    _, scale = quantise(rows.to(device), granularity, scale_format="ue8m0")
    assert granularity == "block32" or (scale == torch.exp2(scale.double().log2().round())).all()


@pytest.mark.parametrize(("granularity", "block"), [("block128", 128), ("block32", 32)])
def test_powers_of_two_around_every_boundary(granularity, block, device):
    """Check scales for values of amax around 448 · 2^e, where the scale changes, and around powers of two, including
    subnormal numbers."""
    points = np.concatenate([1.75 * 2.0 ** np.arange(-149, 123), 2.0 ** np.arange(-149, 123)])
    amax = neighbours(points, ulps=3) / GATE
    rows = amax[:, None] * torch.rand(len(amax), block)
    rows[:, 7] = amax
    y, scale = quantise(rows.to(device), granularity, scale_format="ue8m0")
    assert len(scale.unique()) == 243
    assert y.float().isfinite().all()


@pytest.mark.parametrize(("granularity", "block"), [("block128", 128), ("block32", 32)])
def test_zero_and_not_finite_blocks_with_powers_of_two(granularity, block, device):
    """Check that a block of zeros gets scale 2^-127 and codes 0, and that a block with NaN or infinity gets a NaN scale
    and codes 0."""
    rows = torch.randn(4, 3 * block, device=device)
    rows[0, :block], rows[1, :block] = 0.0, -0.0
    rows[2, block + 5], rows[3, 2 * block] = torch.nan, -torch.inf
    y, scale = quantise(rows, granularity, scale_format="ue8m0")
    value = scale if granularity == "block128" else torch.from_numpy(spec.scale_value(scale.cpu().numpy(), "ue8m0"))
    assert (value[:2, 0] == 2.0**-127).all() and value.isnan().nonzero().tolist() == [[2, 1], [3, 2]]
    codes = y.view(torch.uint8).unflatten(-1, (3, block))
    assert not codes[:2, 0].any() and not codes[2, 1].any() and not codes[3, 2].any()
    assert (codes[0, 1:] != 0).any()


@pytest.mark.parametrize("power", [-126, -100, -60, 0, 60, 100])
def test_quotients_around_every_boundary(power, device):
    """Check that the division by the scale is rounded correctly. The values lie around each e4m3 number and each
    rounding boundary, multiplied by the scale."""
    points = np.concatenate([spec.E4M3_POSITIVE, (spec.E4M3_POSITIVE[1:] + spec.E4M3_POSITIVE[:-1]) / 2])
    scale = (torch.rand(1) + 1) * 2.0**power
    near = neighbours(points * scale.item() / GATE, ulps=3)
    quantise(padded(near, 128).to(device), "tensor", scale.to(device))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("granularity", "blocks"), [("token", 1), ("block128", 3)])
def test_not_finite_anywhere_in_a_block(bad, dtype, granularity, blocks, device):
    """Put one NaN or infinity into each row, at every position of a block in turn, and check that only this block gets
    a NaN scale and zero codes."""
    width = 128 * blocks
    rows = torch.randn(width, width).to(dtype)
    clean, _ = quantise(rows.to(device), granularity)
    rows[torch.arange(width), torch.arange(width)] = bad
    y, scale = quantise(rows.to(device), granularity)
    hit = torch.eye(blocks, dtype=torch.bool, device=device).repeat_interleave(128, 0)
    codes, clean = (t.view(torch.uint8).view(width, blocks, -1) for t in (y, clean))
    assert scale[hit].isnan().all() and scale[~hit].isfinite().all()
    assert (codes[hit] == 0).all()
    assert torch.equal(codes[~hit], clean[~hit])


def test_not_finite_under_a_given_scale(device):
    """Check that with a given scale infinities saturate, and NaN of either sign becomes 0x7F."""
    rows = torch.randn(3, 100, device=device)
    clean, _ = quantise(rows, "tensor", torch.ones(1, device=device))
    rows[1, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0], device=device)
    y, _ = quantise(rows, "tensor", torch.ones(1, device=device))
    codes, clean = y.view(torch.uint8), clean.view(torch.uint8).clone()
    clean[1, :5] = torch.tensor([0x7E, 0xFE, 0x7F, 0x7F, 0x80], device=device)
    assert torch.equal(codes, clean)


@pytest.mark.parametrize("granularity", ["token", "block128"])
def test_zeros(granularity, device):
    """Check that zeros next to other values keep their sign. A block of only zeros, or of values too small for a scale,
    gets codes 0 and scale 0."""
    rows = torch.zeros(4, 128, device=device)
    rows[0, 5] = -1.0
    rows[0, 6:], rows[1] = -0.0, -0.0
    rows[2, 3] = -(2.0**-149)
    rows[3, 3] = -(2.0**-140)
    y, scale = quantise(rows, granularity)
    codes = y.view(torch.uint8)
    assert set(codes[0, 6:].tolist()) == {0x80}
    assert (codes[1:3] == 0).all() and (scale[1:3] == 0).all()
    assert scale[3].item() == 2.0**-149 * round(2.0**14 / 448) and codes[3, 3] >= 0xFD


def test_interleaved_outputs(device):
    """Check that the shape of the output for the codes must match ``interleaved``."""
    rows = torch.randn(4, 512, device=device)
    scale = torch.empty(4, 1, device=device)
    ordinary, interleaved = (
        torch.empty(4, *each, dtype=torch.float8_e4m3fn, device=device) for each in ((512,), (2, 256))
    )
    for _ in range(2):  # the first call with these arguments compiles
        with pytest.raises(ValueError, match=r"got y with shape \(4, 512\); expected \(4, 2, 256\)"):
            torch_cute_ops.fp8_quantize(rows, interleaved=True, out=(ordinary, scale))
        with pytest.raises(ValueError, match=r"got y with shape \(4, 2, 256\); expected \(4, 512\)"):
            torch_cute_ops.fp8_quantize(rows, out=(interleaved, scale))
        torch_cute_ops.fp8_quantize(rows, interleaved=True, out=(interleaved, scale))
        torch_cute_ops.fp8_quantize(rows, out=(ordinary, scale))
    assert_same([interleaved], [torch_cute_ops.interleave_k(ordinary)])
