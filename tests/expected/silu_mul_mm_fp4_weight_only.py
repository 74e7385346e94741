"""``silu_mul_mm_fp4_weight_only``: results are checked as in ``mm_fp4_weight_only``, with the results of the gate as
activations. If the error of the gate decides how an element is rounded, both ways are accepted."""

import numpy as np
import torch

from expected import Tensors, _fp4_gemm, gated, rows_of
from torch_cute_ops.testing import GATE_ERROR

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor b_scale, Tensor? alpha=None, Tensor? bias=None, ScalarType? out_dtype=None, "
    "int block_size=16, str? scale_format=None, str? scale_layout=None, str backend='auto', "
    "bool static_weight=False, Tensor? prefetch=None, str gate='silu'"
)
SCHEMA = f"cute::silu_mul_mm_fp4_weight_only({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::silu_mul_mm_fp4_weight_only.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def activations(given, error: float = 0.0) -> torch.Tensor:
    """Return the gated rows (M, K) in the dtype of ``a``, with magnitudes increased by the relative ``error``."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gated(rows_of(given["a"]), given) * np.float64(1 + error)).to(given["a"].dtype)


def results(given) -> Tensors:
    return _fp4_gemm.results({**given, "a": activations(given)})


def assert_results(actual, expected, given) -> None:
    errors = -GATE_ERROR, GATE_ERROR
    low, high = (_fp4_gemm.sixteen_bit(activations(given, error), given["block_size"]) for error in errors)
    with np.errstate(all="ignore"):
        # If exp(-gate) is close to overflow in fp32, the sigmoid may be 2^-128 or 0.
        gate, up = np.split(np.abs(rows_of(given["a"]).astype(np.float64)), 2, -1)
        spread = np.abs(high - low) + gate * up * 2.0**-127
    _fp4_gemm.assert_results(actual, expected, {**given, "a": activations(given)}, spread)
