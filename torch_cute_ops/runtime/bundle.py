"""Bundles: folders of kernels that run without the compiler. ``bundle_build`` writes them.

``manifest.json`` describes the kernels' origin, and one shared library for each architecture contains them. A process
that loads a bundle needs TVM-FFI and the DSL's runtime library, ``libcute_dsl_runtime.so``, and does not import the
DSL.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from torch_cute_ops.runtime import files, settings, toolchain
from torch_cute_ops.runtime.provenance import kernel_digest

MANIFEST: Final = "manifest.json"
FORMAT: Final = 2
RUNTIME: Final = "libcute_dsl_runtime.so"
MANIFEST_BYTES: Final = 64 * 2**20
LIBRARY_BYTES: Final = 2**30
"""Size limits: larger files were not made by ``bundle_build``."""


class BundleError(ValueError):
    """Bundle that cannot be built, is damaged, or does not fit this process."""


class Bundle:
    """Bundle that this process loads kernels from.

    Args:
        root: folder of the bundle.

    Raises:
        BundleError: if ``root`` is not a bundle or does not fit this process, with the reason.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.manifest: dict[str, Any] = files.parse_json(files.read_again(root / MANIFEST, MANIFEST_BYTES))
        except (OSError, ValueError) as error:
            raise BundleError(f"{root} is not a bundle: {type(error).__name__}: {error}") from None
        if wrong := _reason_invalid(self.manifest):
            raise BundleError(f"{root} is not a bundle: {MANIFEST}: {wrong}")
        self._check_fit()
        self._libraries: dict[str, Any] = {}

    def _check_fit(self) -> None:
        try:
            tvm_ffi = importlib.metadata.version("apache-tvm-ffi")
        except importlib.metadata.PackageNotFoundError:
            raise BundleError(f"the bundle {self.root} needs apache-tvm-ffi, which is not installed") from None
        for name, bundled, here in (
            ("digest of the kernel sources", self.manifest["sources"], kernel_digest()),
            ("version of apache-tvm-ffi", self.manifest["tvm_ffi"], tvm_ffi),
        ):
            if bundled != here:
                raise BundleError(f"the bundle {self.root} does not fit: its {name} is {bundled}, here it is {here}")
        machine, *features = self.manifest["host"]
        present = toolchain.host_features()
        if machine != present[0] or not set(features) <= set(present):
            lacking = ", ".join(sorted(set(features) - set(present))) or machine
            raise BundleError(
                f"the bundle {self.root} does not fit: its launching code needs a processor with {lacking}; build the "
                "bundle on a processor like this one"
            )

    def has(self, digest: str, arch: str) -> bool:
        """Return True if the bundle contains the kernel with this digest for ``arch``."""
        return digest in self.manifest["archs"].get(arch, {"kernels": {}})["kernels"]

    def function(self, digest: str, arch: str) -> Callable[..., None] | None:
        """Load the function of the kernel with this digest, or return None if the bundle lacks the kernel.

        Raises:
            BundleError: if the bundle contains no kernels for ``arch``, or its library is damaged or cannot be loaded.
        """
        library = self.manifest["archs"].get(arch)
        if library is None:
            archs = ", ".join(self.manifest["archs"])
            raise BundleError(f"the bundle {self.root} contains kernels for {archs}; this device is {arch}")
        symbol = library["kernels"].get(digest)
        if symbol is None:
            return None
        if arch not in self._libraries:
            self._libraries[arch] = self._load(library)
        try:
            function: Callable[..., None] = getattr(self._libraries[arch], symbol)
        except AttributeError:
            lacking = f"{library['file']} contains no function {symbol}"
            raise BundleError(f"the bundle {self.root} is damaged: {lacking}") from None
        return function

    def _load(self, library: dict[str, Any]) -> Any:
        path = self._path(library["file"])
        self._check_digest(path, library["sha256"])
        import tvm_ffi

        runtime = self.runtime()
        try:
            # RTLD_GLOBAL, because the library's undefined symbols are looked up among the global symbols.
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            return tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError) as error:
            raise BundleError(f"the bundle {self.root} cannot be loaded with {runtime}: {error}") from None

    def _path(self, name: str) -> Path:
        """Return the path of a file of the bundle.

        Raises:
            BundleError: if the file is a symbolic link that leads out of the bundle.
        """
        path = self.root / name
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(os.path.realpath(self.root)):
            raise BundleError(f"the bundle {self.root} is damaged: {name} leads out of it, to {target}")
        return path

    def _check_digest(self, path: Path, sha256: str, remedy: str = "") -> None:
        """Check that a file's content matches the manifest."""
        try:
            content = files.read_again(path, LIBRARY_BYTES)
        except (OSError, ValueError) as error:
            raise BundleError(f"the bundle {self.root} is damaged: {error}") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise BundleError(f"the bundle {self.root} is damaged: {path} does not match {MANIFEST}{remedy}")

    def runtime(self) -> Path:
        """Find the DSL's runtime library: the configured file, else the bundle's file, else the DSL package's file.

        Raises:
            BundleError: if there is no library, or if it is not configured and differs from the library that the bundle
                was built with.
        """
        if settings.DSL_RUNTIME is not None:
            if not settings.DSL_RUNTIME.is_file():
                raise BundleError(f"TORCH_CUTE_OPS_DSL_RUNTIME={settings.DSL_RUNTIME} is not a file")
            return settings.DSL_RUNTIME
        flavour = self.manifest["flavour"]
        bundled = self._path(self.manifest["runtime"]["file"])
        # exists(), not is_file(): reading a FIFO or a device instead of the file must fail, not fall back.
        found = bundled if bundled.exists() else next(packaged_runtimes(flavour), None)
        if found is None:
            raise BundleError(
                f"the bundle {self.root} needs {RUNTIME} of {flavour}, from the package "
                f"nvidia-cutlass-dsl-libs-{flavour}: put it into the bundle's folder, or name it in "
                "TORCH_CUTE_OPS_DSL_RUNTIME"
            )
        self._check_digest(
            found,
            self.manifest["runtime"]["sha256"],
            "; use the library of the DSL that built the bundle, or name this one in TORCH_CUTE_OPS_DSL_RUNTIME to "
            "skip this check",
        )
        return found


def packaged_runtimes(flavour: str) -> Iterator[Path]:
    """Yield the DSL's runtime library in its installed package, if present."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        path = Path(folder) / flavour / "lib" / RUNTIME
        if path.is_file():
            yield path


def symbol_of(digest: str) -> str:
    """Return the name of a kernel's function in a library."""
    return f"k{digest[:24]}"


_SHA256 = "[0-9a-f]{64}"


def _reason_invalid(manifest: Any) -> str | None:
    """Reason that ``manifest`` is not the manifest of a bundle, or None."""
    if not isinstance(manifest, dict):
        return "expected an object"
    if manifest.get("format") != FORMAT:
        return f"its format is {_shown(manifest.get('format'))}, and this version of torch_cute_ops reads {FORMAT}"
    for name in ("created", "sources", "tvm_ffi"):
        if not isinstance(manifest.get(name), str):
            return f"{name}: expected a string"
    if not _matches(r"cu\d+", manifest.get("flavour")):
        return "flavour: expected cu12, cu13 or similar"
    host, archs = manifest.get("host"), manifest.get("archs")
    if not isinstance(host, list) or not host or not all(isinstance(text, str) for text in host):
        return "host: expected a list of strings"
    if not isinstance(archs, dict):
        return "archs: expected an object"
    if wrong := _reason_invalid_file(manifest.get("runtime")):
        return f"runtime: {wrong}"
    for arch, library in archs.items():
        if wrong := _reason_invalid_file(library) or _reason_invalid_kernels(library.get("kernels")):
            return f"archs: {arch}: {wrong}"
    return None


def _reason_invalid_file(file: Any) -> str | None:
    if not isinstance(file, dict):
        return "expected an object"
    name = file.get("file")
    if not isinstance(name, str) or not name or "\0" in name:
        return "file: expected a name"
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return f"file: {_shown(name)} leads out of the bundle"
    return None if _matches(_SHA256, file.get("sha256")) else "sha256: expected 64 hexadecimal digits"


def _reason_invalid_kernels(kernels: Any) -> str | None:
    if not isinstance(kernels, dict):
        return "kernels: expected an object"
    for digest, symbol in kernels.items():
        if not _matches(_SHA256, digest) or symbol != symbol_of(digest):
            return f"kernels: the function of {_shown(digest)} cannot be {_shown(symbol)}"
    return None


def _matches(pattern: str, text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch(pattern, text) is not None


def _shown(value: Any) -> str:
    """Format a value of a manifest for a message. The value may be of any type and size."""
    is_short = value is None or isinstance(value, (str, int, float))
    return repr(value)[:80] if is_short else f"of type {type(value).__name__}"
