"""``add_rmsnorm_fp8quant``: the residual bit for bit, and of it what ``rmsnorm_fp8quant`` makes."""

from expected import Tensors, assert_same, residual_sum, rmsnorm_fp8quant

_ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, Tensor? scale=None, float eps=1e-6, str granularity='token', "
    "str scale_layout='row'"
)
SCHEMA = f"cute::add_rmsnorm_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::add_rmsnorm_fp8quant.out({_ARGUMENTS}, *, Tensor(b!) y, Tensor(c!) scale_out) -> ()"


def results(given) -> Tensors:
    """The outputs, and the updated residual."""
    total = residual_sum(given)
    return *rmsnorm_fp8quant.results({**given, "input": total}), total


def assert_results(actual, expected, given) -> None:
    assert_same(actual[-1:], expected[-1:])
    rmsnorm_fp8quant.assert_results(actual[:-1], expected[:-1], {**given, "input": expected[-1]})
