"""Reference of ``silu_mul_mm_fp4_weight_only``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.mm_fp4_weight_only import mm_fp4_weight_only
from torch_cute_ops.reference.silu_mul import silu_mul


def silu_mul_mm_fp4_weight_only(a: Tensor, gate: str, **named: Any) -> Tensor:
    """Apply the gate to ``a`` (M, 2K), then apply ``mm_fp4_weight_only``; see the op's docstring."""
    return mm_fp4_weight_only(a=silu_mul(a, gate=gate), **named)
