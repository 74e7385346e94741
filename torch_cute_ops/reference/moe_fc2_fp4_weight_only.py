"""Reference of ``moe_fc2_fp4_weight_only``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.moe_fc2_fp4 import moe_fc2_fp4


def moe_fc2_fp4_weight_only(**named: Any) -> Tensor:
    """``moe_fc2_fp4`` of 16-bit activations, with the same arguments but their scales; see the op's docstring."""
    return moe_fc2_fp4(**named)
