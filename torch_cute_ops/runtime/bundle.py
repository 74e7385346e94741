"""Kernels compiled ahead of time: a folder that runs without the compiler.

``manifest.json`` says what the kernels were made from; one shared library for each architecture holds them. A process
that uses it needs TVM-FFI and the DSL's runtime library, ``libcute_dsl_runtime.so``, and imports no DSL.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch_cute_ops
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.provenance import kernel_digest

MANIFEST = "manifest.json"
FORMAT = 1
RUNTIME = "libcute_dsl_runtime.so"


class BundleError(ValueError):
    """A bundle that cannot be made, or does not fit this process."""


class Bundle:
    """A bundle in use.

    Args:
        root: its folder.

    Raises:
        BundleError: if it does not fit, with the reason.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.manifest: dict[str, Any] = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
            found = self.manifest["format"]
            if missing := {"sources", "tvm_ffi", "flavour", "host", "archs"} - self.manifest.keys():
                raise KeyError(", ".join(sorted(missing)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{root} is no bundle: {type(error).__name__}: {error}") from None
        try:
            tvm_ffi = importlib.metadata.version("apache-tvm-ffi")
        except importlib.metadata.PackageNotFoundError:
            raise BundleError(f"the bundle {root} needs apache-tvm-ffi, which is not installed") from None
        here = compiler.host_features()
        machine, *features = self.manifest["host"]
        if machine != here[0] or not set(features) <= set(here):
            lacking = ", ".join(sorted(set(features) - set(here))) or machine
            raise BundleError(
                f"the bundle {root} does not fit: its launching code was compiled on a processor with {lacking}, which "
                "this one has not; build it on one like this"
            )
        for what, bundled, wanted in (
            ("format", found, FORMAT),
            ("kernel sources", self.manifest.get("sources"), kernel_digest()),
            ("apache-tvm-ffi", self.manifest.get("tvm_ffi"), tvm_ffi),
        ):
            if bundled != wanted:
                raise BundleError(f"the bundle {root} does not fit: its {what} is {bundled}, here it is {wanted}")
        self._libraries: dict[str, Any] = {}

    def has(self, kernel: "compiler.Wanted", arch: str) -> bool:
        """Whether the bundle has a kernel."""
        return kernel.digest in self.manifest["archs"].get(arch, {"kernels": {}})["kernels"]

    def function(self, kernel: "compiler.Wanted", arch: str) -> Callable[..., None] | None:
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
        function: Callable[..., None] = getattr(self._libraries[arch], symbol)
        return function

    def _load(self, library: dict[str, Any]) -> Any:
        path = self.root / library["file"]
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise BundleError(f"the bundle {self.root} is damaged: {error}") from None
        if digest != library["sha256"]:
            raise BundleError(f"the bundle {self.root} is damaged: {path.name} does not match the manifest")
        import tvm_ffi

        runtime = self.runtime()
        try:
            # The library's undefined symbols are found among those that are global.
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            return tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError) as error:
            raise BundleError(f"the bundle {self.root} cannot be loaded with {runtime}: {error}") from None

    def runtime(self) -> Path:
        """The DSL's runtime library: as set, in the bundle, or where the DSL's package has it.

        Raises:
            BundleError: if it is nowhere.
        """
        places = [settings.DSL_RUNTIME, self.root / RUNTIME]
        package = importlib.util.find_spec("nvidia_cutlass_dsl")
        for folder in package.submodule_search_locations or () if package is not None else ():
            places.append(Path(folder) / self.manifest["flavour"] / "lib" / RUNTIME)
        for place in places:
            if place is not None and place.is_file():
                return place
        raise BundleError(
            f"the bundle {self.root} needs {RUNTIME} of {self.manifest['flavour']}, from the package "
            f"nvidia-cutlass-dsl-libs-{self.manifest['flavour']}: put it into the bundle's folder, or name it in "
            "TORCH_CUTE_OPS_DSL_RUNTIME"
        )


def build(folder: Path, kernels: Iterable[tuple["compiler.Wanted", str]]) -> None:
    """Make a bundle of these kernels, each for an architecture by name.

    Raises:
        BundleError: if there is no C compiler to link with, or it fails.
    """
    linker = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if linker is None:
        raise BundleError("a bundle is linked by a C compiler, and there is none: cc, gcc or clang")
    folder.mkdir(parents=True, exist_ok=True)
    # Beside their places, and then renamed: a process may have the old ones open.
    archs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        for kernel, arch in kernels:
            found = archs.setdefault(arch, {"file": f"{arch}.so", "kernels": {}})["kernels"]
            if kernel.digest in found:
                continue
            symbol = f"k{kernel.digest[:24]}"
            compiled = compiler.trace_and_compile(kernel.make(), ARCHS[arch])
            compiler.export_object(compiled, Path(work, f"{arch}-{symbol}.o"), symbol)
            found[kernel.digest] = symbol
        for arch, library in archs.items():
            target = folder / library["file"]
            objects = [str(path) for path in sorted(Path(work).glob(f"{arch}-*.o"))]
            beside = target.with_suffix(".part")
            done = subprocess.run([linker, "-shared", "-o", str(beside), *objects], capture_output=True, text=True)
            if done.returncode:
                raise BundleError(f"{linker} cannot link {target}: {done.stderr.strip()}")
            beside.replace(target)
            library["sha256"] = hashlib.sha256(target.read_bytes()).hexdigest()
    manifest = {
        "format": FORMAT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch_cute_ops": torch_cute_ops.__version__,
        "sources": kernel_digest(),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "compiler": compiler.compiler_versions(),
        "flavour": compiler.compiler_flavour(),
        "host": compiler.host_features(),
        "archs": archs,
    }
    beside = (folder / MANIFEST).with_suffix(".part")
    beside.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / MANIFEST)
