"""``moe_finalize``: results must equal the specification bit for bit. The fp32 product or sum of two numbers is the
float64 result, rounded once."""

import numpy as np
import torch

from expected import Tensors, assert_same, rows_of

_ARGUMENTS = "Tensor input, Tensor expanded_to_permuted, Tensor weights, Tensor? residual=None"
SCHEMA = f"cute::moe_finalize({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::moe_finalize.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def results(given) -> Tensors:
    rows, index = rows_of(given["input"]), given["expanded_to_permuted"].cpu().numpy()
    weights = given["weights"].cpu().numpy()
    tokens, topk = index.shape
    if given["residual"] is None:
        total = np.zeros((tokens, rows.shape[1]), np.float32)
    else:
        total = rows_of(given["residual"]).copy()
    with np.errstate(all="ignore"):
        for j in range(topk):
            for m in np.flatnonzero(index[:, j] >= 0):
                term = (rows[index[m, j]].astype(np.float64) * weights[m, j]).astype(np.float32)
                total[m] = (total[m].astype(np.float64) + term).astype(np.float32)
    return (torch.from_numpy(total).to(given["input"].dtype),)


assert_results = assert_same


def rows_alone(given, outputs):
    """Yield calls with a single token, and their expected results."""
    tokens = len(given["weights"])
    for m in {0, tokens // 3, tokens - 1} if tokens else ():
        own = {name: given[name][m : m + 1] for name in ("expanded_to_permuted", "weights")}
        residual = None if given["residual"] is None else given["residual"][m : m + 1]
        yield {**given, **own, "residual": residual}, (outputs[0][m : m + 1],)
