"""``mm_fp4``: results may differ from float64 sums by the error bound of fp32 accumulation."""

from expected._fp4_gemm import assert_results, results

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, int block_size=16, str? scale_format=None, str? scale_layout=None, "
    "str backend='auto', bool static_weight=False, Tensor? prefetch=None, Tensor? row_scale=None"
)
SCHEMA = f"cute::mm_fp4({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::mm_fp4.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results"]
