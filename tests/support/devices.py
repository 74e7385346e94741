"""On which devices the tests run here."""

from __future__ import annotations

import os

import torch

from torch_cute_ops.runtime.arch import arch_of_device


def visible_to(worker: str, devices: str) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a worker of pytest-xdist: each begins with another GPU, and sees them all."""
    first, names = int(worker.removeprefix("gw")), devices.split(",")
    first %= len(names)
    return ",".join(names[first:] + names[:first])


# Before CUDA is asked for anything. The controller tells the devices.
if "TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_to(os.environ["PYTEST_XDIST_WORKER"], os.environ["TEST_GPUS"])


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
