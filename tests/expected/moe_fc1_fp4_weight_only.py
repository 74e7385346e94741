"""``moe_fc1_fp4_weight_only``: results may differ from float64 results by the error bound of fp32 sums and of the
gate."""

from expected._moe_fc1 import assert_results, results, rows_alone

_ARGUMENTS = (
    "Tensor a, Tensor w, Tensor w_scale, Tensor routing, Tensor? alpha=None, Tensor? bias=None, int block_size=16, "
    "str? scale_format=None, str? scale_layout=None, float swiglu_alpha=1.0, float swiglu_beta=0.0, "
    "float? swiglu_limit=None, str backend='auto', bool static_weight=False, "
    "str gate='silu'"
)
SCHEMA = f"cute::moe_fc1_fp4_weight_only({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::moe_fc1_fp4_weight_only.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results", "rows_alone"]
