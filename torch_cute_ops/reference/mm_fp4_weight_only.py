"""Reference of ``mm_fp4_weight_only``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.mm_fp4 import mm_fp4


def mm_fp4_weight_only(**named: Any) -> Tensor:
    """Compute ``mm_fp4`` for 16-bit activations without scales; see the op's docstring."""
    return mm_fp4(**named)
