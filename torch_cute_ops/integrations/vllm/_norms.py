"""This package's RMSNorm ops as implementations of vLLM's RMSNorm ops, for users who select them with
``ir_op_priority``."""

from typing import Final

import torch
from torch import Tensor
from vllm import ir

PROVIDER: Final = "torch_cute_ops"
"""Name for vLLM's ``ir_op_priority``."""


def is_supported(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return True if the op normalises whole rows, without a weight or with a weight in the dtype of ``x`` or
    float32."""
    return variance_size is None and (weight is None or weight.dtype in (x.dtype, torch.float32))


def is_sum_supported(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Return True if :func:`is_supported`, and the residual has the dtype of ``x``."""
    return is_supported(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Apply RMSNorm to each row, with a single rounding at the end."""
    normed: Tensor = torch.ops.cute.rmsnorm(x, _weight_of(x, weight), epsilon)
    return normed


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to ``x_residual`` in place; return the RMS-normalised rounded sum, and the sum."""
    normed: Tensor = torch.ops.cute.add_rmsnorm(x, x_residual, _weight_of(x, weight), epsilon)
    return normed, x_residual


def _weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return the weight, or a weight without elements, which our ops take for a norm without a weight."""
    return x.new_empty(0) if weight is None else weight


def register() -> None:
    """Register the implementations. A second call changes nothing."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=is_supported)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=is_sum_supported, inplace=True)(fused_add_rms_norm)
