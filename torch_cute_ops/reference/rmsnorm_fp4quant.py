"""Reference of ``rmsnorm_fp4quant``, and the row normalisation that the norm references share."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.reference.fp4_quantize import fp4_quantize


def rmsnorm_rows(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``v · 1/sqrt(mean(v²) + eps) · weight`` over the last dimension, in fp32 and not rounded further.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
    """
    # Contiguous, so that a row is summed in one order whatever lies beside it.
    value = input.float().contiguous()
    rstd = 1.0 / torch.sqrt(value.square().mean(-1, keepdim=True) + eps)
    return value * rstd * weight.float()


def rmsnorm_fp4quant(input: Tensor, weight: Tensor, eps: float, **named: Any) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``input`` (..., H), and ``fp4_quantize`` of it with the other arguments; see the op's docstring."""
    return fp4_quantize(rmsnorm_rows(input, weight, eps), **named)
