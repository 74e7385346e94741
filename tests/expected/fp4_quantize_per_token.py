"""``fp4_quantize_per_token``: codes and scales must equal the specification bit for bit."""

from expected import Tensors, assert_same, quantised_per_token, rows_of

_ARGUMENTS = "Tensor input, str scale_layout='128x4'"
_OUTPUTS = "Tensor(a!) y, Tensor(b!) scale, Tensor(c!) row_scale"
SCHEMA = f"cute::fp4_quantize_per_token({_ARGUMENTS}) -> (Tensor y, Tensor scale, Tensor row_scale)"
OUT_SCHEMA = f"cute::fp4_quantize_per_token.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"

assert_results = assert_same


def results(given) -> Tensors:
    return quantised_per_token(rows_of(given["input"]), given["input"].shape[:-1], given)
