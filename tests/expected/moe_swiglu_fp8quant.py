"""``moe_swiglu_fp8quant``: codes and scales may differ from the specification only as far as the error bound of an fp32
exponential allows. Codes and scales must be zero in rows of padding."""

import numpy as np
import torch

from expected import Tensors, gated, quantised_fp8, rmsnorm_fp8quant, rows_of
from torch_cute_ops.testing import GATE_ERROR

_ARGUMENTS = (
    "Tensor input, Tensor? offsets=None, Tensor? counts=None, "
    "float swiglu_alpha=1.0, float swiglu_beta=0.0, float? swiglu_limit=None, str gate='silu', "
    "str? scale_format=None"
)
SCHEMA = f"cute::moe_swiglu_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::moe_swiglu_fp8quant.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"
FORMAT = {"granularity": "block128", "scale_layout": None, "scale": None, "scale_format": None}


def used(given) -> np.ndarray:
    """Return a mask of the rows that are not padding."""
    lead = given["input"].shape[:-1]
    rows = np.zeros(lead.numel(), bool)
    counts = None if given["counts"] is None else given["counts"].cpu().numpy()
    if given["offsets"] is None:
        for expert, count in enumerate(counts):
            rows[expert * lead[1] : expert * lead[1] + count] = True
        return rows
    offsets = given["offsets"].cpu().numpy()
    for expert, begin in enumerate(offsets[:-1]):
        rows[begin : offsets[expert + 1] if counts is None else begin + counts[expert]] = True
    return rows


def results(given) -> Tensors:
    lead = given["input"].shape[:-1]
    value = rows_of(given["input"]).copy()
    value[~used(given)] = 0
    y, scale = quantised_fp8(gated(value, given), lead, FORMAT | {"scale_format": given["scale_format"]})
    return y, scale.masked_fill(torch.from_numpy(~used(given)).reshape(*lead, 1), 0.0)


def selected(tensor: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor for which ``keep`` is set."""
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch 2.9 cannot index FP8 on a CPU
    return bits[keep.to(tensor.device)].view(tensor.dtype)


def assert_results(actual, expected, given) -> None:
    named = FORMAT | {name: given[name] for name in ("input", "scale_format")}
    if given["scale_format"] is not None:
        # Rows of padding have the scale 0, which is no power of two.
        keep = torch.from_numpy(used(given)).reshape(given["input"].shape[:-1])
        actual, expected = (tuple(selected(each, keep) for each in pair) for pair in (actual, expected))
    rmsnorm_fp8quant.assert_close(actual, expected, named, scale_error=GATE_ERROR)


def rows_alone(given, outputs):
    """Yield calls with a single row of one expert, and their expected results."""
    rows = given["input"].reshape(-1, given["input"].shape[-1])
    y, scale = outputs[0].flatten(0, -2), outputs[1].flatten(0, -2)
    numbers = np.flatnonzero(used(given))
    end = torch.tensor([0, 1], dtype=torch.int32, device=rows.device)
    for m in {*numbers[:1], *numbers[len(numbers) // 3 :][:1], *numbers[-1:]}:
        alone = {**given, "input": rows[m : m + 1], "offsets": end, "counts": end[1:]}
        yield alone, (y[m : m + 1], scale[m : m + 1])
