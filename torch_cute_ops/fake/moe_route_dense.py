"""Output of ``moe_route_dense``."""

from typing import Any

import torch

from torch_cute_ops.formats.shapes import OutputShapes


def moe_route_dense(logits: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the weights (M, E)."""
    return [(tuple(logits.shape), torch.float32)]
