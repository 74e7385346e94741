"""Reference of ``add_rmsnorm_fp4quant``, and the addition that all add_rmsnorm references use."""

from typing import Any

import torch

from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_fp4quant


def add_rows(input: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Add ``input`` to ``residual`` in place, in fp32, and round once to the dtype of ``residual``. Return
    ``residual``."""
    return residual.copy_(input.float() + residual.float())


def add_rmsnorm_fp4quant(
    input: torch.Tensor, residual: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``input`` to ``residual`` in place, then apply ``rmsnorm_fp4quant`` to the sum; see the op's docstring."""
    return rmsnorm_fp4quant(input=add_rows(input, residual), **named)
