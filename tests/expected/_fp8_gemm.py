"""Expected results of the FP8 GEMMs: sums in float64, with the error bound of tensor-core accumulation."""

from typing import NamedTuple

import numpy as np
import torch
from support import spec

from expected._epilogue import EPS, moved

BLOCK, STEP = 128, 32
PROMOTED = 512
"""Number of elements of K that tensor cores may add up before promotion, with per-token scales and without
``fast_accum``."""
LOST = {"cpu": 2.0**-24, "cuda": 2.0**-13}
"""Error of one tensor-core step, relative to its largest term. A step aligns 32 products and the previous sum to the
largest of these terms, and keeps 14 bits (measured by DeepSeek on an H800: "DeepSeek-V3 Technical Report", 3.3.2)."""


FOLDS = {"cpu": False, "cuda": True}
"""True for types of devices on which a kernel may fold MXFP8 operands: it may choose one scale, the largest, for each
128 activations and for each weight row, which rounds elements with smaller scales. (Only Hopper's kernels do.)"""


class Bounded(NamedTuple):
    """Sums (rows, N) in float64, and the error bound of each sum."""

    total: np.ndarray
    bound: np.ndarray


def numbers(codes: torch.Tensor) -> np.ndarray:
    """Decode e4m3 codes to float64."""
    bytes_ = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    return spec.scale_value(bytes_, "e4m3").astype(np.float64)


class Weight(NamedTuple):
    """A weight that FP8 tensor cores multiply: e4m3 numbers (N, K), and the scale of each block of a row, (N,
    ⌈K/128⌉)."""

    numbers: np.ndarray
    factors: np.ndarray


def fp8_weight(codes: torch.Tensor, scale: torch.Tensor) -> Weight:
    """Return an FP8 weight (N, K) whose scales each cover 128 rows, or one row."""
    factors = scale.detach().cpu().double().numpy()
    if len(factors) != len(codes):
        factors = factors.repeat(BLOCK, 0)[: len(codes)]
    return Weight(numbers(codes), factors)


def mx_factors(scale: torch.Tensor, rows: int, k: int) -> np.ndarray:
    """Return the values (rows, K/32), float64, of MXFP8 scales in any layout."""
    bytes_ = scale.detach().cpu().contiguous().view(torch.uint8).numpy()
    linear = spec.collect(bytes_, spec.layout_named(None, scale), rows, k // 32)
    return spec.scale_value(linear, "ue8m0").astype(np.float64)


def sum_of_block(left: np.ndarray, right: np.ndarray, device: str) -> Bounded:
    """Compute ``left @ right.T`` for elements that share a scale, with the error bound of tensor cores."""
    total, lost, before = (np.zeros((len(left), len(right))) for _ in range(3))
    for begin in range(0, left.shape[1], STEP):
        x, y = (operand[:, begin : begin + STEP] for operand in (left, right))
        largest = np.abs(x).max(1, initial=0)[:, None] * np.abs(y).max(1, initial=0)
        total += x @ y.T
        after = np.abs(total)
        lost += np.maximum(largest, np.maximum(before, after, out=before), out=largest)
        before = after
    return Bounded(total, lost * ((STEP + 1) * LOST[device]))


def mx_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: np.ndarray,
    columns: np.ndarray,
    alpha: np.ndarray | None,
    bias: np.ndarray | None,
    device: str,
) -> Bounded:
    """Compute ``alpha · a @ b.T + bias`` for MXFP8 matrices (rows, K) and (N, K), whose scales have the values ``rows``
    and ``columns``, with the error bound."""
    exact = gemm(a, Weight(numbers(b), columns), torch.from_numpy(rows), alpha, bias, device, STEP)
    if not FOLDS[device]:
        return exact
    (left, powers, off), (right, of_columns, off_right) = folded(numbers(a), rows), folded(numbers(b), columns, True)
    bound, size = (np.zeros(exact.total.shape) for _ in range(2))
    with np.errstate(all="ignore"):
        for block in range(powers.shape[1]):
            within = slice(block * BLOCK, (block + 1) * BLOCK)
            x, y, dx, dy = left[:, within], right[:, within], off[:, within], off_right[:, within]
            partial, lost = sum_of_block(x, y, device)
            lost += dx @ (np.abs(y) + dy).T + np.abs(x) @ dy.T
            factor = powers[:, block, None] * of_columns[:, block]
            size += np.abs(factor * partial)
            bound += np.abs(factor) * lost
        bound += size * (powers.shape[1] + 2) * 2 * EPS
        return Bounded(exact.total, np.maximum(exact.bound, moved(exact.total, bound, alpha, bias)))


def folded(values: np.ndarray, scales: np.ndarray, by_row: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers (rows, K) as multiples of the largest scale of each 128 elements, or of the row if ``by_row``,
    these scales (rows, ⌈K/128⌉), and the error of each number if it is rounded to e4m3. ``scales`` (rows, K/32) are the
    scales of ``values``."""
    size, blocks = BLOCK // STEP, scales.shape[1]
    if by_row:
        scales, own = np.broadcast_to(scales.max(1, keepdims=True, initial=0), scales.shape), scales
        values = values * (own / scales).repeat(STEP, 1)
    padded = np.pad(scales, ((0, 0), (0, -blocks % size)))
    largest = padded.reshape(len(scales), -(-blocks // size), size).max(2)
    relative = (scales / largest.repeat(size, 1)[:, :blocks]).repeat(STEP, 1)
    value = values * relative
    step = 2.0**-9  # between subnormal e4m3 numbers; the other numbers are not rounded
    off = np.where(np.abs(value) < 2.0**-6, np.abs(value - np.rint(value / step) * step), 0)
    return value, largest, off


def gemm(
    a: torch.Tensor,
    weight: Weight,
    a_scale: torch.Tensor,
    alpha: np.ndarray | None,
    bias: np.ndarray | None,
    device: str,
    size_of_block: int = BLOCK,
) -> Bounded:
    """Compute ``alpha · a @ weight.T + bias`` for ``a`` (rows, K) with scales (rows, ⌈K/size_of_block⌉), with the error
    bound."""
    left, (right, columns) = numbers(a), weight
    rows = a_scale.detach().cpu().double().t().numpy()
    n = len(right)
    total, bound, size = (np.zeros((len(left), n)) for _ in range(3))
    with np.errstate(all="ignore"):
        for block in range(len(rows)):
            columns_of_block = slice(block * size_of_block, (block + 1) * size_of_block)
            partial, lost = sum_of_block(left[:, columns_of_block], right[:, columns_of_block], device)
            factor = rows[block][:, None] * columns[:, block]
            total += factor * partial
            size += np.abs(factor * partial)
            bound += np.abs(factor) * lost
        bound += size * (len(rows) + 2) * 2 * EPS
        bound = moved(total, bound, alpha, bias)
        total = total * (1 if alpha is None else alpha) + (0 if bias is None else bias)
    return Bounded(total, bound)


def token_gemm(
    a: torch.Tensor,
    codes: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: np.ndarray | None,
    fast_accum: bool,
    device: str,
) -> Bounded:
    """Compute ``a_scale · b_scale · (a @ codes.T) + bias`` for ``a`` (rows, K) and ``codes`` (N, K), with the error
    bound.

    Args:
        a_scale: (rows, 1) or (1,).
        b_scale: (N,) or (1,).
        bias: (N,), or None.
        fast_accum: True if tensor cores may add up all of K, False if they add up at most ``PROMOTED`` elements.
        device: type of the device that computes.
    """
    left, right = numbers(a), numbers(codes)
    rows, columns = (scale.detach().cpu().double().numpy() for scale in (a_scale, b_scale))
    with np.errstate(all="ignore"):
        total, bound, size = sum_of_tokens(left, right, None if fast_accum else PROMOTED // BLOCK, device)
        bound = (bound + size * (left.shape[1] / BLOCK + 9) * 2 * EPS) * np.abs(rows)
        total = total * rows
        bound = moved(total, bound, columns, bias)
        total = total * columns + (0 if bias is None else bias)
    return Bounded(total, bound)


def sum_of_tokens(left: np.ndarray, right: np.ndarray, blocks: int | None, device: str) -> tuple[np.ndarray, ...]:
    """Return ``left @ right.T``, the error bound of tensor cores, and the sum of the magnitudes of all blocks' sums.

    Tensor cores may begin a sum at any block of 128 elements of K.

    Args:
        left, right: numbers (rows, K) and (N, K).
        blocks: largest number of blocks that tensor cores add up before promotion, or None for any number.
        device: type of the device that computes.
    """
    total, lost, size, low, high = (np.zeros((len(left), len(right))) for _ in range(5))
    begins: list[np.ndarray] = []
    for begin in range(0, left.shape[1], STEP):
        if begin % BLOCK == 0:
            size += np.abs(total - begins[-1]) if begins else 0
            begins = [*begins, total.copy()][-(blocks or 1) :]
            if blocks is None:
                low, high = np.minimum(low, total), np.maximum(high, total)
            else:
                low, high = np.min(begins, 0), np.max(begins, 0)
        x, y = (operand[:, begin : begin + STEP] for operand in (left, right))
        largest = np.abs(x).max(1, initial=0)[:, None] * np.abs(y).max(1, initial=0)
        for added in (0.0, x @ y.T):
            total += added
            np.maximum(largest, np.maximum(high - total, total - low), out=largest)
        lost += largest
    size += np.abs(total - begins[-1])
    return total, lost * ((STEP + 1) * LOST[device]), size


def assert_close(got: torch.Tensor, want: Bounded, dtype: torch.dtype) -> None:
    """Check that results are within the bound plus one rounding to the output's dtype."""
    assert got.dtype == dtype and tuple(got.shape) == want.total.shape, f"{got.dtype} {got.shape}"
    got = got.cpu()
    exact = torch.from_numpy(want.total)
    rounded = exact.float().to(dtype)
    assert torch.equal(got.isnan(), rounded.isnan())
    step = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    # A result near the dtype's largest number may be rounded to infinity or stay finite.
    largest = torch.finfo(dtype).max
    error = (got.double().clamp(-largest, largest) - exact.clamp(-largest, largest)).abs()
    wrong = ~rounded.isnan() & (error > torch.from_numpy(want.bound) + step)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums are off, first at {wrong.nonzero()[:4].tolist()}"
    )
