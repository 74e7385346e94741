"""Reference of ``add_rmsnorm_fp4quant_with_norm``."""

from typing import Any

import torch

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm_fp4quant_with_norm import quantised_with_norm


def add_rmsnorm_fp4quant_with_norm(
    input: torch.Tensor, residual: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add ``input`` to ``residual`` in place, then apply ``rmsnorm_fp4quant_with_norm`` to the sum; see the op's
    docstring."""
    return quantised_with_norm(add_rows(input, residual), input.dtype, **named)
