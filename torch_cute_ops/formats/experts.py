"""Layout of the buffers that connect the steps of an expert layer. The rows of a buffer are grouped by expert."""

from typing import Final

import torch

MAX_EXPERTS: Final = 1024
USUAL_EXPERTS: Final = 512
"""Largest number of experts for which kernels use their usual tables in shared memory. Kernels for more experts use
larger tables.
"""
MAX_TOPK: Final = 32
"""Largest number of experts per token."""


def rows_bound(tokens: int, topk: int, experts: int, alignment: int) -> int:
    """Return the number of rows of a contiguous buffer that is large enough for any routing.

    In such a buffer, the first row of each expert is a multiple of ``alignment``. ``tokens`` may be a symbol.
    """
    pairs = tokens * topk
    # Use the plain ``min`` if possible: this code runs in each call, and ``torch.sym_min`` takes several times as long.
    touched = min(experts, pairs) if isinstance(pairs, int) else torch.sym_min(experts, pairs)
    return (pairs + touched * (alignment - 1)) // alignment * alignment


def expert_of_rows(rows: int, offsets: torch.Tensor | None, counts: torch.Tensor | None) -> torch.Tensor:
    """Return the expert of each row of a buffer, or -1 for padding.

    Args:
        rows: number of rows of the buffer.
        offsets: (E + 1,) first row of each expert, or None if the buffer is divided equally among the experts.
        counts: (E,) number of rows of each expert, or None if an expert's rows extend to the next offset.

    Returns:
        (``rows``,) indices of experts.
    """
    if offsets is None:
        assert counts is not None
        rows_each = rows // counts.shape[0]
        begins = torch.arange(counts.shape[0] + 1, dtype=counts.dtype, device=counts.device) * rows_each
    else:
        begins = offsets.contiguous()
    row = torch.arange(rows, dtype=begins.dtype, device=begins.device)
    expert = torch.searchsorted(begins, row, right=True) - 1
    within = expert.clamp(0, begins.shape[0] - 2)
    used = expert == within
    if counts is not None:
        used &= row - begins[within] < counts[within]
    return torch.where(used, expert, -1)


def used_rows(rows: int, offsets: torch.Tensor | None, counts: torch.Tensor | None) -> torch.Tensor:
    """Return a mask (``rows``,): True for an expert's row, False for padding. ``expert_of_rows`` describes the
    arguments."""
    return expert_of_rows(rows, offsets, counts) >= 0


def merged(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``new`` where ``mask`` is True and ``old`` elsewhere, for tensors of any dtype."""
    if new.dtype.itemsize > 1:
        return torch.where(mask, new, old)
    return torch.where(mask, new.view(torch.uint8), old.view(torch.uint8)).view(new.dtype)


def zeroed_rows(tensor: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with zeros where ``used`` is False. ``used`` must broadcast to the tensor's shape."""
    if tensor.dtype.itemsize > 1:
        return torch.where(used, tensor, 0)
    return torch.where(used, tensor.view(torch.uint8), 0).view(tensor.dtype)
