"""``add_rmsnorm_fp4quant_per_token``: the residual must be exact; codes and scales are checked as in
``rmsnorm_fp4quant_per_token``."""

from expected import after_addition, rmsnorm_fp4quant_per_token

_ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, float eps=1e-6, str scale_layout='128x4', "
    "bool weight_plus_one=False, Tensor? bias=None, bool subtract_mean=False"
)
_OUTPUTS = "Tensor(b!) y, Tensor(c!) scale, Tensor(d!) row_scale"
SCHEMA = f"cute::add_rmsnorm_fp4quant_per_token({_ARGUMENTS}) -> (Tensor y, Tensor scale, Tensor row_scale)"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant_per_token.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"

results, assert_results = after_addition(rmsnorm_fp4quant_per_token)
