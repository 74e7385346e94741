"""Reference of ``moe_route_ids``."""

import torch

from torch_cute_ops.reference.moe_route import places_of


def moe_route_ids(
    ids: torch.Tensor, experts: int, alignment: int, max_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give each (token, expert) pair of ``ids`` (M, topk) a row in the experts' order; see the op's docstring."""
    return places_of(ids, experts, alignment, max_rows)
