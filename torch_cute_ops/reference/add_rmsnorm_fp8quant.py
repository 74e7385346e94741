"""Reference of ``add_rmsnorm_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm_fp8quant import rmsnorm_fp8quant


def add_rmsnorm_fp8quant(
    input: torch.Tensor, residual: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``input`` to ``residual`` in place, then apply ``rmsnorm_fp8quant`` to the sum; see the op's docstring."""
    return rmsnorm_fp8quant(input=add_rows(input, residual), **named)
