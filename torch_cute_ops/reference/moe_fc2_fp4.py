"""Reference of ``moe_fc2_fp4``."""

import torch

from torch_cute_ops.formats import (
    SCALE_LAYOUTS,
    FP4Format,
    ScaleLayout,
    resolve_fp4_format,
    resolve_scale_layout,
)
from torch_cute_ops.formats.scale_layout import to_linear, weight_layout
from torch_cute_ops.reference.fp4_dequantize import decode_rows
from torch_cute_ops.reference.mm_fp4 import row_sums


def moe_fc2_fp4(
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> torch.Tensor:
    """The experts' products, weighted with ``alpha`` and added up, (M, N) in ``out_dtype``; see the op's docstring."""
    fmt, layout = resolve_fp4_format(block_size, scale_format), resolve_scale_layout(scale_layout)
    return expert_product(a, a_scale, w, w_scale, alpha, out_dtype, fmt, layout, weight_layout(layout))


def expert_product(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype,
    fmt: FP4Format,
    a_layout: ScaleLayout | None,
    w_layout: ScaleLayout,
) -> torch.Tensor:
    """``Σ_e alpha[:, e] · a_e @ w_e.T`` of codes (rows, E·I/2), or of numbers ``a`` (M, E·I) that have no scales.

    An expert's sum is taken in float64 and rounded to float32. In float32 it is then multiplied by ``alpha``, where
    that is not zero, and added to those of the experts before it; the total is rounded to ``out_dtype``.
    """
    (m, experts), n, blocks = alpha.shape, len(w), 2 * w.shape[1] // fmt.block_size
    w, w_scale = w.view(torch.uint8), to_linear(w_scale.view(fmt.scale_dtype), w_layout, n, blocks)
    left = a if a_scale is None or a_layout is None else decode_rows(a, a_scale, fmt, a_layout)
    total = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    ranges = (part.chunk(experts, dim=1) for part in (left, w, w_scale, alpha))
    for numbers, codes, scales, factor in zip(*ranges, strict=True):
        counts = factor != 0
        rows = _rows_of(counts)
        if isinstance(rows, torch.Tensor) and not len(rows):
            continue
        weight = decode_rows(codes, scales, fmt, SCALE_LAYOUTS["linear"]).double()
        sums = row_sums(numbers[rows].double(), weight).float()
        # Not a product with zero, which of NaN is NaN.
        total[rows] += torch.where(counts[rows], factor[rows] * sums, 0.0)
    return total.to(out_dtype)


def _rows_of(counts: torch.Tensor) -> torch.Tensor | slice:
    """Rows to compute, of (M, 1) that tells which count: a GPU, which would have to be waited for, computes all."""
    return slice(None) if counts.is_cuda else counts[:, 0].nonzero()[:, 0]
