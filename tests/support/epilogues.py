"""Operands for GEMM epilogues, and the epilogues' results, computed with NumPy."""

from __future__ import annotations

import numpy as np
import torch

from torch_cute_ops.formats.experts import expert_of_rows
from torch_cute_ops.kernels.common.core.layouts import Epilogue

Tensor = torch.Tensor
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def epilogues(alphas: tuple[str | None, ...]) -> list[Epilogue]:
    """Return epilogues that together contain every pair of result dtype, alpha and bias (none, float32, result
    dtype)."""
    chosen = []
    for i, alpha in enumerate(alphas):
        for j, bias in enumerate((None, torch.float32, "out")):
            out_dtype = TYPES[(i + j) % len(TYPES)]
            chosen.append(Epilogue(out_dtype, alpha, out_dtype if bias == "out" else bias))
    return chosen


def operands(epilogue: Epilogue, n: int, experts: int | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return random ``alpha`` and bias for which most products and sums of the epilogue must be rounded."""
    vector = (n,) if experts is None else (experts, n)
    sizes = {None: None, "one": (1,), "expert": (experts,), "column": vector, "expert_column": vector}
    size = sizes[epilogue.alpha]
    alpha = None if size is None else torch.rand(size) + 0.5
    bias = None if epilogue.bias_dtype is None else (torch.randn(vector) * 50).to(epilogue.bias_dtype)
    return alpha, bias


def row_scales(epilogue: Epilogue, m: int) -> Tensor | None:
    """Return random scales of the rows, or None if the epilogue takes none."""
    return torch.rand(m) + 0.5 if epilogue.has_row_scale else None


def finished(
    sums: Tensor,
    epilogue: Epilogue,
    alpha: Tensor | None,
    bias: Tensor | None,
    expert: int | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Apply the epilogue to float32 accumulators ``sums`` (rows, N).

    The products with the row's scale and with alpha are rounded to float32, the sum with the bias is rounded to
    float32, and the result is rounded to its dtype.

    Args:
        expert: index of the expert that owns the rows in a grouped GEMM, or None.
        row_scale: scales of the rows, (rows,), or None.
    """
    total = sums.numpy()
    assert total.dtype == np.float32
    if row_scale is not None:
        total = total * row_scale.numpy()[:, None]
    if alpha is not None:
        factor = alpha.numpy()
        total = total * (factor[expert] if epilogue.is_by_expert else factor)
    if bias is not None:
        addend = bias.float().numpy()
        total = total + (addend if expert is None else addend[expert])
    assert total.dtype == np.float32
    return torch.from_numpy(np.asarray(total)).to(epilogue.out_dtype)


def finished_by_expert(
    sums: Tensor,
    offsets: Tensor | None,
    counts: Tensor | None,
    epilogue: Epilogue,
    alpha: Tensor | None,
    bias: Tensor | None,
    untouched: float,
) -> Tensor:
    """Apply ``finished`` to the rows of each expert in a grouped GEMM's accumulators ``sums`` (..., N). Fill rows
    without an expert with ``untouched``."""
    rows = sums.view(-1, sums.shape[-1])
    want = torch.full(rows.shape, untouched, dtype=epilogue.out_dtype)
    owner = expert_of_rows(len(rows), offsets, counts)
    for expert in owner[owner >= 0].unique().tolist():
        own = owner == expert
        want[own] = finished(rows[own], epilogue, alpha, bias, expert)
    return want.view(sums.shape)
