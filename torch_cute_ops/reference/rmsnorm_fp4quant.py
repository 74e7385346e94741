"""Reference of ``rmsnorm_fp4quant``, and the row normalisation that the norm references share."""

import torch

from torch_cute_ops.formats import resolve_fp4_format
from torch_cute_ops.reference.fp4_quantize import quantize_rows


def rmsnorm_rows(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``v · 1/sqrt(mean(v²) + eps) · weight`` over the last dimension, in fp32 and not rounded further.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
    """
    # Contiguous, so that a row is summed in one order whatever lies beside it.
    value = input.float().contiguous()
    rstd = 1.0 / torch.sqrt(value.square().mean(-1, keepdim=True) + eps)
    return value * rstd * weight.float()


def rmsnorm_fp4quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of ``input`` (..., H) as FP4 blocks; see the op's docstring."""
    fmt = resolve_fp4_format(block_size, scale_format)
    return quantize_rows(rmsnorm_rows(input, weight, eps), fmt, global_scale, scale_layout)
