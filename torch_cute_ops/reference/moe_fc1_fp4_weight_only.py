"""Reference of ``moe_fc1_fp4_weight_only``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.moe_fc1_fp4 import gated_columns


def moe_fc1_fp4_weight_only(a: Tensor, **named: Any) -> Tensor:
    """Apply the gate to each expert's gate and up columns, and round the result to the dtype of ``a``. Pairs that are
    not routed become zero. See the op's docstring."""
    return gated_columns(a=a, **named).to(a.dtype)


def written(outputs: tuple[Tensor, ...], routing: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """Return a mask of the elements that the op writes: the columns of routed pairs."""
    return ((routing != 0).repeat_interleave(outputs[0].shape[1] // routing.shape[1], 1),)
