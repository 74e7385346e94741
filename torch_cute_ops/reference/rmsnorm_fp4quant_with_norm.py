"""Reference of ``rmsnorm_fp4quant_with_norm``."""

from typing import Any

import torch

from torch_cute_ops.reference.fp4_quantize import fp4_quantize
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows


def rmsnorm_fp4quant_with_norm(
    input: torch.Tensor, weight: torch.Tensor, eps: float, weight_plus_one: bool, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``rmsnorm_fp4quant``, and return the normalised rows in the input's dtype too; see the op's docstring."""
    norm = rmsnorm_rows(input, weight, eps, weight_plus_one)
    return *fp4_quantize(norm, **named), norm.to(input.dtype).contiguous()
