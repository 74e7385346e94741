"""Kernels compiled ahead of time: a folder that runs without the compiler.

``manifest.json`` says what the kernels were made from; one shared library for each architecture holds them. A process
that uses it needs TVM-FFI and the DSL's runtime library, ``libcute_dsl_runtime.so``, and imports no DSL.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from torch_cute_ops._version import __version__
from torch_cute_ops.runtime import compiler, files, settings, toolchain
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.provenance import kernel_digest

MANIFEST = "manifest.json"
FORMAT = 2
RUNTIME = "libcute_dsl_runtime.so"
MANIFEST_BYTES = 64 * 2**20
LIBRARY_BYTES = 2**30
"""Larger files are not ours."""


class BundleError(ValueError):
    """A bundle that cannot be made, or does not fit this process."""


class Bundle:
    """A bundle in use.

    Args:
        root: its folder.

    Raises:
        BundleError: if it is not a bundle or does not fit this process, with the reason.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.manifest: dict[str, Any] = files.parse_json(files.read_again(root / MANIFEST, MANIFEST_BYTES))
        except (OSError, ValueError) as error:
            raise BundleError(f"{root} is not a bundle: {type(error).__name__}: {error}") from None
        if wrong := _wrong_in(self.manifest):
            raise BundleError(f"{root} is not a bundle: {MANIFEST}: {wrong}")
        self._refuse_what_does_not_fit()
        named = [*self.manifest["archs"].values()]
        if settings.DSL_RUNTIME is None:
            named.append(self.manifest["runtime"])
        paths = (root, root / MANIFEST, *(self._path(file["file"]) for file in named))
        files.warn_of_writers("bundle", paths, "use a bundle of your own")
        self._libraries: dict[str, Any] = {}

    def _refuse_what_does_not_fit(self) -> None:
        try:
            tvm_ffi = importlib.metadata.version("apache-tvm-ffi")
        except importlib.metadata.PackageNotFoundError:
            raise BundleError(f"the bundle {self.root} needs apache-tvm-ffi, which is not installed") from None
        for what, bundled, here in (
            ("kernel sources", self.manifest["sources"], kernel_digest()),
            ("apache-tvm-ffi", self.manifest["tvm_ffi"], tvm_ffi),
        ):
            if bundled != here:
                raise BundleError(f"the bundle {self.root} does not fit: its {what} is {bundled}, here it is {here}")
        machine, *features = self.manifest["host"]
        present = toolchain.host_features()
        if machine != present[0] or not set(features) <= set(present):
            lacking = ", ".join(sorted(set(features) - set(present))) or machine
            raise BundleError(
                f"the bundle {self.root} does not fit: its launching code was compiled on a processor with {lacking}, "
                "which this one does not have; build it on one like this"
            )

    def has(self, kernel: "compiler.KernelSpec", arch: str) -> bool:
        """Whether the bundle has a kernel."""
        return kernel.digest in self.manifest["archs"].get(arch, {"kernels": {}})["kernels"]

    def function(self, kernel: "compiler.KernelSpec", arch: str) -> Callable[..., None] | None:
        """The function of a kernel; ``None`` if the bundle lacks it.

        Raises:
            BundleError: if the bundle has nothing for ``arch``, or its library is damaged or cannot be loaded.
        """
        library = self.manifest["archs"].get(arch)
        if library is None:
            archs = ", ".join(self.manifest["archs"])
            raise BundleError(f"the bundle {self.root} has kernels for {archs}; this device is {arch}")
        symbol = library["kernels"].get(kernel.digest)
        if symbol is None:
            return None
        if arch not in self._libraries:
            self._libraries[arch] = self._load(library)
        try:
            function: Callable[..., None] = getattr(self._libraries[arch], symbol)
        except AttributeError:
            lacking = f"{library['file']} has no function {symbol}"
            raise BundleError(f"the bundle {self.root} is damaged: {lacking}") from None
        return function

    def _load(self, library: dict[str, Any]) -> Any:
        path = self._path(library["file"])
        self._check(path, library["sha256"])
        import tvm_ffi

        runtime = self.runtime()
        try:
            # The library's undefined symbols are found among those that are global.
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            return tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError) as error:
            raise BundleError(f"the bundle {self.root} cannot be loaded with {runtime}: {error}") from None

    def _path(self, name: str) -> Path:
        """A file of the bundle.

        Raises:
            BundleError: if it is a symbolic link that leads out of the bundle.
        """
        path = self.root / name
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(os.path.realpath(self.root)):
            raise BundleError(f"the bundle {self.root} is damaged: {name} leads out of it, to {target}")
        return path

    def _check(self, path: Path, sha256: str, remedy: str = "") -> None:
        """Refuse a file whose content is not the one that the manifest names."""
        try:
            content = files.read_again(path, LIBRARY_BYTES)
        except (OSError, ValueError) as error:
            raise BundleError(f"the bundle {self.root} is damaged: {error}") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise BundleError(f"the bundle {self.root} is damaged: {path} does not match {MANIFEST}{remedy}")

    def runtime(self) -> Path:
        """The DSL's runtime library: the one that is set; else the one in the bundle, or in the DSL's package.

        Raises:
            BundleError: if there is none; or if it is not set, and not the one that the bundle was built with.
        """
        if settings.DSL_RUNTIME is not None:
            if not settings.DSL_RUNTIME.is_file():
                raise BundleError(f"TORCH_CUTE_OPS_DSL_RUNTIME={settings.DSL_RUNTIME} is not a file")
            return settings.DSL_RUNTIME
        flavour = self.manifest["flavour"]
        bundled = self._path(self.manifest["runtime"]["file"])
        # What is there in place of the file, such as a FIFO, is refused when it is read.
        found = bundled if bundled.exists() else next(_packaged_runtimes(flavour), None)
        if found is None:
            raise BundleError(
                f"the bundle {self.root} needs {RUNTIME} of {flavour}, from the package "
                f"nvidia-cutlass-dsl-libs-{flavour}: put it into the bundle's folder, or name it in "
                "TORCH_CUTE_OPS_DSL_RUNTIME"
            )
        self._check(
            found,
            self.manifest["runtime"]["sha256"],
            "; use the library of the DSL that built the bundle, or name this one in TORCH_CUTE_OPS_DSL_RUNTIME to "
            "use it all the same",
        )
        return found


def _packaged_runtimes(flavour: str) -> Iterator[Path]:
    """The DSL's runtime library in its installed package."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        path = Path(folder) / flavour / "lib" / RUNTIME
        if path.is_file():
            yield path


_SHA256 = "[0-9a-f]{64}"


def _wrong_in(manifest: Any) -> str | None:
    """What a manifest lacks, or has that no manifest has; ``None``: it is one."""
    if not isinstance(manifest, dict):
        return "expected an object"
    if manifest.get("format") != FORMAT:
        return f"its format is {_shown(manifest.get('format'))}, and this version of torch_cute_ops reads {FORMAT}"
    for name in ("created", "sources", "tvm_ffi"):
        if not isinstance(manifest.get(name), str):
            return f"{name}: expected a string"
    if not _matches(r"cu\d+", manifest.get("flavour")):
        return "flavour: expected cu12, cu13 or another one"
    host, archs = manifest.get("host"), manifest.get("archs")
    if not isinstance(host, list) or not host or not all(isinstance(text, str) for text in host):
        return "host: expected a list of strings"
    if not isinstance(archs, dict):
        return "archs: expected an object"
    if wrong := _wrong_in_file(manifest.get("runtime")):
        return f"runtime: {wrong}"
    for arch, library in archs.items():
        if wrong := _wrong_in_file(library) or _wrong_in_kernels(library.get("kernels")):
            return f"archs: {arch}: {wrong}"
    return None


def _wrong_in_file(file: Any) -> str | None:
    if not isinstance(file, dict):
        return "expected an object"
    name = file.get("file")
    if not isinstance(name, str) or not name or "\0" in name:
        return "file: expected a name"
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return f"file: {_shown(name)} leads out of the bundle"
    return None if _matches(_SHA256, file.get("sha256")) else "sha256: expected 64 hexadecimal digits"


def _wrong_in_kernels(kernels: Any) -> str | None:
    if not isinstance(kernels, dict):
        return "kernels: expected an object"
    for digest, symbol in kernels.items():
        if not _matches(_SHA256, digest) or symbol != _symbol_of(digest):
            return f"kernels: the function of {_shown(digest)} cannot be {_shown(symbol)}"
    return None


def _matches(pattern: str, text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch(pattern, text) is not None


def _shown(value: Any) -> str:
    """A value of a manifest in a message: it may be of any kind, size and depth."""
    is_short = value is None or isinstance(value, (str, int, float))
    return repr(value)[:80] if is_short else f"of type {type(value).__name__}"


def _symbol_of(digest: str) -> str:
    """The name of a kernel's function in a library."""
    return f"k{digest[:24]}"


def build(folder: Path, kernels: Iterable[tuple["compiler.KernelSpec", str]]) -> None:
    """Make a bundle of these kernels, each for an architecture by name.

    Raises:
        BundleError: if there is no C compiler to link with, or it fails; or if the DSL's build or its runtime library
            is unknown.
        OSError: if the bundle cannot be written.
    """
    linker = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if linker is None:
        raise BundleError("a bundle is linked by a C compiler, and there is none: cc, gcc or clang")
    flavour = toolchain.compiler_flavour()
    if flavour is None:
        raise BundleError("it is unknown whether the DSL compiles for CUDA 12 or 13, which a bundle has to say")
    runtime = settings.DSL_RUNTIME or next(_packaged_runtimes(flavour), None)
    if runtime is None:
        raise BundleError(f"there is no {RUNTIME} in the DSL's package; name it in TORCH_CUTE_OPS_DSL_RUNTIME")
    archs: dict[str, dict[str, Any]] = {}
    files.make_folder(folder)
    with tempfile.TemporaryDirectory() as work:
        for kernel, arch in kernels:
            found = archs.setdefault(arch, {"file": f"{arch}.so", "kernels": {}})["kernels"]
            if kernel.digest in found:
                continue
            symbol = _symbol_of(kernel.digest)
            compiled = compiler.trace_and_compile(kernel.make(), ARCHS[arch])
            compiler.export_object(compiled, Path(work, f"{arch}-{symbol}.o"), symbol)
            found[kernel.digest] = symbol
        for arch, library in archs.items():
            objects = [str(path) for path in sorted(Path(work).glob(f"{arch}-*.o"))]
            linked = Path(work, library["file"])
            done = subprocess.run([linker, "-shared", "-o", str(linked), *objects], capture_output=True, text=True)
            if done.returncode:
                raise BundleError(f"{linker} cannot link {linked.name}: {done.stderr.strip()}")
            content = linked.read_bytes()
            library["sha256"] = hashlib.sha256(content).hexdigest()
            # A process may have the old one open.
            files.replace(folder / library["file"], content)
    manifest = {
        "format": FORMAT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch_cute_ops": __version__,
        "sources": kernel_digest(),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "compiler": toolchain.compiler_versions(),
        "flavour": flavour,
        "runtime": {"file": RUNTIME, "sha256": hashlib.sha256(runtime.read_bytes()).hexdigest()},
        "host": toolchain.host_features(),
        "archs": archs,
    }
    files.replace(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
