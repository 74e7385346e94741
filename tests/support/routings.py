"""Uneven routings of tokens to experts, as matrices of routing weights (M, E) that are zero for pairs that are not
routed."""

from __future__ import annotations

from functools import partial

import torch
from samples._moe_fc2 import top_alpha


def zipf_alpha(m: int, experts: int, device: torch.device, top: int = 2) -> torch.Tensor:
    """Route each token to ``top`` experts, which are drawn one after another by Zipf's law: the r-th most popular
    expert is drawn with a probability proportional to 1/r. The order of popularity is random."""
    rank = torch.randperm(experts, device=device) + 1.0
    # The experts with the largest ln(u) / weight have this distribution (Efraimidis and Spirakis).
    return _of_largest(torch.rand(m, experts, device=device).log() * rank, top)


def hot_alpha(m: int, experts: int, device: torch.device, top: int = 2) -> torch.Tensor:
    """Route all tokens to one common expert. The other experts of each token are random."""
    keys = torch.rand(m, experts, device=device)
    keys[:, experts // 4] = 2.0
    return _of_largest(keys, top)


def every_alpha(m: int, experts: int, device: torch.device, top: int = 16) -> torch.Tensor:
    """Route each token to ``top`` experts so that each expert gets tokens: experts are assigned in turn."""
    assert experts <= m * top
    alpha = torch.zeros(m, experts, device=device)
    pairs = torch.arange(m * top, device=device)
    alpha[pairs % m, pairs % experts] = 1.0
    return alpha * (torch.rand(m, experts, device=device) + 0.5)


def _of_largest(keys: torch.Tensor, top: int) -> torch.Tensor:
    """Return weights from 1/2 to 3/2 for each token's experts with the largest keys, and 0 for all others."""
    best = keys.topk(min(top, keys.shape[1]), 1).indices
    factors = torch.rand(best.shape, device=keys.device) + 0.5
    return torch.zeros_like(keys).scatter(1, best, factors)


SKEWED = {
    "zipf": zipf_alpha,
    "hot": hot_alpha,
    "hot-of-16": partial(hot_alpha, top=16),
    "top-1": partial(top_alpha, top=1),
    "zipf-of-16": partial(zipf_alpha, top=16),
}
"""Routings by name. In some of them, most experts get few tokens or none, and a few experts get several tiles."""


def powers(alpha: torch.Tensor) -> torch.Tensor:
    """Round the nonzero weights to powers of two."""
    return torch.where(alpha == 0, alpha, torch.exp2(torch.randint_like(alpha, -2, 3)))
