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
    # Calls ask for it each time, and torch.sym_min takes several times as long.
    touched = min(experts, pairs) if isinstance(pairs, int) else torch.sym_min(experts, pairs)
    return (pairs + touched * (alignment - 1)) // alignment * alignment


def expert_of_rows(rows: int, offsets: torch.Tensor | None, counts: torch.Tensor | None) -> torch.Tensor:
    """The expert of each of a buffer's rows (``rows``,); -1 for padding.

    Each expert has ``counts`` (E,) rows from ``offsets`` (E + 1,) on; all up to the next offset without ``counts``; and
    an equal share of the buffer without ``offsets``.
    """
    if offsets is None:
        assert counts is not None
        share = rows // counts.shape[0]
        begins = torch.arange(counts.shape[0] + 1, dtype=counts.dtype, device=counts.device) * share
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
    """Which of a buffer's rows are some expert's (``rows``,), the others being padding; as for ``expert_of_rows``."""
    return expert_of_rows(rows, offsets, counts) >= 0


def merged(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``new`` where ``mask`` is true, else ``old``, of any dtype."""
    if new.dtype.itemsize > 1:
        return torch.where(mask, new, old)
    return torch.where(mask, new.view(torch.uint8), old.view(torch.uint8)).view(new.dtype)


def zeroed_rows(tensor: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros for what is not ``used``, which fits its shape."""
    if tensor.dtype.itemsize > 1:
        return torch.where(used, tensor, 0)
    return torch.where(used, tensor.view(torch.uint8), 0).view(tensor.dtype)
