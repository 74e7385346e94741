"""``rmsnorm_fp4quant_with_norm``: codes and scales are checked as in ``rmsnorm_fp4quant``; the normalised rows must be
within half an ulp plus the error of an fp32 computation."""

import torch

from expected import Tensors, rmsnorm_fp4quant

_RETURNS = "Tensor y, Tensor scale, Tensor norm"
_OUTPUTS = "Tensor(a!) y, Tensor(b!) scale, Tensor(c!) norm"
SCHEMA = f"cute::rmsnorm_fp4quant_with_norm({rmsnorm_fp4quant.ARGUMENTS}) -> ({_RETURNS})"
OUT_SCHEMA = f"cute::rmsnorm_fp4quant_with_norm.out({rmsnorm_fp4quant.ARGUMENTS}, *, {_OUTPUTS}) -> ()"


def results(given) -> Tensors:
    """Return the expected outputs, with the normalised rows in float64."""
    norm = torch.from_numpy(rmsnorm_fp4quant.exact_norm(given)).reshape(given["input"].shape)
    return *rmsnorm_fp4quant.results(given), norm


def assert_results(actual, expected, given) -> None:
    rmsnorm_fp4quant.assert_results(actual[:2], expected[:2], given)
    assert actual[2].dtype == given["input"].dtype
    assert_norm_close(actual[2].to(expected[2].device), expected[2])


def assert_norm_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that the normalised rows are within half an ulp of the dtype plus a few fp32 ulps for the sum, the root and
    two products. This includes subnormal numbers."""
    info = torch.finfo(actual.dtype)
    rounded = exact.float().to(actual.dtype)
    assert actual.shape == exact.shape
    assert torch.equal(actual.isnan(), rounded.isnan())
    assert torch.equal(actual.isinf(), rounded.isinf())
    finite = rounded.isfinite()
    bound = exact.abs() * (info.eps / 2 + 2.0**-20) + 3 * info.smallest_normal * info.eps
    excess = ((actual.double() - exact).abs() - bound)[finite]
    assert (excess <= 0).all(), (
        f"{int((excess > 0).sum())} elements of the norm are off, by up to {float(excess.max())}"
    )
