"""On which devices the tests run here."""

from __future__ import annotations

import torch

from torch_cute_ops.runtime.arch import arch_of_device


def gpu_missing() -> str | None:
    """Why kernels cannot run here; ``None`` if they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch.cuda.is_available() is False"
    try:
        arch_of_device(torch.cuda.current_device())
    except RuntimeError as error:
        return str(error)
    return None


GPU_MISSING = gpu_missing()
DEVICES = ("cpu",) if GPU_MISSING else ("cpu", "cuda")
