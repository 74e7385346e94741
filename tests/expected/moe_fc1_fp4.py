"""``moe_fc1_fp4``: codes and scales may differ from the specification only as far as the error bound of the gate
allows."""

from expected._moe_fc1 import assert_results, results, rows_alone

_ARGUMENTS = (
    "Tensor a, Tensor w, Tensor a_scale, Tensor w_scale, Tensor routing, Tensor? alpha=None, Tensor? bias=None, "
    "Tensor? global_scale=None, int block_size=16, str? scale_format=None, str? scale_layout=None, "
    "float swiglu_alpha=1.0, float swiglu_beta=0.0, float? swiglu_limit=None, str backend='auto', "
    "bool static_weight=False, Tensor? row_scale=None, str gate='silu'"
)
SCHEMA = f"cute::moe_fc1_fp4({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::moe_fc1_fp4.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results", "rows_alone"]
