"""``fp8_quantize_block128x128``: codes and scales must equal the specification bit for bit."""

import numpy as np
import torch
from support import spec

from expected import Tensors, assert_same

_ARGUMENTS = "Tensor input, str? scale_format=None"
SCHEMA = f"cute::fp8_quantize_block128x128({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::fp8_quantize_block128x128.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"

assert_results = assert_same


def results(given) -> Tensors:
    input = given["input"].detach().cpu().float()
    *lead, n, k = input.shape
    size = -(-n // 128), -(-k // 128)
    codes = np.zeros((*lead, n, k), np.uint8)
    scales = np.zeros((*lead, *size), np.float32)
    for *at, i, j in np.ndindex(*lead, *size):
        block = (*at, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        values = input[block].numpy()
        # A block is a row of all its elements, quantised with a scale for the row.
        code, scale = spec.quantise_fp8(values.reshape(1, -1), "token", None, given["scale_format"])
        codes[block], scales[(*at, i, j)] = code.reshape(values.shape), scale.item()
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)


def rows_alone(given, outputs):
    """Yield calls with a single row of blocks, and their expected results."""
    *_, n, k = given["input"].shape
    if not outputs[0].numel():
        return
    matrices, y, scale = given["input"].reshape(-1, n, k), outputs[0].reshape(-1, n, k), outputs[1]
    scale = scale.reshape(len(y), *scale.shape[-2:])
    for m, i in {(0, 0), (len(y) - 1, (n - 1) // 128)}:
        rows = slice(128 * i, 128 * i + 128)
        yield {**given, "input": matrices[m, rows]}, (y[m, rows], scale[m, i : i + 1])
