"""``silu_mul_fp4quant``: within what the error of an fp32 exponential allows."""

from support import spec

from expected import Tensors, quantised, rmsnorm_fp4quant, rows_of

_ARGUMENTS = (
    "Tensor input, Tensor? global_scale=None, int block_size=16, str? scale_format=None, str scale_layout='linear'"
)
SCHEMA = f"cute::silu_mul_fp4quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::silu_mul_fp4quant.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"

assert_results = rmsnorm_fp4quant.assert_results


def results(given) -> Tensors:
    return quantised(spec.silu_mul(rows_of(given["input"])), given["input"].shape[:-1], given)
