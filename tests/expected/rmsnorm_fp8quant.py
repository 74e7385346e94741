"""``rmsnorm_fp8quant``: codes and scales may differ from the specification only as far as the error of an fp32 sum, in
any order, allows."""

import numpy as np
import torch
from support import spec

from expected import Tensors, in_order, quantised_fp8, rmsnorm_fp4quant, scalar_of
from torch_cute_ops.formats import resolve_fp8_format
from torch_cute_ops.testing import assert_fp8_close

_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? scale=None, float eps=1e-6, str granularity='token', str? scale_layout=None, "
    "bool interleaved=False, bool weight_plus_one=False, Tensor? bias=None, bool subtract_mean=False, "
    "str? scale_format=None"
)
SCHEMA = f"cute::rmsnorm_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::rmsnorm_fp8quant.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale_out) -> ()"


def results(given) -> Tensors:
    with np.errstate(over="ignore"):
        norm = rmsnorm_fp4quant.exact_norm(given).astype(np.float32)
    return quantised_fp8(norm, given["input"].shape[:-1], given)


def assert_results(actual, expected, given) -> None:
    assert_close(actual, expected, given, boundary=lambda: torch.from_numpy(on_boundary(given)))


def assert_close(actual, expected, given, parts: int = 1, **allowances) -> None:
    """Check codes and scales. The input has ``parts`` elements for each code."""
    y, scale = (got.to(want.device) for got, want in zip(actual, expected, strict=True))
    if given.get("interleaved"):
        k = given["input"].shape[-1] // parts
        y, expected = in_order(y, k), (in_order(expected[0], k), expected[1])
    fmt, layout = resolve_fp8_format(given["granularity"], given["scale_layout"], given["scale_format"])
    if fmt.granularity == "block32":
        allowances["layout"] = layout
    assert_fp8_close((y, scale), expected, fmt, **allowances)


def on_boundary(given) -> np.ndarray:
    """Return a mask of elements (M, H) that are so close to a rounding boundary of e4m3 that a few fp32 ulps decide."""
    norm = rmsnorm_fp4quant.exact_norm(given)
    if given["granularity"] == "tensor":
        return spec.near_e4m3_boundary(norm / scalar_of(given["scale"]))
    with np.errstate(all="ignore"):
        blocks = spec.fp8_blocks(norm, given["granularity"])
        most = [np.abs(block).max(-1, keepdims=True) for block in blocks]
        if given["granularity"] == "block32" or given["scale_format"] == "ue8m0":
            powers = [spec.scale_value(spec.ue8m0_of_amax(each, 448), "ue8m0").astype(np.float64) for each in most]
        else:
            powers = [each / 448 for each in most]
        scaled = [block / power for block, power in zip(blocks, powers, strict=True)]
        return spec.near_e4m3_boundary(np.concatenate(scaled, 1))
