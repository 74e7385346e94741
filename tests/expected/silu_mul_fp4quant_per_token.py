"""``silu_mul_fp4quant_per_token``: codes and scales may differ from the specification only as far as the error of an
fp32 exponential allows."""

from expected import Tensors, gated, quantised_per_token, rmsnorm_fp4quant_per_token, rows_of
from torch_cute_ops.testing import GATE_ERROR

_ARGUMENTS = (
    "Tensor input, str scale_layout='128x4', float swiglu_alpha=1.0, float swiglu_beta=0.0, float? swiglu_limit=None, "
    "str gate='silu'"
)
_OUTPUTS = "Tensor(a!) y, Tensor(b!) scale, Tensor(c!) row_scale"
SCHEMA = f"cute::silu_mul_fp4quant_per_token({_ARGUMENTS}) -> (Tensor y, Tensor scale, Tensor row_scale)"
OUT_SCHEMA = f"cute::silu_mul_fp4quant_per_token.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"


def results(given) -> Tensors:
    return quantised_per_token(gated(rows_of(given["input"]), given), given["input"].shape[:-1], given)


def assert_results(actual, expected, given) -> None:
    rmsnorm_fp4quant_per_token.assert_close(actual, expected, given, GATE_ERROR)
