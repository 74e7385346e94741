"""Reference of ``add_rmsnorm_fp4quant``, and the addition that the add_rmsnorm references share."""

import torch

from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_fp4quant


def add_rows(input: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Add ``input`` to ``residual`` in place: in fp32, rounded once to the dtype. Returns ``residual``."""
    return residual.copy_(input.float() + residual.float())


def add_rmsnorm_fp4quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm_fp4quant`` of the updated residual; see the op's docstring."""
    row = add_rows(input, residual)
    return rmsnorm_fp4quant(row, weight, global_scale, eps, block_size, scale_format, scale_layout)
