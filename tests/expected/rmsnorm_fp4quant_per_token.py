"""``rmsnorm_fp4quant_per_token``: codes and scales may differ from the specification only as far as the error of an
fp32 sum, in any order, allows."""

import numpy as np
import torch
from support import spec

from expected import Tensors, quantised_per_token, rmsnorm_fp4quant
from torch_cute_ops.formats import NVFP4, resolve_scale_layout
from torch_cute_ops.testing import assert_fp4_close

_ARGUMENTS = (
    "Tensor input, Tensor weight, float eps=1e-6, str scale_layout='128x4', "
    "bool weight_plus_one=False, Tensor? bias=None, bool subtract_mean=False"
)
_OUTPUTS = "Tensor(a!) y, Tensor(b!) scale, Tensor(c!) row_scale"
SCHEMA = f"cute::rmsnorm_fp4quant_per_token({_ARGUMENTS}) -> (Tensor y, Tensor scale, Tensor row_scale)"
OUT_SCHEMA = f"cute::rmsnorm_fp4quant_per_token.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"
NORM_ERROR = 1e-6
"""Allowed relative error of a row scale after RMSNorm."""


def results(given) -> Tensors:
    with np.errstate(over="ignore"):
        norm = rmsnorm_fp4quant.exact_norm(given).astype(np.float32)
    return quantised_per_token(norm, given["input"].shape[:-1], given)


def assert_results(actual, expected, given) -> None:
    assert_close(actual, expected, given, NORM_ERROR, boundary=lambda: on_boundary(given))


def assert_close(actual, expected, given, error: float, **allowances) -> None:
    """Check codes and scales. Row scales may differ by the relative error ``error``."""
    y, scale, row_scale = (got.to(want.device) for got, want in zip(actual, expected, strict=True))
    assert_fp4_close((y, scale), expected[:2], NVFP4, resolve_scale_layout(given["scale_layout"]), **allowances)
    torch.testing.assert_close(row_scale, expected[2], rtol=error, atol=0.0, equal_nan=True)


def on_boundary(given) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of block scales (M, H/16) and of elements (M, H) that are so close to a rounding boundary of e4m3
    and e2m1 that a few fp32 ulps decide.

    Dividing by the row's largest element cancels the norm's factor. The quotient is then a ratio of two products of an
    input and a weight. If inputs and weights use few bits, this ratio may lie exactly halfway between two numbers.
    """
    norm = rmsnorm_fp4quant.exact_norm(given)
    with np.errstate(all="ignore"):
        scaled = (norm * 2688 / np.abs(norm).max(-1, keepdims=True)).reshape(len(norm), -1, 16)
        ideal = np.abs(scaled).max(-1) / 6
        rounded = spec.scale_value(spec.e4m3(ideal), "e4m3").astype(np.float64)
        elements = spec.near_e2m1_boundary(scaled / rounded[..., None]).reshape(norm.shape)
    return torch.from_numpy(spec.near_e4m3_boundary(ideal)), torch.from_numpy(elements)
