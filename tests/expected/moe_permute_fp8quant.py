"""``moe_permute_fp8quant``: codes and scales must equal the specification bit for bit, and must be zero in rows of
padding."""

import numpy as np
import torch

from expected import Tensors, assert_same, quantised_fp8, rows_of

_ARGUMENTS = (
    "Tensor input, Tensor permuted_to_expanded, int topk, Tensor? expanded_to_permuted=None, str? scale_format=None"
)
SCHEMA = f"cute::moe_permute_fp8quant({_ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::moe_permute_fp8quant.out({_ARGUMENTS}, *, Tensor(a!) y, Tensor(b!) scale) -> ()"
FORMAT = {"granularity": "block128", "scale_layout": None, "scale": None, "scale_format": None}


def results(given) -> Tensors:
    rows, pairs = rows_of(given["input"]), given["permuted_to_expanded"].cpu().numpy()
    value = np.zeros((len(pairs), rows.shape[1]), np.float32)
    used = pairs >= 0
    value[used] = rows[pairs[used] // given["topk"]]
    named = FORMAT | {"scale_format": given["scale_format"]}
    y, scale = quantised_fp8(value, torch.Size((len(pairs),)), named)
    return y, scale.masked_fill(~torch.from_numpy(used)[:, None], 0.0)


assert_results = assert_same


def rows_alone(given, outputs):
    """Yield calls with a single token and a single expert, and their expected results."""
    tokens = len(given["input"])
    pairs = given["permuted_to_expanded"].cpu().numpy()
    index = torch.zeros(1, dtype=torch.int32, device=given["input"].device)
    for m in {0, tokens // 3, tokens - 1} if tokens else ():
        for row in np.flatnonzero((pairs >= 0) & (pairs // given["topk"] == m))[:1]:
            alone = {"input": given["input"][m : m + 1], "permuted_to_expanded": index, "topk": 1}
            want = (outputs[0][row : row + 1], outputs[1][row : row + 1])
            yield {**alone, "expanded_to_permuted": index.view(1, 1), "scale_format": given["scale_format"]}, want
