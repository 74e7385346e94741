"""Reference of ``moe_fc2_fp4_weight_only``."""

import torch

from torch_cute_ops.formats import resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.reference.moe_fc2_fp4 import expert_product


def moe_fc2_fp4_weight_only(
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> torch.Tensor:
    """The experts' products, weighted with ``alpha`` and added up, (M, N) in ``out_dtype`` or the dtype of ``a``; see
    the op's docstring."""
    fmt, layout = resolve_fp4_format(block_size, scale_format), resolve_scale_layout(scale_layout)
    return expert_product(a, None, w, w_scale, alpha, out_dtype or a.dtype, fmt, None, layout)
