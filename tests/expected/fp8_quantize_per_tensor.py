"""``fp8_quantize_per_tensor``: codes and the scale must equal the specification bit for bit."""

import torch
from support import spec

from expected import INTERLEAVED, Tensors, assert_same, rows_of

_ARGUMENTS = "Tensor input, bool interleaved=False"
SCHEMA = f"cute::fp8_quantize_per_tensor({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::fp8_quantize_per_tensor.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"

assert_results = assert_same


def results(given) -> Tensors:
    *lead, width = given["input"].shape
    values = rows_of(given["input"])
    if values.size:
        # The tensor is one row, quantised with a scale for the row.
        codes, scale = map(torch.from_numpy, spec.quantise_fp8(values.reshape(1, -1), "token"))
    else:
        codes, scale = torch.zeros(0, dtype=torch.uint8), torch.zeros(1)
    codes = codes.reshape(*lead, width)
    if given["interleaved"]:
        codes = torch.nn.functional.pad(codes, (0, -width % 256)).unflatten(-1, (-1, 256))
        codes = torch.empty_like(codes).index_copy_(-1, INTERLEAVED, codes)
    return codes.view(torch.float8_e4m3fn), scale.reshape(1)


def rows_alone(given, outputs):
    """Yield the call with its rows in reverse order: the codes are in reverse order, and the scale is the same."""
    rows = given["input"].reshape(-1, given["input"].shape[-1])
    y = outputs[0].reshape(len(rows), *outputs[0].shape[given["input"].dim() - 1 :]).view(torch.uint8).flip(0)
    yield {**given, "input": rows.flip(0)}, (y.view(outputs[0].dtype), outputs[1])
