"""Epilogue of a GEMM on fp32 sums, and its effect on error bounds."""

import numpy as np

EPS = 2.0**-24


def of_rows(value, expert=None) -> np.ndarray | None:
    """Return ``alpha`` or a bias in float64, in a shape that broadcasts to rows (M, N). If ``value`` differs by expert,
    return the values of ``expert``."""
    if value is None:
        return None
    value = value.detach().cpu().double().numpy()
    if value.size == 1:
        return value.reshape(())
    return value if expert is None else value[expert]


def finished(total: np.ndarray, alpha, bias, row_scale=None) -> np.ndarray:
    """Apply the epilogue to float32 sums: ``fl32(fl32(fl32(total · row_scale) · alpha) + bias)``."""
    total = total.astype(np.float32)
    with np.errstate(all="ignore"):
        if row_scale is not None:
            total = (total.astype(np.float64) * row_scale).astype(np.float32)
        if alpha is not None:
            total = (total.astype(np.float64) * alpha).astype(np.float32)
        if bias is not None:
            total = (total.astype(np.float64) + bias).astype(np.float32)
    return total


def moved(total: np.ndarray, bound: np.ndarray, alpha, bias, row_scale=None) -> np.ndarray:
    """Return the error bound after the epilogue, if the sum ``total`` is off by at most ``bound``. The epilogue adds
    up to three roundings."""
    with np.errstate(all="ignore"):
        if row_scale is not None:
            total, bound = total * row_scale, bound * np.abs(row_scale) + np.abs(total * row_scale) * EPS
        if alpha is not None:
            total, bound = total * alpha, bound * np.abs(alpha) + np.abs(total * alpha) * EPS
        if bias is not None:
            bound = bound + (np.abs(total) + np.abs(total + bias)) * EPS
    return bound
