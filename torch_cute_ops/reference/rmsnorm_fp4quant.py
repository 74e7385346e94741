"""Reference of ``rmsnorm_fp4quant``, and the normalisation that all norm references use."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.reference.fp4_quantize import fp4_quantize


def rmsnorm_rows(
    input: Tensor,
    weight: Tensor,
    eps: float,
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
) -> Tensor:
    """Compute ``v · 1/sqrt(mean(v²) + eps) · weight + bias`` over the last dimension in fp32, without a final rounding.

    With ``subtract_mean`` each row's mean is subtracted first (LayerNorm). With ``weight_plus_one`` the factor is ``1 +
    weight`` instead of ``weight``; an empty ``weight`` means no factor.

    Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4; Ba et al., "Layer Normalization"
    (2016), eq. 4.
    """
    # make the rows contiguous, because the order in which torch adds depends on the strides
    value = input.float().contiguous()
    if subtract_mean:
        # Divide by a tensor: on a GPU, torch's mean multiplies by the reciprocal of the width.
        total = value.sum(-1, keepdim=True)
        value = value - total / torch.full_like(total, value.shape[-1])
    rstd = 1.0 / torch.sqrt(value.square().mean(-1, keepdim=True) + eps)
    norm = value * rstd
    if weight.numel():
        norm = norm * (1.0 + weight.float() if weight_plus_one else weight.float())
    return norm if bias is None else norm + bias.float()


def normalised(
    input: Tensor,
    weight: Tensor,
    eps: float,
    weight_plus_one: bool,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    **named: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the result of ``rmsnorm_rows`` for an op's arguments, and the arguments that it does not take."""
    return rmsnorm_rows(input, weight, eps, weight_plus_one, bias, subtract_mean), named


def rmsnorm_fp4quant(**named: Any) -> tuple[Tensor, Tensor]:
    """Normalise ``input`` (..., H), then apply ``fp4_quantize``; see the op's docstring."""
    norm, rest = normalised(**named)
    return fp4_quantize(norm, **rest)
