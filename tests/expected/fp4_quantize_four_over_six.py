"""``fp4_quantize_four_over_six``: codes and scales must equal the specification bit for bit."""

from expected import Tensors, assert_same, quantised, rows_of

_ARGUMENTS = "Tensor input, Tensor? global_scale=None, str scale_layout='128x4'"
SCHEMA = f"cute::fp4_quantize_four_over_six({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::fp4_quantize_four_over_six.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"

assert_results = assert_same


def results(given) -> Tensors:
    options = {**given, "block_size": 16, "four_over_six": True}
    return quantised(rows_of(given["input"]), given["input"].shape[:-1], options)
