"""``add_rmsnorm``: the residual must be exact; the normalised rows are checked as in ``rmsnorm``."""

from expected import after_addition, rmsnorm

_ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, float eps=1e-6, "
    "bool weight_plus_one=False, Tensor? bias=None, bool subtract_mean=False"
)
SCHEMA = f"cute::add_rmsnorm({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::add_rmsnorm.out({_ARGUMENTS}, *, Tensor(b!) out) -> ()"

results, assert_results = after_addition(rmsnorm)
