"""Outputs of ``moe_route``."""

import torch

from torch_cute_ops.formats.experts import rows_bound


def moe_route(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    alignment: int = 128,
    max_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, ids and places (M, topk); pairs of rows (R,); offsets (E + 1,) and counts (E,)."""
    tokens, experts = logits.shape
    rows = rows_bound(tokens, topk, experts, alignment) if max_rows is None else experts * max_rows

    def integers(*shape: int) -> torch.Tensor:
        return logits.new_empty(shape, dtype=torch.int32)

    weights = logits.new_empty((tokens, topk), dtype=torch.float32)
    pairs = (weights, integers(tokens, topk), integers(tokens, topk))
    return *pairs, integers(rows), integers(experts + 1), integers(experts)
