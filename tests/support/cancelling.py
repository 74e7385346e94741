"""Matrices whose products cancel, so that the result of a GEMM depends on the order of additions."""

from __future__ import annotations

import torch

from torch_cute_ops.formats import NVFP4, FP4Format


def cancelling_matrix(
    rows: int, k: int, fmt: FP4Format, power: int, *, takes_away: bool, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (rows, k / 2) and linear scale bytes (rows, k / B) of a matrix whose second half along k repeats the
    first half.

    In three quarters of the blocks the scale is 2^``power``, and the second half repeats the elements, negated if
    ``takes_away``. In the other blocks the scale is 2^-``power``, and elements are random in both halves. In the
    product of a matrix with ``takes_away`` and a matrix without, the large terms cancel. The result consists of the
    products of the small blocks, and of the rounding errors of sums that were 2^(4 · ``power``) times as large. A
    ``power`` of 5 makes rounding in float32 visible, and a ``power`` of 13 makes rounding in float64 visible.
    """
    assert k % (8 * fmt.block_size) == 0 and power <= (6 if fmt == NVFP4 else 63)
    codes = torch.randint(0, 256, (rows, 2, k // 4), dtype=torch.uint8, device=device)
    is_small = torch.arange(k // 2 // fmt.block_size, device=device) % 4 == 3
    again = codes[:, 0] ^ (0x88 if takes_away else 0)
    codes[:, 1] = torch.where(is_small.repeat_interleave(fmt.block_size // 2), codes[:, 1], again)
    small, large = (7 + e << 3 if fmt == NVFP4 else 127 + e for e in (-power, power))
    scales = torch.where(is_small, small, large).to(torch.uint8).repeat(rows, 2)
    return codes.flatten(1), scales
