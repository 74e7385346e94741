"""``moe_fc2_fp4_weight_only``: results may differ from float64 sums by the error bound of fp32 arithmetic."""

from expected._moe_fc2 import assert_results, results

_ARGUMENTS = (
    "Tensor a, Tensor w, Tensor w_scale, Tensor alpha, Tensor? bias=None, ScalarType? out_dtype=None, "
    "int block_size=16, str? scale_format=None, str? scale_layout=None, str backend='auto', bool static_weight=False"
)
SCHEMA = f"cute::moe_fc2_fp4_weight_only({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::moe_fc2_fp4_weight_only.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results"]
