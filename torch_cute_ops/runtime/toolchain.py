"""Identify the toolchain: installed packages, the loaded build of the DSL, the processor, the environment."""

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path

from torch_cute_ops.runtime import once

_LIBRARIES = "nvidia-cutlass-dsl-libs-"


def installed_packages() -> dict[str, str | None]:
    """Return the versions of the DSL's packages and of TVM-FFI. The version is None if a package is not installed."""
    # Ask for each part's version: a release of the DSL pins its parts, but a user can install other versions.
    parts = (f"{_LIBRARIES}{part}" for part in ("base", "core", "cu12", "cu13"))
    names = ("nvidia-cutlass-dsl", *parts, "apache-tvm-ffi")
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_versions() -> tuple[str, ...]:
    """Return the installed packages, each as ``name==version``."""
    return tuple(f"{name}=={version}" for name, version in installed_packages().items() if version is not None)


@functools.cache
def compiler_flavour() -> str | None:
    """Return the loaded build of the DSL: ``"cu12"`` for CUDA 12, ``"cu13"`` for CUDA 13. Imports the DSL.

    If the build is unknown, warn and return None. Kernels must then not be stored, because the two builds compile a
    kernel differently.
    """
    import cutlass  # importing it loads the build that fits the driver

    # Use the loaded library's own version, or else the only installed build.
    major = getattr(getattr(cutlass, "CUDA_VERSION", None), "major", None)
    if isinstance(major, int):
        return f"cu{major}"
    found = [
        name.removeprefix(_LIBRARIES)
        for name, version in installed_packages().items()
        if version is not None and name.startswith(f"{_LIBRARIES}cu")
    ]
    if len(found) == 1:
        return found[0]
    once.warn(
        "flavour",
        "cannot tell if the DSL (nvidia-cutlass-dsl %s) compiles for CUDA 12 or 13: kernels of this process stay in "
        "memory; install only one of its builds, or a version that this package knows",
        _version("nvidia-cutlass-dsl"),
    )
    return None


_INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|bmi|fma|f16c|movbe|popcnt|abm|adx|sha|aes|vaes|v?pclmul|gfni|asimd|sve)"
)


@functools.cache
def host_features() -> tuple[str, ...]:
    """Return the processor's architecture and instruction sets. The host code that launches a kernel is compiled for
    them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return platform.machine(), *sorted(flag for flag in flags if _INSTRUCTION_SETS.match(flag))


def compiler_environment() -> tuple[str, ...]:
    """Return the environment variables that the compiler reads, each as ``NAME=value``."""
    # Ignored: the architecture is passed to the compiler explicitly, and the libraries' path does not affect the
    # result.
    ignored = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS")
    return tuple(sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in ignored))
