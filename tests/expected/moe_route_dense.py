"""``moe_route_dense``: weights must be exactly zero for experts to which a token is not routed, and otherwise within
the error of fp32 arithmetic. The experts may differ if fp32 arithmetic cannot distinguish their scores."""

import numpy as np
import torch

from expected import Tensors, moe_route

_ARGUMENTS = (
    "Tensor logits, int topk, Tensor? bias=None, str scoring='softmax', int num_groups=1, int topk_groups=1, "
    "bool renormalize=True, float scaling_factor=1.0, Tensor? expert_factor=None, bool finite=False"
)
SCHEMA = f"cute::moe_route_dense({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::moe_route_dense.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"
ERROR = moe_route.ERROR + 2.0**-23
"""Relative error of routing weights times the experts' factors."""


def dense(score: np.ndarray, ids: np.ndarray, given) -> np.ndarray:
    """Return the weights of these experts (M, topk) as a matrix with one column per expert, in float64."""
    weights = moe_route.weights_of(score, ids, given)
    if given["expert_factor"] is not None:
        with np.errstate(all="ignore"):
            weights = weights * given["expert_factor"].detach().cpu().double().numpy()[ids]
    matrix = np.zeros(score.shape)
    np.put_along_axis(matrix, ids, weights, 1)
    return matrix


def results(given) -> Tensors:
    """Return the expected result in float64."""
    choice, score = moe_route.scores_of(given)
    ids = np.array([moe_route.choose(values, given)[0] for values in choice], int).reshape(-1, given["topk"])
    return (torch.from_numpy(dense(score, ids, given)),)


def assert_results(actual, expected, given) -> None:
    (got,), (want,) = actual, expected
    assert got.dtype == torch.float32 and got.shape == want.shape
    got = got.detach().cpu().double()
    choice, score = moe_route.scores_of(given)
    for m in range(len(got)):
        if is_close(got[m], want[m]):
            continue
        # The weight may be in the column of another expert with an equal score.
        assert moe_route.choose(choice[m], given)[1], f"token {m} has {got[m]}, not {want[m]}"
        ids = (-got[m].abs()).argsort(stable=True)[: given["topk"]].sort().values.numpy()
        other = torch.from_numpy(dense(score[m : m + 1], ids[None], given))[0]
        assert is_close(got[m], other), f"token {m} has {got[m]}, not {other}"


def is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return True if results are within ``ERROR``, with NaN and zeros at the same places. Subnormal numbers may also be
    off by a subnormal amount."""
    numbers = torch.equal(got.isnan(), want.isnan()) and not bool(got[want == 0].any())
    off = (got - want).abs() > want.abs() * ERROR + 2.0**-126
    return numbers and not bool(off.any())


def rows_alone(given, outputs):
    """Yield calls with a single token, and their expected results."""
    tokens = len(given["logits"])
    for m in {0, tokens // 3, tokens - 1} if tokens else ():
        yield {**given, "logits": given["logits"][m : m + 1]}, (outputs[0][m : m + 1],)
