"""Reference of ``rmsnorm_fp4quant``, and the normalisation that all norm references use."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.reference.fp4_quantize import fp4_quantize


def rmsnorm_rows(input: Tensor, weight: Tensor, eps: float, weight_plus_one: bool = False) -> Tensor:
    """Compute ``v · 1/sqrt(mean(v²) + eps) · weight`` over the last dimension in fp32, without a final rounding.

    With ``weight_plus_one`` the factor is ``1 + weight`` instead of ``weight``.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
    """
    # make the rows contiguous, because the order in which torch adds depends on the strides
    value = input.float().contiguous()
    rstd = 1.0 / torch.sqrt(value.square().mean(-1, keepdim=True) + eps)
    return value * rstd * (1.0 + weight.float() if weight_plus_one else weight.float())


def rmsnorm_fp4quant(
    input: Tensor, weight: Tensor, eps: float, weight_plus_one: bool, **named: Any
) -> tuple[Tensor, Tensor]:
    """RMS-normalise ``input`` (..., H), then apply ``fp4_quantize``; see the op's docstring."""
    return fp4_quantize(rmsnorm_rows(input, weight, eps, weight_plus_one), **named)
