"""Reference of ``moe_fc2_fp4_weight_only``."""

from typing import Any

import torch

from torch_cute_ops.reference.moe_fc2_fp4 import moe_fc2_fp4


def moe_fc2_fp4_weight_only(
    a: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """``moe_fc2_fp4`` of 16-bit activations, with the other arguments; see the op's docstring."""
    return moe_fc2_fp4(a, w, None, w_scale, *rest, **named)
