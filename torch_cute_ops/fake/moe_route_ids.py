"""Outputs of ``moe_route_ids``."""

from typing import Any

import torch

from torch_cute_ops.formats.experts import rows_bound
from torch_cute_ops.formats.shapes import OutputShapes


def order_shapes(tokens: int, topk: int, experts: int, alignment: int, max_rows: int | None) -> OutputShapes:
    """Describe the row of each pair (M, topk), the pair of each row (R,), the offsets (E + 1,) and the counts (E,)."""
    rows = rows_bound(tokens, topk, experts, alignment) if max_rows is None else experts * max_rows
    return [(shape, torch.int32) for shape in ((tokens, topk), (rows,), (experts + 1,), (experts,))]


def moe_route_ids(ids: torch.Tensor, experts: int, alignment: int, max_rows: int | None, **_: Any) -> OutputShapes:
    """Describe the row of each pair (M, topk), the pair of each row (R,), the offsets (E + 1,) and the counts (E,)."""
    tokens, topk = ids.shape
    return order_shapes(tokens, topk, experts, alignment, max_rows)
