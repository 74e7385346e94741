"""Operands whose products cancel, so that the order in which they are added shows in the sums."""

from __future__ import annotations

import torch

from torch_cute_ops.formats import NVFP4, FP4Format


def cancelling_matrix(
    rows: int, k: int, fmt: FP4Format, power: int, *, takes_away: bool, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (rows, k / 2) and scale bytes (rows, k / B), linear, of a matrix of which two halves of k are alike.

    Three quarters of the blocks have a scale of 2^``power``; those of the second half have the elements of the first,
    with the other sign if the matrix ``takes_away``. The others have one of 2^-``power``, and any elements. So of the
    products of two matrices, one of which takes away, those of the small blocks are left, and what was rounded while
    sums were large: 2^(4 · ``power``) times as large. With 5 it shows in float32, with 13 in float64.
    """
    assert k % (8 * fmt.block_size) == 0 and power <= (6 if fmt == NVFP4 else 63)
    codes = torch.randint(0, 256, (rows, 2, k // 4), dtype=torch.uint8, device=device)
    is_small = torch.arange(k // 2 // fmt.block_size, device=device) % 4 == 3
    again = codes[:, 0] ^ (0x88 if takes_away else 0)
    codes[:, 1] = torch.where(is_small.repeat_interleave(fmt.block_size // 2), codes[:, 1], again)
    small, large = (7 + e << 3 if fmt == NVFP4 else 127 + e for e in (-power, power))
    scales = torch.where(is_small, small, large).to(torch.uint8).repeat(rows, 2)
    return codes.flatten(1), scales
