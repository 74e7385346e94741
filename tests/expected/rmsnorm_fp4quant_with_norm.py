"""``rmsnorm_fp4quant_with_norm``: codes and scales are checked as in ``rmsnorm_fp4quant``; the normalised rows must be
within half an ulp plus the error of an fp32 computation."""

from types import MappingProxyType
from typing import Any

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
    assert actual[2].dtype == given.get("dtype", given["input"].dtype)
    assert_norm_close(actual[2].to(expected[2].device), expected[2], given)


def assert_norm_close(actual: torch.Tensor, exact: torch.Tensor, given: Any = MappingProxyType({})) -> None:
    """Check that the normalised rows are within half an ulp of the dtype plus a few fp32 ulps for the sum, the root and
    two products. This includes subnormal numbers. If a mean is subtracted or a bias is added, allow some ulps of the
    row's largest term, because terms may cancel."""
    info = torch.finfo(actual.dtype)
    rounded = exact.float().to(actual.dtype)
    assert actual.shape == exact.shape
    assert torch.equal(actual.isnan(), rounded.isnan())
    assert torch.equal(actual.isinf(), rounded.isinf())
    finite = rounded.isfinite()
    bound = exact.abs() * (info.eps / 2 + 2.0**-20) + 3 * info.smallest_normal * info.eps
    bias = given.get("bias")
    if given.get("subtract_mean") or bias is not None:
        largest = exact.abs().amax(-1, keepdim=True) if exact.numel() else 0.0
        bound = bound + 2.0**-18 * (largest + (0.0 if bias is None else float(bias.abs().max())))
    excess = ((actual.double() - exact).abs() - bound)[finite]
    assert (excess <= 0).all(), (
        f"{int((excess > 0).sum())} elements of the norm are off, by up to {float(excess.max())}"
    )
