"""Outputs of ``moe_route``."""

from typing import Any

import torch

from torch_cute_ops.fake.moe_route_ids import order_shapes
from torch_cute_ops.formats.shapes import OutputShapes


def moe_route(logits: torch.Tensor, topk: int, alignment: int, max_rows: int | None, **_: Any) -> OutputShapes:
    """Describe the weights and expert ids (M, topk), followed by the outputs of ``moe_route_ids``."""
    tokens, experts = logits.shape
    pairs = (tokens, topk)
    return [(pairs, torch.float32), (pairs, torch.int32), *order_shapes(tokens, topk, experts, alignment, max_rows)]
