"""Collect the hardware and the software versions of a run, so that two runs can be compared. Host names and paths are
left out."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

from torch_cute_ops.runtime.provenance import source_digest

PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels", "humming-kernels", "triton", "torch-cute-ops")


def package_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, or None if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def gpu_properties(device: torch.device) -> dict[str, Any]:
    """Return name, capability, SM count, memory and L2 size (bytes) of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
    }


def collect(device: torch.device) -> dict[str, Any]:
    """Return the GPU's properties and the software versions, as stored in the JSON result file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **(gpu_properties(device) if device.type == "cuda" else {"gpu": None}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: package_version(name) for name in PACKAGES},
        "source_digest": source_digest(),
    }


def headline(environment: dict[str, Any]) -> str:
    """Return one line with GPU, driver, torch, CUDA and the relevant packages."""
    parts = [str(environment["gpu"] or "no GPU")]
    if environment.get("driver"):
        parts.append(f"driver {environment['driver']}")
    parts += [f"torch {environment['torch']}", f"CUDA {environment['cuda']}"]
    parts += [f"{name} {environment[name]}" for name in PACKAGES if environment.get(name)]
    return " · ".join([*parts, environment["date"]])
