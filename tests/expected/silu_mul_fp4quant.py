"""``silu_mul_fp4quant``: codes and scales may differ from the specification only as far as the error of an fp32
exponential allows."""

from expected import Tensors, gated, quantised, rmsnorm_fp4quant, rows_of

_ARGUMENTS = (
    "Tensor input, Tensor? global_scale=None, int block_size=16, str? scale_format=None, str scale_layout='128x4', "
    "float swiglu_alpha=1.0, float swiglu_beta=0.0, float? swiglu_limit=None, str gate='silu'"
)
SCHEMA = f"cute::silu_mul_fp4quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::silu_mul_fp4quant.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"

assert_results = rmsnorm_fp4quant.assert_results


def results(given) -> Tensors:
    return quantised(gated(rows_of(given["input"]), given), given["input"].shape[:-1], given)
