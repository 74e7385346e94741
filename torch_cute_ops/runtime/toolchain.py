"""What compiles kernels here: packages, the build of the DSL that is loaded, the processor, the environment."""

import functools
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

from torch_cute_ops.runtime import once

_LIBRARIES = "nvidia-cutlass-dsl-libs-"


def installed_packages() -> dict[str, str | None]:
    """Versions of the DSL's packages and of TVM-FFI; ``None``: not installed."""
    # One release of the DSL pins its parts to each other; but what is installed is what compiles.
    parts = (f"{_LIBRARIES}{part}" for part in ("base", "core", "cu12", "cu13"))
    names = ("nvidia-cutlass-dsl", *parts, "apache-tvm-ffi")
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_versions() -> tuple[str, ...]:
    """The packages that are installed, each as ``name==version``."""
    return tuple(f"{name}=={version}" for name, version in installed_packages().items() if version is not None)


@functools.cache
def compiler_flavour() -> str | None:
    """Which of the DSL's builds is loaded: ``"cu12"`` for CUDA 12, ``"cu13"`` for CUDA 13; imports the DSL.

    ``None`` if it is unknown, after a warning: kernels must then not be kept, since the two builds compile differently.
    """
    import cutlass  # chooses a build by the driver

    # What the loaded library says of itself; else its file's name; else the only build that is installed.
    major = getattr(getattr(cutlass, "CUDA_VERSION", None), "major", None)
    if isinstance(major, int):
        return f"cu{major}"
    files = {
        Path(getattr(module, "__file__", None) or "").name
        for name, module in list(sys.modules.items())
        if name.startswith("cutlass.")
    }
    found = {match.group(1) for file in files if (match := re.search(r"\.(cu\d+)\..*(so|pyd)$", file))}
    if not found:
        found = {
            name.removeprefix(_LIBRARIES)
            for name, version in installed_packages().items()
            if version is not None and name.startswith(f"{_LIBRARIES}cu")
        }
    if len(found) == 1:
        return found.pop()
    once.warn(
        "flavour",
        "cannot tell whether the DSL compiles for CUDA 12 or 13 (nvidia-cutlass-dsl %s): kernels of this process stay "
        "in memory; install one of its builds only, or a version of it that this package knows",
        _version("nvidia-cutlass-dsl"),
    )
    return None


_INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|bmi|fma|f16c|movbe|popcnt|abm|adx|sha|aes|vaes|v?pclmul|gfni|asimd|sve)"
)


@functools.cache
def host_features() -> tuple[str, ...]:
    """The processor's kind, then its instruction sets: the code that launches is compiled for all that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return platform.machine(), *sorted(flag for flag in flags if _INSTRUCTION_SETS.match(flag))


def compiler_environment() -> tuple[str, ...]:
    """The environment variables that the compiler reads, each as ``NAME=value``."""
    # The architecture is given to the compiler, and where its libraries are decides nothing.
    ignored = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS")
    return tuple(sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in ignored))
