"""``add_rmsnorm_fp4quant_with_norm``: the residual bit for bit, and of it what ``rmsnorm_fp4quant_with_norm`` makes."""

from expected import Tensors, add_rmsnorm_fp4quant, assert_same, residual_sum, rmsnorm_fp4quant_with_norm

_RETURNS = "Tensor y, Tensor scale, Tensor norm"
_OUTPUTS = "Tensor(b!) y, Tensor(c!) scale, Tensor(d!) norm"
SCHEMA = f"cute::add_rmsnorm_fp4quant_with_norm({add_rmsnorm_fp4quant.ARGUMENTS}) -> ({_RETURNS})"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant_with_norm.out({add_rmsnorm_fp4quant.ARGUMENTS}, *, {_OUTPUTS}) -> ()"


def results(given) -> Tensors:
    """The outputs, the norm of which is in float64, and the updated residual."""
    total = residual_sum(given)
    return *rmsnorm_fp4quant_with_norm.results({**given, "input": total}), total


def assert_results(actual, expected, given) -> None:
    rmsnorm_fp4quant_with_norm.assert_results(actual[:-1], expected[:-1], given)
    assert_same(actual[-1:], expected[-1:])
