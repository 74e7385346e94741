"""Devices on which the tests run."""

from __future__ import annotations

import os

import torch

from torch_cute_ops.runtime.arch import arch_of_device


def visible_to(worker: str, devices: str) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a worker of pytest-xdist: all GPUs, but each worker starts with another
    GPU."""
    first, names = int(worker.removeprefix("gw")), devices.split(",")
    first %= len(names)
    return ",".join(names[first:] + names[:first])


# Set the variable before CUDA is initialised. The controller passes the devices in TEST_GPUS.
if "TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_to(os.environ["PYTEST_XDIST_WORKER"], os.environ["TEST_GPUS"])


def gpu_missing() -> str | None:
    """Return the reason that kernels cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch.cuda.is_available() is False"
    try:
        arch_of_device(torch.cuda.current_device())
    except RuntimeError as error:
        return str(error)
    return None


GPU_MISSING = gpu_missing()
DEVICES = ("cpu",) if GPU_MISSING else ("cpu", "cuda")
