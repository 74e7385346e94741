"""``grouped_mm_fp8_fp4``: results may differ from float64 sums by the error bound of tensor cores, and must be zero in
rows of padding."""

from expected._fp4_gemm import layout_of
from expected._fp8_fp4 import fp4_weight
from expected._fp8_gemm import Weight
from expected.grouped_mm_fp8 import assert_results, grouped, rows_alone

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? offsets=None, Tensor? counts=None, "
    "Tensor? alpha=None, Tensor? bias=None, ScalarType? out_dtype=None, int block_size=16, str? scale_format=None, "
    "str? scale_layout=None, str backend='auto', bool static_weight=False"
)
SCHEMA = f"cute::grouped_mm_fp8_fp4({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::grouped_mm_fp8_fp4.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results", "rows_alone"]


def results(given):
    n = given["b"].shape[2]
    every = fp4_weight(given["b"].mT.flatten(0, 1), given["b_scale"], layout_of(given), given["block_size"])

    def weight_of(expert):
        rows = slice(expert * n, (expert + 1) * n)
        return Weight(every.numbers[rows], every.factors[rows])

    return (grouped(given, weight_of),)
