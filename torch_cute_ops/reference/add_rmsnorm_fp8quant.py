"""Reference of ``add_rmsnorm_fp8quant``."""

import torch

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm_fp8quant import rmsnorm_fp8quant


def add_rmsnorm_fp8quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm_fp8quant`` of the updated residual; see the op's docstring."""
    return rmsnorm_fp8quant(add_rows(input, residual), weight, scale, eps, granularity, scale_layout)
