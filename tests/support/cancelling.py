"""Operands whose products cancel, so that sums depend on the order in which the products are added."""

from __future__ import annotations

import torch

from torch_cute_ops.formats import NVFP4, FP4Format


def cancelling_matrix(
    rows: int, k: int, fmt: FP4Format, power: int, *, takes_away: bool, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (rows, k / 2) and linear scale bytes (rows, k / B) of a matrix whose two halves of k are alike.

    Three quarters of the blocks get a scale of 2^``power``; in the second half of k, they repeat the elements of the
    first half, negated if ``takes_away``. The other blocks get a scale of 2^-``power`` and random elements. If exactly
    one of two multiplied matrices is negated, the large products cancel. The products of the small blocks remain,
    together with the rounding errors of sums that were 2^(4 · ``power``) times as large. A ``power`` of 5 shows
    rounding in float32, 13 in float64.
    """
    assert k % (8 * fmt.block_size) == 0 and power <= (6 if fmt == NVFP4 else 63)
    codes = torch.randint(0, 256, (rows, 2, k // 4), dtype=torch.uint8, device=device)
    is_small = torch.arange(k // 2 // fmt.block_size, device=device) % 4 == 3
    again = codes[:, 0] ^ (0x88 if takes_away else 0)
    codes[:, 1] = torch.where(is_small.repeat_interleave(fmt.block_size // 2), codes[:, 1], again)
    small, large = (7 + e << 3 if fmt == NVFP4 else 127 + e for e in (-power, power))
    scales = torch.where(is_small, small, large).to(torch.uint8).repeat(rows, 2)
    return codes.flatten(1), scales
