"""``moe_route``: the experts must equal the expected experts, unless fp32 arithmetic cannot distinguish their scores.
Weights must be within the error of fp32 arithmetic. The order of rows must be exact for the experts that the op
chose."""

import numpy as np
import torch

from expected import Tensors

_ARGUMENTS = (
    "Tensor logits, int topk, Tensor? bias=None, str scoring='softmax', int num_groups=1, int topk_groups=1, "
    "bool renormalize=True, float scaling_factor=1.0, int alignment=128, SymInt? max_rows=None, bool finite=False"
)
_NAMES = ("weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
SCHEMA = f"cute::moe_route({_ARGUMENTS}) -> ({', '.join(f'Tensor {name}' for name in _NAMES)})"
_OUTPUTS = ", ".join(f"Tensor({letter}!) {name}" for letter, name in zip("abcdef", _NAMES, strict=True))
OUT_SCHEMA = f"cute::moe_route.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"
NEAR = 2.0**-20
"""If two scores differ by less than this, either order is accepted. A score is a sigmoid, a sigmoid plus a bias, or the
sum of two scores."""
ERROR = 2.0**-17
"""Relative error of weights, which are exponentials of numbers up to a few dozen."""


def scores_of(given) -> tuple[np.ndarray, np.ndarray]:
    """Return, in float64, the scores by which experts are chosen, and the numbers from which weights are computed:
    sigmoids, or the logits of a softmax."""
    logits = given["logits"].detach().cpu().double().numpy()
    bias = None if given["bias"] is None else given["bias"].detach().cpu().double().numpy()
    if given.get("finite"):
        largest = float(np.finfo(np.float32).max)
        logits = np.clip(np.where(np.isnan(logits), -largest, logits), -largest, largest)
    with np.errstate(all="ignore"):
        if given["scoring"] == "softmax":
            return (logits if bias is None else softmax(logits) + bias), logits
        # A sigmoid that rounds to 1 or 0 in fp32 must be exactly 1 or 0.
        sigmoid = (1 / (1 + np.exp(-logits))).astype(np.float32).astype(np.float64)
    return (sigmoid if bias is None else sigmoid + bias), sigmoid


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of each row."""
    exponentials = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(1, keepdims=True)


def ranked(values: np.ndarray, left_out: np.ndarray | None = None) -> np.ndarray:
    """Return the indices in descending order of value; for equal values, the lower index comes first. NaN follows the
    numbers, and elements in ``left_out`` come last."""
    level = np.isnan(values) + 0
    if left_out is not None:
        level[left_out] = 2
    value = np.where(np.isnan(values), -np.inf, values)
    return np.array(sorted(range(len(values)), key=lambda i: (level[i], -value[i], i)), int)


def is_near(values: np.ndarray, order: np.ndarray, count: int) -> bool:
    """Return True if one of the first ``count`` values in ``order`` is nearly, but not exactly, equal to another
    value."""
    with np.errstate(invalid="ignore"):
        gaps = values[order[:count], None] - values
    return bool(((gaps > 0) & (gaps < NEAR)).any())


def choose(choice: np.ndarray, given) -> tuple[np.ndarray, bool]:
    """Return the experts of one token, and True if other experts would be accepted, too."""
    size = len(choice) // given["num_groups"]
    groups = np.where(np.isnan(choice), -np.inf, choice).reshape(-1, size)
    # DeepSeek-V3 ranks groups by the sum of their two best scores, DeepSeek-V2 (softmax, no bias) by their best score.
    is_exact = given["scoring"] == "softmax" and given["bias"] is None
    with np.errstate(invalid="ignore"):
        sums = -np.sort(-groups, 1)[:, : 1 if is_exact else 2].sum(1)
    best = ranked(sums)
    out = np.ones(given["num_groups"], bool)
    out[best[: given["topk_groups"]]] = False
    order = ranked(choice, out.repeat(size))
    near = is_near(choice, order, given["topk"])
    near |= given["topk_groups"] < given["num_groups"] and is_near(sums, best, given["topk_groups"])
    return order[: given["topk"]], near and not is_exact


def places(ids: np.ndarray, experts: int, given) -> tuple[np.ndarray, ...]:
    """Return the row of each pair, the pair of each row, the offsets and the counts."""
    tokens, topk = ids.shape
    lists: list[list[int]] = [[] for _ in range(experts)]
    for pair, expert in enumerate(ids.flatten()):
        if 0 <= expert < experts:
            lists[expert].append(pair)
    offsets = [0]
    for pairs in lists:
        room = given["max_rows"]
        if room is None:
            room = -(-len(pairs) // given["alignment"]) * given["alignment"]
        offsets.append(offsets[-1] + room)
        del pairs[room:]
    rows = offsets[-1]
    if given["max_rows"] is None:
        bound = tokens * topk + min(experts, tokens * topk) * (given["alignment"] - 1)
        rows = bound // given["alignment"] * given["alignment"]
    expanded, permuted = np.full(tokens * topk, -1), np.full(rows, -1)
    for begin, pairs in zip(offsets, lists, strict=False):
        expanded[pairs] = begin + np.arange(len(pairs))
        permuted[begin : begin + len(pairs)] = pairs
    return expanded.reshape(tokens, topk), permuted, np.array(offsets), np.array([len(pairs) for pairs in lists])


def weights_of(score: np.ndarray, ids: np.ndarray, given) -> np.ndarray:
    """Return the routing weights of these experts, in float64."""
    weights = np.take_along_axis(score, ids, 1)
    with np.errstate(all="ignore"):
        if given["scoring"] == "softmax":
            of_all = softmax(score)
            weights = softmax(weights) if given["renormalize"] else np.take_along_axis(of_all, ids, 1)
            weights[np.isnan(of_all).any(1)] = np.nan
        elif given["renormalize"]:
            weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
        return weights * given["scaling_factor"]


def results(given) -> Tensors:
    choice, score = scores_of(given)
    ids = np.zeros((len(choice), given["topk"]), int)
    for m, values in enumerate(choice):
        ids[m], _ = choose(values, given)
    weights = torch.from_numpy(weights_of(score, ids, given)).float()
    integers = (ids, *places(ids, choice.shape[1], given))
    return weights, *(torch.from_numpy(tensor).to(torch.int32) for tensor in integers)


def assert_results(actual, expected, given) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
    choice, score = scores_of(given)
    ids = actual[1].cpu().numpy()
    for m in np.flatnonzero((ids != expected[1].numpy()).any(1)):
        assert choose(choice[m], given)[1], f"token {m} has experts {ids[m]}, not {expected[1][m]}"
    want = torch.from_numpy(weights_of(score, ids, given))
    got = actual[0].cpu().double()
    assert torch.equal(got.isnan(), want.isnan())
    off = (got - want).abs() > want.abs() * ERROR + 2.0**-126
    assert not off.any(), f"weights are off, first at {off.nonzero()[:4].tolist()}"
    for name, got, want in zip(_NAMES[2:], actual[2:], places(ids, choice.shape[1], given), strict=True):
        different = (got.cpu().numpy() != want).nonzero()
        assert not len(different[0]), f"{name} differs, first at {[axis[:4].tolist() for axis in different]}"


def rows_alone(given, outputs):
    """Yield calls with a single token, and their expected results."""
    tokens, experts = given["logits"].shape
    for m in {0, tokens // 3, tokens - 1} if tokens else ():
        ids = outputs[1][m : m + 1]
        alone = (torch.from_numpy(place) for place in places(ids.cpu().numpy(), experts, given))
        want = (place.to(ids.device, torch.int32) for place in alone)
        yield {**given, "logits": given["logits"][m : m + 1]}, (outputs[0][m : m + 1], ids, *want)
