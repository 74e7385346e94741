"""Routings of tokens to experts in which experts differ: factors (M, E), zero where a token does not have an expert."""

from __future__ import annotations

from functools import partial

import torch
from samples._moe_fc2 import top_alpha


def zipf_alpha(m: int, experts: int, device: torch.device, top: int = 2) -> torch.Tensor:
    """Each token has ``top`` experts, drawn one after the other, the r-th of them all with a probability in proportion
    to 1/r. Which expert is the r-th is random."""
    rank = torch.randperm(experts, device=device) + 1.0
    # The largest of ln(u) / weight are such a draw (Efraimidis and Spirakis).
    return _of_largest(torch.rand(m, experts, device=device).log() * rank, top)


def hot_alpha(m: int, experts: int, device: torch.device, top: int = 2) -> torch.Tensor:
    """Of each token's ``top`` experts one is the same for all tokens; the others are drawn."""
    keys = torch.rand(m, experts, device=device)
    keys[:, experts // 4] = 2.0
    return _of_largest(keys, top)


def every_alpha(m: int, experts: int, device: torch.device, top: int = 16) -> torch.Tensor:
    """Each token has ``top`` experts, and each expert tokens: pairs are dealt to both in turn."""
    assert experts <= m * top
    alpha = torch.zeros(m, experts, device=device)
    pairs = torch.arange(m * top, device=device)
    alpha[pairs % m, pairs % experts] = 1.0
    return alpha * (torch.rand(m, experts, device=device) + 0.5)


def _of_largest(keys: torch.Tensor, top: int) -> torch.Tensor:
    """Factors from 1/2 to 3/2 of the experts with each token's largest keys."""
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
"""By name: most experts of a call with some tokens have few tokens or none, others need several units."""


def powers(alpha: torch.Tensor) -> torch.Tensor:
    """Factors that are powers of two, where they are not zero."""
    return torch.where(alpha == 0, alpha, torch.exp2(torch.randint_like(alpha, -2, 3)))
