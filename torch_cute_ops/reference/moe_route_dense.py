"""Reference of ``moe_route_dense``."""

import torch

from torch_cute_ops.reference.moe_route import choose_experts


def moe_route_dense(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    expert_factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights of ``moe_route`` as a matrix (M, E), times the experts' factors; see the op's docstring."""
    scoring_arguments = (bias, scoring, num_groups, topk_groups, renormalize, scaling_factor)
    weights, chosen = choose_experts(logits, topk, *scoring_arguments)
    if expert_factor is not None:
        weights = weights * expert_factor[chosen]
    dense = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return dense.scatter_(1, chosen, weights)
