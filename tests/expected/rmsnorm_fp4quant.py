"""``rmsnorm_fp4quant``: codes and scales may differ from the specification only as far as the error of an fp32 sum, in
any order, allows."""

import numpy as np
from support import spec

from expected import Tensors, quantised, rows_of
from torch_cute_ops.formats import resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.testing import assert_fp4_close

ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? global_scale=None, float eps=1e-6, int block_size=16, "
    "str? scale_format=None, str scale_layout='128x4', bool weight_plus_one=False, "
    "Tensor? bias=None, bool subtract_mean=False"
)
SCHEMA = f"cute::rmsnorm_fp4quant({ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::rmsnorm_fp4quant.out({ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"


def exact_norm(given) -> np.ndarray:
    """Return the normalised rows of a call. Ops that sum over ranks have no bias and subtract no mean."""
    weight = rows_of(given["weight"])[0] if given["weight"].numel() else np.float32(1)
    if given["weight_plus_one"]:
        weight = np.float32(1) + weight
    bias = None if given.get("bias") is None else rows_of(given["bias"])[0]
    return spec.rms_norm(rows_of(given["input"]), weight, given["eps"], bias, given.get("subtract_mean", False))


def results(given) -> Tensors:
    with np.errstate(over="ignore"):
        return quantised(exact_norm(given).astype(np.float32), given["input"].shape[:-1], given)


def assert_results(actual, expected, given) -> None:
    fmt = resolve_fp4_format(given["block_size"], given["scale_format"])
    layout = resolve_scale_layout(given["scale_layout"])
    y, scale = (got.to(want.device) for got, want in zip(actual, expected, strict=True))
    assert_fp4_close((y, scale), expected, fmt, layout)
