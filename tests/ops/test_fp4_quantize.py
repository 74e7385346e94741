"""``fp4_quantize`` for every element and every scale that 16-bit inputs can have, and for edge values of fp32
inputs."""

import numpy as np
import pytest
import torch
from expected import assert_same
from expected import fp4_quantize as expected
from support import spec
from support.edge_values import every_finite, fp32_edges, neighbours

import torch_cute_ops


def in_blocks(values: torch.Tensor, first: float) -> torch.Tensor:
    """Arrange values in blocks of 16 (as rows) whose first element is ``first``; pad the last block with zeros."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % 15)).view(-1, 15)
    return torch.nn.functional.pad(padded, (1, 0), value=first)


def given_for(rows: torch.Tensor, **kwargs) -> dict:
    return {
        "input": rows,
        "global_scale": None,
        "block_size": 16,
        "scale_format": None,
        "scale_layout": "linear",
        **kwargs,
    }


def check(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    got = torch_cute_ops.fp4_quantize(**given)
    assert_same(got, expected.results(given))
    return got


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32 edges"])
def test_every_element(source, device):
    """Check that each value becomes its e2m1 code if the block scale cancels the global scale. The global scale is 448,
    and so is each block scale, because each block's amax is at least 6."""
    values = fp32_edges() if source == "float32 edges" else every_finite(getattr(torch, source))
    rows = in_blocks(values, 6.0).to(device)
    y, scale = check(given_for(rows, global_scale=torch.full((1,), 448.0, device=device)))
    assert (scale.float() == 448).all()
    codes = spec.unpack(y.cpu().numpy())
    assert np.array_equal(codes, spec.e2m1(rows.cpu().double().numpy()))


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32 edges"])
def test_every_scale(source, block_size, device):
    """Check the scale of blocks whose amax is each finite 16-bit value, or each fp32 edge value."""
    values = fp32_edges() if source == "float32 edges" else every_finite(getattr(torch, source))
    fractions = torch.linspace(-1, 1, block_size)
    fractions[0] = 1.0
    rows = (values.float()[:, None] * fractions).to(values.dtype)
    check(given_for(rows.to(device), block_size=block_size))


@pytest.mark.parametrize("global_scale", [2.0**-60, 2.0**-3, 0.7, 1.0, 333.3, 2688.0, 2.0**60])
def test_scales_around_every_boundary(global_scale, device):
    """Check block scales for values of amax whose scales lie around every e4m3 number and every rounding boundary."""
    points = np.concatenate([spec.E4M3_POSITIVE, (spec.E4M3_POSITIVE[1:] + spec.E4M3_POSITIVE[:-1]) / 2])
    amax = neighbours(points * 6 / global_scale, ulps=4)
    rows = amax[:, None] * torch.rand(len(amax), 16)
    rows[torch.arange(len(amax)), torch.randint(0, 16, (len(amax),))] = amax
    g = torch.full((1,), global_scale, device=device)
    _, scale = check(given_for(rows.to(device), global_scale=g))
    assert len(scale.view(torch.uint8).unique()) == 0x7F


def test_mxfp4_scales_around_every_boundary(device):
    """Check block scales for values of amax around 6 · 2^e and around powers of two, including subnormal numbers."""
    points = np.concatenate([1.5 * 2.0 ** np.arange(-149, 128), 2.0 ** np.arange(-149, 127)])
    amax = neighbours(points, ulps=3)
    rows = amax[:, None] * torch.rand(len(amax), 32)
    rows[:, 7] = amax
    _, scale = check(given_for(rows.to(device), block_size=32))
    assert set(scale.unique().tolist()) == set(range(254))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32])
def test_not_finite_anywhere_in_a_block(bad, dtype, block_size, device):
    """Put one NaN or infinity at each place of a block, and check that only this block gets the NaN scale and zero
    codes."""
    width = 3 * block_size
    rows = torch.randn(width, width).to(dtype)
    clean = torch_cute_ops.fp4_quantize(rows.to(device), block_size=block_size)
    rows[torch.arange(width), torch.arange(width)] = bad
    y, scale = check(given_for(rows.to(device), block_size=block_size))
    hit = torch.eye(3, dtype=torch.bool, device=device).repeat_interleave(block_size, 0)
    nan = {16: 0x7F, 32: 0xFF}[block_size]
    assert (scale.view(torch.uint8)[hit] == nan).all()
    assert (y.view(width, 3, -1)[hit] == 0).all()
    assert torch.equal(y.view(width, 3, -1)[~hit], clean[0].view(width, 3, -1)[~hit])
