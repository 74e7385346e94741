"""Reference of ``moe_fc2_fp4``."""

from typing import Any

import torch

from torch_cute_ops.formats import SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.reference.fp4_dequantize import decode_rows
from torch_cute_ops.reference.mm_fp4 import activations, default_dtype, formats_of, matmul_rows


def moe_fc2_fp4(
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    a_scale: torch.Tensor | None = None,
    **formats: Any,
) -> torch.Tensor:
    """Multiply by each expert's weight, add ``bias``, and sum over the experts with weights ``alpha``: (M, N).

    See the op's docstring. 16-bit activations need no scales.
    """
    dtype = out_dtype or default_dtype(a, a_scale)
    resolved = formats_of(w_scale if a_scale is None else a_scale, **formats)
    return expert_gemm(a, a_scale, w.mT, w_scale, alpha, bias, dtype, *resolved)


def expert_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fmt: FP4Format,
    a_layout: ScaleLayout | None,
    w_layout: ScaleLayout | None,
) -> torch.Tensor:
    """Compute ``Σ_e alpha[:, e] · (a_e @ w_e.T + bias[e])``, (M, N) in ``out_dtype``.

    ``a`` contains codes (M, E·I/2) with scales ``a_scale``, or 16-bit numbers (M, E·I) without scales. An expert's
    product is accumulated in float64 and rounded to float32. The next steps are in float32, expert by expert: add the
    bias, multiply by ``alpha``, add to the total. Experts with ``alpha == 0`` are skipped. The total is rounded to
    ``out_dtype``.
    """
    assert w_layout is not None
    (m, experts), n, blocks = alpha.shape, len(w), 2 * w.shape[1] // fmt.block_size
    w, w_scale = w.view(torch.uint8), to_linear(w_scale.view(fmt.scale_dtype), w_layout, n, blocks)
    left = activations(a, a_scale, fmt, a_layout)
    total = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    ranges = (tensor.chunk(experts, dim=1) for tensor in (left, w, w_scale, alpha))
    biases = [None] * experts if bias is None else list(bias.float())
    for numbers, codes, scales, factor, added in zip(*ranges, biases, strict=True):
        counts = factor != 0
        rows = rows_of(counts)
        if isinstance(rows, torch.Tensor) and not len(rows):
            continue
        weight = decode_rows(codes, scales, fmt, SCALE_LAYOUTS["linear"]).double()
        product = matmul_rows(numbers[rows], weight).float()
        if added is not None:
            product = product + added
        # Select with ``torch.where`` instead of a zero factor, because zero times a NaN product would be NaN.
        total[rows] += torch.where(counts[rows], factor[rows] * product, 0.0)
    return total.to(out_dtype)


def rows_of(counts: torch.Tensor) -> torch.Tensor | slice:
    """Return the rows whose element in the mask (M, 1) is True. On a GPU return all rows, because a selection would
    synchronise."""
    return slice(None) if counts.is_cuda else counts[:, 0].nonzero()[:, 0]
