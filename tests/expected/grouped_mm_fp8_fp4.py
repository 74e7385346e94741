"""``grouped_mm_fp8_fp4``: results may differ from float64 sums by the error bound of tensor cores, and must be zero in
rows of padding."""

import numpy as np

from expected._epilogue import of_rows
from expected._fp4_gemm import layout_of
from expected._fp8_fp4 import fp4_weight, has_tokens, in_order, prepared_weight, token_gemm, token_weight
from expected._fp8_gemm import Bounded, Weight
from expected.grouped_mm_fp8 import assert_results, of_blocks, ranges
from expected.grouped_mm_fp8 import rows_alone as rows_alone_in_order

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? offsets=None, Tensor? counts=None, "
    "Tensor? alpha=None, Tensor? bias=None, ScalarType? out_dtype=None, int block_size=16, str? scale_format=None, "
    "str? scale_layout=None, str backend='auto', bool static_weight=False, "
    "bool fast_accum=False"
)
SCHEMA = f"cute::grouped_mm_fp8_fp4({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::grouped_mm_fp8_fp4.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results", "rows_alone"]


def results(given):
    given = in_order(given)
    if has_tokens(given):
        return (of_tokens(given),)
    n = given["b"].shape[2]
    every = fp4_weight(given["b"].mT.flatten(0, 1), given["b_scale"], layout_of(given), given["block_size"])

    def weight_of(expert):
        rows = slice(expert * n, (expert + 1) * n)
        return Weight(every.numbers[rows], every.factors[rows])

    return (of_blocks(given, weight_of),)


def of_tokens(given):
    """Return the sums of all rows and their error bounds for a call with per-token scales."""
    (experts, _, n), device, block_size = given["b"].shape, given["a"].device.type, given["block_size"]
    a = given["a"].flatten(0, -2)
    a_scale = given["a_scale"].reshape(-1, 1).expand(len(a), 1)
    if given["b_scale"].dim() == 4:
        weights = [prepared_weight(given["b"][e].mT, given["b_scale"][e], block_size) for e in range(experts)]
    else:
        every = token_weight(given["b"].mT.flatten(0, 1), given["b_scale"], layout_of(given), block_size)
        rows = (slice(e * n, (e + 1) * n) for e in range(experts))
        weights = [Weight(every.numbers[own], every.factors[own]) for own in rows]
    total, bound = np.zeros((len(a), n)), np.zeros((len(a), n))
    for expert, (begin, end) in enumerate(ranges(given)):
        rows = slice(begin, end)
        epilogue = (of_rows(given[name], expert) for name in ("alpha", "bias"))
        one = token_gemm(a[rows], weights[expert], a_scale[rows], *epilogue, given["fast_accum"], device)
        total[rows], bound[rows] = one
    shape = (*given["a"].shape[:-1], n)
    return Bounded(total.reshape(shape), bound.reshape(shape))


def rows_alone(given, outputs):
    for call, want in rows_alone_in_order(in_order(given), outputs):
        yield call | {"a": given["a"]}, want
