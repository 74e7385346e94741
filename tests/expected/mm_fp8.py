"""``mm_fp8``: results may differ from float64 sums by the error bound of tensor cores."""

import torch

from expected import mm_fp8_block
from expected._epilogue import of_rows
from expected._fp8_gemm import assert_close, token_gemm

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias=None, ScalarType? out_dtype=None, "
    "str backend='auto', bool static_weight=False, Tensor? prefetch=None, bool fast_accum=False"
)
SCHEMA = f"cute::mm_fp8({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::mm_fp8.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def results(given):
    """Return the sums and their error bounds, as tensors in the shape of the result."""
    scales, device = (given["a_scale"], given["b_scale"]), given["a"].device.type
    bias = of_rows(given["bias"])
    return (token_gemm(given["a"], given["b"].t(), *scales, bias, given["fast_accum"], device),)


def assert_results(actual, expected, given):
    (got,), (want,) = actual, expected
    assert_close(got, want, given["out_dtype"] or torch.bfloat16)


def rows_alone(given, outputs):
    """Yield calls in which all rows of ``a`` but one are NaN, and calls with one row alone, each with the expected
    result of this row. See ``mm_fp8_block``."""
    if given["a_scale"].dim() == 2:
        yield from mm_fp8_block.rows_alone(given, outputs)
        return
    for call, want in mm_fp8_block.rows_alone(given, outputs):
        yield call | {"a_scale": given["a_scale"]}, want
