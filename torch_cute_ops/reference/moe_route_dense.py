"""Reference of ``moe_route_dense``."""

from typing import Any

import torch

from torch_cute_ops.reference.moe_route import choose_experts


def moe_route_dense(
    logits: torch.Tensor, topk: int, expert_factor: torch.Tensor | None, **scoring: Any
) -> torch.Tensor:
    """Compute the routing weights of ``moe_route``, times the experts' factors, as a matrix (M, E); see the op's
    docstring."""
    weights, chosen = choose_experts(logits, topk, **scoring)
    if expert_factor is not None:
        weights = weights * expert_factor[chosen]
    dense = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return dense.scatter_(1, chosen, weights)
