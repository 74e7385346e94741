"""``mm_fp8_block``: results may differ from float64 sums by the error bound of tensor cores."""

import numpy as np
import torch

from expected._epilogue import of_rows
from expected._fp8_gemm import assert_close, fp8_weight, gemm, mx_factors, mx_gemm

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, str backend='auto', bool static_weight=False, Tensor? prefetch=None"
)
SCHEMA = f"cute::mm_fp8_block({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::mm_fp8_block.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def results(given):
    """Return the sums and their error bounds, as tensors in the shape of the result."""
    device = given["a"].device.type
    epilogue = of_rows(given["alpha"]), of_rows(given["bias"])
    if given["b_scale"].dtype != torch.float32:
        a, b = given["a"], given["b"].t()
        scales = mx_factors(given["a_scale"], *a.shape), mx_factors(given["b_scale"], *b.shape)
        return (mx_gemm(a, b, *scales, *epilogue, device),)
    weight = fp8_weight(given["b"].t(), given["b_scale"])
    return (gemm(given["a"], weight, given["a_scale"], *epilogue, device),)


def assert_results(actual, expected, given):
    (got,), (want,) = actual, expected
    assert_close(got, want, given["out_dtype"] or torch.bfloat16)


def rows_alone(given, outputs):
    """Yield calls in which all rows but one are NaN, and the expected result of this row. On a CPU, where all numbers
    of rows use one tactic, also yield calls with the row alone."""
    m = len(given["a"])
    for row in sorted({0, m // 3, m - 1}) if m else ():
        other = torch.arange(m, device=given["a"].device) != row
        a = given["a"].clone(memory_format=torch.contiguous_format)
        a.view(torch.uint8).masked_fill_(other[:, None], 0x7F)
        want = outputs[0].masked_fill(other[:, None], torch.nan)
        yield given | {"a": a}, (want,)
        if a.device.type == "cpu":
            within = slice(row, row + 1)
            alone = {"a": given["a"][within], "a_scale": given["a_scale"][within]}
            if given["a_scale"].dtype != torch.float32:
                factors = mx_factors(given["a_scale"], *given["a"].shape)[within]
                exponents = np.where(np.isnan(factors), 128, np.log2(np.nan_to_num(factors, nan=1.0)))
                alone["a_scale"] = torch.from_numpy((exponents + 127).astype(np.uint8))
            yield given | alone, (outputs[0][within],)
