"""``add_rmsnorm_fp4quant``: the residual must be exact; codes and scales are checked as in ``rmsnorm_fp4quant``."""

from expected import after_addition, rmsnorm_fp4quant

ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, Tensor? global_scale=None, float eps=1e-6, int block_size=16, "
    "str? scale_format=None, str scale_layout='128x4', bool weight_plus_one=False, "
    "Tensor? bias=None, bool subtract_mean=False"
)
SCHEMA = f"cute::add_rmsnorm_fp4quant({ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant.out({ARGUMENTS}, *, Tensor(b!) y, Tensor(c!) scale) -> ()"

results, assert_results = after_addition(rmsnorm_fp4quant)
