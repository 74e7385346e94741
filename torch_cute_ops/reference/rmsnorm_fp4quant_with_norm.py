"""Reference of ``rmsnorm_fp4quant_with_norm``."""

from typing import Any

import torch

from torch_cute_ops.reference.fp4_quantize import fp4_quantize
from torch_cute_ops.reference.rmsnorm_fp4quant import normalised


def quantised_with_norm(
    input: torch.Tensor, dtype: torch.dtype, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``rmsnorm_fp4quant``, and return the normalised rows in ``dtype`` too."""
    norm, rest = normalised(input, **named)
    return *fp4_quantize(norm, **rest), norm.to(dtype).contiguous()


def rmsnorm_fp4quant_with_norm(input: torch.Tensor, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``rmsnorm_fp4quant``, and return the normalised rows in the input's dtype too; see the op's docstring."""
    return quantised_with_norm(input, input.dtype, **named)
