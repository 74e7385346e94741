"""Reference of ``moe_route``, and functions for its two steps: choice of experts, and order of rows."""

from typing import Any

import torch

from torch_cute_ops.formats.experts import rows_bound

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def moe_route(logits: torch.Tensor, topk: int, alignment: int, max_rows: int | None, **scoring: Any) -> Outputs:
    """Choose experts, weights and rows for tokens with these ``logits`` (M, E); see the op's docstring."""
    weights, chosen = choose_experts(logits, topk, **scoring)
    places = places_of(chosen, logits.shape[1], alignment, max_rows)
    return weights, chosen.to(torch.int32, memory_format=torch.contiguous_format), *places


def choose_experts(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None,
    scoring: str,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    finite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (M, topk) fp32 and experts (M, topk) int64 for tokens with these ``logits`` (M, E)."""
    # Compute in float64, then round: the last bit of torch's fp32 functions depends on the element's position in the
    # tensor, and results must not.
    value = (logits.float().nan_to_num(nan=torch.finfo(torch.float32).min) if finite else logits).double()
    two_best = scoring == "sigmoid" or bias is not None
    if scoring == "softmax":
        score = value.softmax(1)
        choice = value.float() if bias is None else score.float() + bias
    else:
        score = value.sigmoid().float().double()
        choice = score.float() if bias is None else score.float() + bias
    groups = choice.unflatten(1, (num_groups, choice.shape[1] // num_groups))
    best = _or_least(groups).topk(min(1 + two_best, groups.shape[2]), dim=2).values
    best_groups = best_first(best.sum(2))[:, :topk_groups]
    left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=value.device).scatter(1, best_groups, False)
    chosen = best_first(choice, left_out.repeat_interleave(groups.shape[2], 1))[:, :topk]
    weights = score.gather(1, chosen)
    if renormalize and scoring == "softmax":
        # Renormalise by a softmax over the chosen logits only: with a bias, all chosen experts' scores may round to 0.
        weights = torch.where(score[:, :1].isnan(), torch.nan, value.gather(1, chosen).softmax(1))
    elif renormalize:
        # A sum of sigmoids may be zero. DeepSeek-V3's reference also adds 1e-20.
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return (weights * scaling_factor).float(), chosen


def best_first(values: torch.Tensor, left_out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the indices that sort each row: largest value first, then equal values by index, then NaN.

    Columns with ``left_out`` True come last.
    """
    order = _or_least(values).argsort(dim=1, descending=True, stable=True)
    level = values.isnan().to(torch.int8)
    if left_out is not None:
        level = torch.where(left_out, 2, level)
    return order.gather(1, level.gather(1, order).argsort(dim=1, stable=True))


def _or_least(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), -torch.inf, values)


def places_of(
    ids: torch.Tensor, experts: int, alignment: int = 128, max_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order the pairs (token, expert) of ``ids`` (M, topk) by expert, then by token.

    Pairs whose id is not an expert (below 0, or at least ``experts``) get no row and are not counted.

    Returns:
        ``expanded_to_permuted``, ``permuted_to_expanded``, ``offsets`` and ``counts``, as ``moe_route`` defines them.
    """
    tokens, topk = ids.shape
    flat = ids.flatten().long()
    # Assign pairs whose id is not an expert to an extra expert, which gets no rows.
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    pairs = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).index_add_(0, flat, torch.ones_like(flat))
    # `order` lists the pairs by expert, then by token; `rank` is the position of a pair within its expert.
    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(len(flat), device=ids.device) - (pairs.cumsum(0) - pairs)[expert]
    counts = pairs[:experts]
    if max_rows is None:
        rows = rows_bound(tokens, topk, experts, alignment)
        ends = ((counts + alignment - 1) // alignment * alignment).cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
    else:
        rows = experts * max_rows
        offsets = torch.arange(experts + 1, device=ids.device) * max_rows
        counts = counts.clamp(max=max_rows)
    row = torch.where(rank < torch.nn.functional.pad(counts, (0, 1))[expert], offsets[expert] + rank, -1)
    expanded = torch.empty_like(row).scatter_(0, order, row)
    # Pairs without a row write to an extra last element.
    permuted = torch.full((rows + 1,), -1, device=ids.device).scatter_(0, torch.where(row < 0, rows, row), order)
    permuted = permuted[:rows]
    tensors = (expanded.view(tokens, topk), permuted, offsets, counts)
    expanded, permuted, offsets, counts = (tensor.to(torch.int32) for tensor in tensors)
    return expanded, permuted, offsets, counts
