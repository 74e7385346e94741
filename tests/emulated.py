"""What tests of emulated kernels share: poison, comparison by bits, and edits of PTX."""

import re
from typing import Any

import torch
from kernel_grid import BF16, FP16, FP32

CPU = torch.device("cpu")
POISON = 0xEE
HOPPER, BLACKWELL = "sm_90a", "sm_100a"
WAIT = r"mbarrier\.try_wait"
PASSED = "setp.eq.u32 P1, 0, 0;"
"""In place of a wait of the DSL."""


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What no kernel writes."""
    return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype).squeeze(-1)


def equal(name: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Bit for bit; but any NaN of the input dtypes is as good as another."""
    if want is not None:
        if want.dtype in (BF16, FP16, FP32):
            got, want = (t.masked_fill(t.isnan(), torch.nan) for t in (got, want))
        got, want = (t.contiguous().view(torch.uint8).reshape(-1) for t in (got, want))
        where = (got != want).nonzero()[:5].flatten().tolist()
        assert not where, f"{name} differs, first in bytes {where}"


def changed(pattern: str, number: int = 0, to: str = "") -> Any:
    """An edit of PTX: one of the instructions that match becomes another, or goes."""

    def edit(ptx: str) -> str:
        match = list(re.finditer(rf"^\s*{pattern}[^;]*;", ptx, re.M))[number]
        return ptx[: match.start()] + to + ptx[match.end() :]

    return edit


def replaced(pattern: str, to: str = "") -> Any:
    """An edit of PTX: whatever matches becomes something else, or goes."""
    return lambda ptx: re.sub(pattern, to, ptx)
