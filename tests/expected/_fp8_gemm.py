"""What the FP8 GEMMs must answer: sums in float64, within what the sums of tensor
cores may lose."""

from typing import NamedTuple

import numpy as np
import torch
from support import spec

from expected._epilogue import EPS, moved

BLOCK, STEP = 128, 32
LOST = {"cpu": 2.0**-24, "cuda": 2.0**-13}
"""Of a term, as against the largest of a step: a step of tensor cores aligns 32 products and the sum before them to the
largest, of which 14 bits stay (measured by DeepSeek on an H800: "DeepSeek-V3 Technical Report", 3.3.2)."""


class Bounded(NamedTuple):
    """Sums (rows, N), and how far off each may be."""

    total: np.ndarray
    bound: np.ndarray


def numbers(codes: torch.Tensor) -> np.ndarray:
    """The numbers of e4m3 codes, in float64."""
    bytes_ = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    return spec.scale_value(bytes_, "e4m3").astype(np.float64)


class Weight(NamedTuple):
    """A weight as FP8 tensor cores take it: e4m3 numbers (N, K), and what each block of a row is multiplied by,
    (N, ⌈K/128⌉)."""

    numbers: np.ndarray
    factors: np.ndarray


def fp8_weight(codes: torch.Tensor, scale: torch.Tensor) -> Weight:
    """An FP8 weight (N, K), with a scale for 128 of its rows."""
    factors = scale.detach().cpu().double().numpy().repeat(BLOCK, 0)[: len(codes)]
    return Weight(numbers(codes), factors)


def sum_of_block(left: np.ndarray, right: np.ndarray, device: str) -> Bounded:
    """``left @ right.T`` of the elements that share a scale, and what tensor cores may lose of it."""
    total, lost, before = (np.zeros((len(left), len(right))) for _ in range(3))
    for begin in range(0, left.shape[1], STEP):
        x, y = (operand[:, begin : begin + STEP] for operand in (left, right))
        largest = np.abs(x).max(1, initial=0)[:, None] * np.abs(y).max(1, initial=0)
        total += x @ y.T
        after = np.abs(total)
        lost += np.maximum(largest, np.maximum(before, after, out=before), out=largest)
        before = after
    return Bounded(total, lost * ((STEP + 1) * LOST[device]))


def gemm(
    a: torch.Tensor,
    weight: Weight,
    a_scale: torch.Tensor,
    alpha: np.ndarray | None,
    bias: np.ndarray | None,
    device: str,
) -> Bounded:
    """``alpha · a @ weight.T + bias`` of ``a`` (rows, K) with scales (⌈K/128⌉, rows)."""
    left, (right, columns) = numbers(a), weight
    rows = a_scale.detach().cpu().double().numpy()
    n = len(right)
    total, bound, size = (np.zeros((len(left), n)) for _ in range(3))
    with np.errstate(all="ignore"):
        for block in range(len(rows)):
            columns_of_block = slice(block * BLOCK, (block + 1) * BLOCK)
            partial, lost = sum_of_block(left[:, columns_of_block], right[:, columns_of_block], device)
            factor = rows[block][:, None] * columns[:, block]
            total += factor * partial
            size += np.abs(factor * partial)
            bound += np.abs(factor) * lost
        bound += size * (len(rows) + 2) * 2 * EPS
        bound = moved(total, bound, alpha, bias)
        total = total * (1 if alpha is None else alpha) + (0 if bias is None else bias)
    return Bounded(total, bound)


def assert_close(got: torch.Tensor, want: Bounded, dtype: torch.dtype) -> None:
    """Within the bound, and one rounding to the output's dtype."""
    assert got.dtype == dtype and tuple(got.shape) == want.total.shape, f"{got.dtype} {got.shape}"
    got = got.cpu()
    exact = torch.from_numpy(want.total)
    rounded = exact.float().to(dtype)
    assert torch.equal(got.isnan(), rounded.isnan())
    step = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    # What exceeds the dtype may have become infinite, or just not.
    largest = torch.finfo(dtype).max
    error = (got.double().clamp(-largest, largest) - exact.clamp(-largest, largest)).abs()
    wrong = ~rounded.isnan() & (error > torch.from_numpy(want.bound) + step)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums are off, first at {wrong.nonzero()[:4].tolist()}"
    )
