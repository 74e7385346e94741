"""Reference of ``moe_fc1_fp4_weight_only``."""

from typing import Any

import torch

from torch_cute_ops.reference.mm_fp4 import formats_of
from torch_cute_ops.reference.moe_fc1_fp4 import gated_experts

Tensor = torch.Tensor


def moe_fc1_fp4_weight_only(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    routing: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Each expert's gated columns in the dtype of ``a``, zeros where a token is not routed; see the op's docstring."""
    formats = formats_of(block_size, scale_format, scale_layout)
    gate = swiglu_alpha, swiglu_beta, swiglu_limit
    return gated_experts(a, None, w, w_scale, routing, alpha, bias, gate, *formats).to(a.dtype)


def written(
    outputs: tuple[Tensor, ...], a: Tensor, w: Tensor, w_scale: Tensor, routing: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    """Which elements of the output the op writes: those of routed pairs."""
    return ((routing != 0).repeat_interleave(outputs[0].shape[1] // routing.shape[1], 1),)
