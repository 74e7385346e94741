"""Identify the toolchain: installed packages, the build of the DSL, the processor, the environment; link and load
libraries."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch_cute_ops.runtime import once

RUNTIME: Final = "libcute_dsl_runtime.so"
LINK_SECONDS: Final = 120.0
_LIBRARIES = "nvidia-cutlass-dsl-libs-"


@functools.cache
def installed_packages() -> Mapping[str, str | None]:
    """Return the versions of the DSL's packages and of TVM-FFI. The version is None if a package is not installed."""
    # Cached: looking for the packages' metadata takes 1.2 ms, most of the time of a kernel's key.
    # Ask for each part's version: a release of the DSL pins its parts, but a user can install other versions.
    parts = (f"{_LIBRARIES}{part}" for part in ("base", "core", "cu12", "cu13"))
    names = ("nvidia-cutlass-dsl", *parts, "apache-tvm-ffi")
    return MappingProxyType({name: _version(name) for name in names})


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


def expected_flavour() -> str | None:
    """Return ``compiler_flavour()`` without importing the DSL, by the DSL's own rule: the newest installed build that
    the driver supports, or without a driver the newest build. Return None if no build is installed."""
    if "cutlass" in sys.modules:
        return compiler_flavour()
    return _chosen_flavour()


@functools.cache
def _chosen_flavour() -> str | None:
    prefix = f"{_LIBRARIES}cu"
    installed = installed_packages().items()
    majors = [int(name.removeprefix(prefix)) for name, version in installed if version and name.startswith(prefix)]
    if len(majors) > 1 and (driver := driver_version()) is not None:
        majors = [major for major in majors if major <= driver[0]]
    return f"cu{max(majors)}" if majors else None


def driver_version() -> tuple[int, int] | None:
    """Return the CUDA version that the driver supports, or None without a driver. Does not initialise CUDA."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def packaged_runtimes(flavour: str) -> Iterator[Path]:
    """Yield the DSL's runtime library in its installed package, if present."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        path = Path(folder) / flavour / "lib" / RUNTIME
        if path.is_file():
            yield path


def find_linker() -> str | None:
    """Return the path of a C compiler, which links object files, or None."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def link(linker: str, objects: Iterable[Path], library: Path) -> None:
    """Link object files to a shared library.

    Raises:
        OSError: if linking fails.
    """
    command = [linker, "-shared", "-o", str(library), *map(str, objects)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LINK_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    if done.returncode:
        raise OSError(f"{linker} cannot link {library.name}: {done.stderr.strip()}")


def load_library(path: Path, runtime: Path) -> Any:
    """Load a shared library of kernels without the DSL. The result's attributes are the kernels' functions.

    Args:
        path: shared library that ``link`` made.
        runtime: the DSL's runtime library.

    Raises:
        OSError, RuntimeError: if a library cannot be loaded.
    """
    import tvm_ffi

    # RTLD_GLOBAL: the kernels' library does not link the runtime library, so its symbols are looked up globally.
    ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(path))


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
