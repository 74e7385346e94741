"""``silu_mul_fp8quant``: codes and scales may differ from the specification only as far as the error of an fp32
exponential allows."""

from expected import Tensors, gated, quantised_fp8, rmsnorm_fp8quant, rows_of
from torch_cute_ops.testing import GATE_ERROR

_ARGUMENTS = (
    "Tensor input, Tensor? scale=None, str granularity='token', str? scale_layout=None, "
    "float swiglu_alpha=1.0, float swiglu_beta=0.0, float? swiglu_limit=None, bool interleaved=False, "
    "str gate='silu', str? scale_format=None"
)
SCHEMA = f"cute::silu_mul_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::silu_mul_fp8quant.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale_out) -> ()"


def results(given) -> Tensors:
    return quantised_fp8(gated(rows_of(given["input"]), given), given["input"].shape[:-1], given)


def assert_results(actual, expected, given) -> None:
    rmsnorm_fp8quant.assert_close(actual, expected, given, parts=2, scale_error=GATE_ERROR)
