"""Reference of ``mm_fp4_weight_only``."""

from typing import Any

import torch

from torch_cute_ops.reference.mm_fp4 import mm_fp4


def mm_fp4_weight_only(
    a: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """``mm_fp4`` of 16-bit activations, with the other arguments; see the op's docstring."""
    return mm_fp4(a, b, None, b_scale, *rest, **named)
