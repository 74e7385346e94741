"""``add_rmsnorm_fp8quant``: the residual must be exact; codes and scales are checked as in ``rmsnorm_fp8quant``."""

from expected import after_addition, rmsnorm_fp8quant

_ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, Tensor? scale=None, float eps=1e-6, str granularity='token', "
    "str? scale_layout=None, bool interleaved=False, bool weight_plus_one=False, "
    "Tensor? bias=None, bool subtract_mean=False, str? scale_format=None"
)
SCHEMA = f"cute::add_rmsnorm_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::add_rmsnorm_fp8quant.out({_ARGUMENTS}, *, Tensor(b!) y, Tensor(c!) scale_out) -> ()"

results, assert_results = after_addition(rmsnorm_fp8quant)
