"""What a GEMM's epilogue makes of fp32 sums, and how far that moves an error."""

import numpy as np

EPS = 2.0**-24


def of_rows(value, expert=None) -> np.ndarray | None:
    """``alpha`` or a bias in float64, as it multiplies or is added to rows (M, N); of an expert, where these differ."""
    if value is None:
        return None
    value = value.detach().cpu().double().numpy()
    if value.size == 1:
        return value.reshape(())
    return value if expert is None else value[expert]


def finished(total: np.ndarray, alpha, bias) -> np.ndarray:
    """``fl32(fl32(total · alpha) + bias)`` of float32 sums."""
    total = total.astype(np.float32)
    with np.errstate(all="ignore"):
        if alpha is not None:
            total = (total.astype(np.float64) * alpha).astype(np.float32)
        if bias is not None:
            total = (total.astype(np.float64) + bias).astype(np.float32)
    return total


def moved(total: np.ndarray, bound: np.ndarray, alpha, bias) -> np.ndarray:
    """How far the result may be off, where the sum ``total`` may be off by ``bound``: two roundings more."""
    with np.errstate(all="ignore"):
        if alpha is not None:
            total, bound = total * alpha, bound * np.abs(alpha) + np.abs(total * alpha) * EPS
        if bias is not None:
            bound = bound + (np.abs(total) + np.abs(total + bias)) * EPS
    return bound
