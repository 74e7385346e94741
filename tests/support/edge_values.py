"""Numbers at which rounding and range matter."""

import numpy as np
import torch

from support import spec


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite value of a 16-bit dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def neighbours(values: np.ndarray, ulps: int = 2) -> torch.Tensor:
    """Return these numbers with both signs, and their fp32 neighbours up to ``ulps`` away."""
    bits = np.asarray(values, np.float32).view(np.int32)[:, None] + np.arange(-ulps, ulps + 1, dtype=np.int32)
    near = np.maximum(bits, 0).view(np.float32).reshape(-1)
    near = near[np.isfinite(near)]
    return torch.from_numpy(np.concatenate([near, -near]))


def fp32_edges() -> torch.Tensor:
    """Return fp32 numbers around each e2m1 number, each rounding boundary, powers of two, zero, and the largest fp32
    number."""
    powers = 2.0 ** np.arange(-149, 128)
    return neighbours(np.array([*spec.E2M1, *spec.E2M1_BOUNDARIES, 7, 8, spec.FLT_MAX, *powers]))
