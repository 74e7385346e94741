"""``fp4_quantize_four_over_six``: choice of the scale, and errors on random data."""

import numpy as np
import pytest
import torch
from expected import assert_same
from expected import fp4_quantize_four_over_six as expected
from support import spec
from support.edge_values import every_finite, fp32_edges, neighbours

import torch_cute_ops


def check(rows: torch.Tensor, global_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows, compare with the specification bitwise, and return codes and linear scales."""
    given = {"input": rows, "global_scale": global_scale, "scale_layout": "linear"}
    got = torch_cute_ops.fp4_quantize_four_over_six(**given)
    assert_same(got, expected.results(given))
    return got


def mean_squared_error(numbers: np.ndarray, codes: np.ndarray, scale: np.ndarray, g: float) -> float:
    """Decode in float64, and return the mean squared error."""
    factors = spec.scale_value(scale, "e4m3").astype(np.float64).repeat(16, 1)
    return float(np.square(spec.e2m1_value(codes) * factors / g - numbers.astype(np.float64)).mean())


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32 edges"])
def test_every_scale(source, device):
    """Check blocks whose amax is each finite 16-bit value, or each fp32 edge value."""
    values = fp32_edges() if source == "float32 edges" else every_finite(getattr(torch, source))
    fractions = torch.linspace(-1, 1, 16)
    fractions[0] = 1.0
    check((values.float()[:, None] * fractions).to(values.dtype).to(device))


@pytest.mark.parametrize("global_scale", [2.0**-60, 0.7, 1.0, 333.3, 2.0**60])
def test_scales_around_every_boundary(global_scale, device):
    """Check random blocks with values of amax whose scales lie around every e4m3 number and every rounding boundary."""
    points = np.concatenate([spec.E4M3_POSITIVE, (spec.E4M3_POSITIVE[1:] + spec.E4M3_POSITIVE[:-1]) / 2])
    amax = neighbours(points * 6 / global_scale, ulps=4)
    rows = amax[:, None] * torch.rand(len(amax), 16)
    rows[torch.arange(len(amax)), torch.randint(0, 16, (len(amax),))] = amax
    _, scale = check(rows.to(device), torch.full((1,), global_scale, device=device))
    assert len(scale.view(torch.uint8).unique()) == 0x7F


def test_equal_errors_take_the_smaller_scale(device):
    """Check that blocks which both scales represent equally well get the scale of ``fp4_quantize``."""
    rows = torch.zeros(3, 16, device=device)
    rows[0] = 24.0  # 6 · 4, and 4 · 6
    rows[1, 0] = 1e9  # both scales saturate
    y, scale = check(rows)
    plain = torch_cute_ops.fp4_quantize(rows, scale_layout="linear")
    assert torch.equal(y, plain[0]) and torch.equal(scale.float(), plain[1].float())
    assert scale.float().tolist() == [[4.0], [448.0], [0.0]]


def test_the_larger_scale_saves_a_tiny_block(device):
    """Check a block whose scale for 6 rounds to zero and whose scale for 4 does not."""
    rows = torch.full((1, 16), 6 * 2.0**-10, device=device)
    assert not torch_cute_ops.fp4_quantize(rows)[0].any()
    y, scale = check(rows)
    assert scale.item() == 2.0**-9 and y.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_anywhere_in_a_block(bad, device):
    """Check that only a block with NaN or infinity gets the NaN scale and zero codes."""
    rows = torch.randn(48, 48, device=device)
    clean, _ = check(rows)
    rows[torch.arange(48), torch.arange(48)] = bad
    y, scale = check(rows)
    hit = torch.eye(3, dtype=torch.bool, device=device).repeat_interleave(16, 0)
    assert (scale.view(torch.uint8)[hit] == 0x7F).all() and (y.view(48, 3, -1)[hit] == 0).all()
    assert torch.equal(y.view(48, 3, -1)[~hit], clean.view(48, 3, -1)[~hit])


@pytest.mark.parametrize(
    ("kind", "most"), [("normal", 0.84), ("student", 0.93), ("uniform", 0.74)], ids=["normal", "student", "uniform"]
)
def test_error_on_random_data(kind, most, device):
    """Check that the mean squared error is at most ``most`` times the error of ``fp4_quantize``, as docs/numerics.md
    says. The test computes both errors in NumPy from the specification, and the op gives the same codes and scales."""
    generator = np.random.default_rng(0)
    draw = {
        "normal": generator.standard_normal,
        "student": lambda size: generator.standard_t(3, size),
        "uniform": lambda size: generator.uniform(-1, 1, size),
    }
    numbers = draw[kind]((256, 2048)).astype(np.float32)
    amax = np.abs(numbers).max()
    plain_g, g = np.float32(2688) / amax, np.float32(1536) / amax
    plain, better = spec.quantise(numbers, 16, plain_g), spec.quantise_four_over_six(numbers, g)
    errors = [
        mean_squared_error(numbers, found.codes, found.scales, float(factor))
        for found, factor in ((plain, plain_g), (better, g))
    ]
    assert errors[1] < most * errors[0]
    rows = torch.from_numpy(numbers).to(device)
    scale = torch_cute_ops.nvfp4_global_scale(rows.abs().amax(), four_over_six=True)
    assert scale.item() == g
    check(rows, scale)
