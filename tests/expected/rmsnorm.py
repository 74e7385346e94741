"""``rmsnorm``: results may differ from the exact normalised rows by half an ulp of the dtype plus the error of an fp32
computation."""

import torch

from expected import Tensors, rmsnorm_fp4quant, rmsnorm_fp4quant_with_norm

_ARGUMENTS = (
    "Tensor input, Tensor weight, float eps=1e-6, "
    "bool weight_plus_one=False, Tensor? bias=None, bool subtract_mean=False"
)
SCHEMA = f"cute::rmsnorm({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::rmsnorm.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def results(given) -> Tensors:
    """Return the expected normalised rows in float64."""
    return (torch.from_numpy(rmsnorm_fp4quant.exact_norm(given)).reshape(given["input"].shape),)


def assert_results(actual, expected, given) -> None:
    assert actual[0].dtype == given.get("dtype", given["input"].dtype)
    rmsnorm_fp4quant_with_norm.assert_norm_close(actual[0].to(expected[0].device), expected[0], given)
