"""``all_reduce_add_rmsnorm``: the residual must be exact; the norm is checked as in ``rmsnorm``."""

from expected import after_addition, rmsnorm

_ARGUMENTS = "Tensor input, Tensor(a!) residual, Tensor weight, str group, float eps=1e-6, bool weight_plus_one=False"
SCHEMA = f"cute::all_reduce_add_rmsnorm({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::all_reduce_add_rmsnorm.out({_ARGUMENTS}, *, Tensor(b!) out) -> ()"

results, assert_results = after_addition(rmsnorm)
