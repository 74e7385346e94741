"""``all_reduce_add_rmsnorm_fp8quant``: outputs are checked as in ``add_rmsnorm_fp8quant``, with a group of one rank."""

from expected import after_addition, rmsnorm_fp8quant

_ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, str group, Tensor? scale=None, float eps=1e-6, "
    "str granularity='token', str? scale_layout=None, bool interleaved=False, bool weight_plus_one=False, "
    "str? scale_format=None"
)
SCHEMA = f"cute::all_reduce_add_rmsnorm_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::all_reduce_add_rmsnorm_fp8quant.out({_ARGUMENTS}, *, Tensor(b!) y, Tensor(c!) scale_out) -> ()"

results, assert_results = after_addition(rmsnorm_fp8quant)
