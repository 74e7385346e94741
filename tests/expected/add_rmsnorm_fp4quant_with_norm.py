"""``add_rmsnorm_fp4quant_with_norm``: the residual must be exact; the other outputs are checked as in
``rmsnorm_fp4quant_with_norm``."""

from expected import add_rmsnorm_fp4quant, after_addition, rmsnorm_fp4quant_with_norm

_RETURNS = "Tensor y, Tensor scale, Tensor norm"
_OUTPUTS = "Tensor(b!) y, Tensor(c!) scale, Tensor(d!) norm"
SCHEMA = f"cute::add_rmsnorm_fp4quant_with_norm({add_rmsnorm_fp4quant.ARGUMENTS}) -> ({_RETURNS})"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant_with_norm.out({add_rmsnorm_fp4quant.ARGUMENTS}, *, {_OUTPUTS}) -> ()"

results, assert_results = after_addition(rmsnorm_fp4quant_with_norm)
