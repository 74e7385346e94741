"""How rows lie in the order of the experts that they are for: the buffers between the steps of an expert layer."""

from typing import Final

import torch

MAX_EXPERTS: Final = 512
MAX_TOPK: Final = 16
"""Most experts of a token."""


def rows_bound(tokens: int, topk: int, experts: int, alignment: int) -> int:
    """Rows of a contiguous buffer, however the tokens are routed: each expert's rows begin at a multiple of
    ``alignment``. ``tokens`` may be a symbol."""
    pairs = tokens * topk
    touched = torch.sym_min(experts, pairs)
    return (pairs + touched * (alignment - 1)) // alignment * alignment


def used_rows(rows: int, offsets: torch.Tensor | None, counts: torch.Tensor | None) -> torch.Tensor:
    """Which of a buffer's rows are some expert's (``rows``,), the others being padding.

    Each expert has ``counts`` (E,) rows from ``offsets`` (E + 1,) on; all up to the next offset without ``counts``; and
    an equal share of the buffer without ``offsets``.
    """
    if offsets is None:
        assert counts is not None
        share = rows // counts.shape[0]
        return (torch.arange(share, device=counts.device) < counts[:, None]).flatten()
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    if counts is None:
        return (row >= offsets[0]) & (row < offsets[-1])
    expert = torch.searchsorted(offsets.contiguous(), row, right=True) - 1
    within = expert.clamp(0, counts.shape[0] - 1)
    return (expert == within) & (row - offsets[within] < counts[within])


def zeroed_rows(tensor: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros for what is not ``used``, which fits its shape."""
    if tensor.dtype.itemsize > 1:
        return torch.where(used, tensor, 0)
    return torch.where(used, tensor.view(torch.uint8), 0).view(tensor.dtype)
