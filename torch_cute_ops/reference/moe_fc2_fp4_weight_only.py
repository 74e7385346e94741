"""Reference of ``moe_fc2_fp4_weight_only``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.moe_fc2_fp4 import moe_fc2_fp4


def moe_fc2_fp4_weight_only(**named: Any) -> Tensor:
    """Compute ``moe_fc2_fp4`` for 16-bit activations without scales; see the op's docstring."""
    return moe_fc2_fp4(**named)
