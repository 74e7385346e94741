"""``fp8_quantize``: codes and scales must equal the specification bit for bit."""

from expected import Tensors, assert_same, quantised_fp8, rows_of

_ARGUMENTS = (
    "Tensor input, Tensor? scale=None, str granularity='token', str? scale_layout=None, bool interleaved=False, "
    "str? scale_format=None"
)
SCHEMA = f"cute::fp8_quantize({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::fp8_quantize.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale_out) -> ()"

assert_results = assert_same


def results(given) -> Tensors:
    return quantised_fp8(rows_of(given["input"]), given["input"].shape[:-1], given)
