"""``add_rmsnorm_fp4quant``: the residual bit for bit, and of it what ``rmsnorm_fp4quant`` makes."""

from expected import Tensors, assert_same, residual_sum, rmsnorm_fp4quant

ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, Tensor? global_scale=None, float eps=1e-6, int block_size=16, "
    "str? scale_format=None, str scale_layout='linear'"
)
SCHEMA = f"cute::add_rmsnorm_fp4quant({ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant.out({ARGUMENTS}, *, Tensor(b!) y, Tensor(c!) scale) -> ()"


def results(given) -> Tensors:
    """The outputs, and the updated residual."""
    total = residual_sum(given)
    return *rmsnorm_fp4quant.results({**given, "input": total}), total


def assert_results(actual, expected, given) -> None:
    rmsnorm_fp4quant.assert_results(actual[:-1], expected[:-1], given)
    assert_same(actual[-1:], expected[-1:])
