"""Reference of ``rmsnorm_fp4quant_with_norm``."""

import torch

from torch_cute_ops.formats import resolve_fp4_format
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows


def rmsnorm_fp4quant_with_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``rmsnorm_fp4quant``, with the normalised rows in the input dtype besides; see the op's docstring."""
    fmt = resolve_fp4_format(block_size, scale_format)
    norm = rmsnorm_rows(input, weight, eps)
    return *quantize_rows(norm, fmt, global_scale, scale_layout), norm.to(input.dtype).contiguous()
