"""Reference of ``add_rmsnorm_fp4quant_with_norm``."""

import torch

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm_fp4quant_with_norm import rmsnorm_fp4quant_with_norm


def add_rmsnorm_fp4quant_with_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rmsnorm_fp4quant_with_norm`` of the updated residual; see the op's docstring."""
    row = add_rows(input, residual)
    return rmsnorm_fp4quant_with_norm(row, weight, global_scale, eps, block_size, scale_format, scale_layout)
