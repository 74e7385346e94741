"""Bundles: folders of kernels that run without the compiler. ``bundle_build`` writes them.

``manifest.json`` describes the kernels' origin, and one shared library for each architecture contains them. A process
that loads a bundle needs TVM-FFI and the DSL's runtime library, ``libcute_dsl_runtime.so``, and does not import the
DSL.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch_cute_ops.runtime import files, once, settings, toolchain
from torch_cute_ops.runtime.provenance import kernel_digest
from torch_cute_ops.runtime.toolchain import RUNTIME, packaged_runtimes

MANIFEST: Final = "manifest.json"
FORMAT: Final = 2
MANIFEST_BYTES: Final = 64 * 2**20
LIBRARY_BYTES: Final = 2**30
"""Maximum file sizes in bytes. ``bundle_build`` writes no larger files, so larger files are refused."""


GROUP: Final = "torch_cute_ops.kernels"
"""Group of the entry points by which installed packages offer bundles. The value of an entry point is the name of a
package with a folder ``bundle``."""


class BundleError(ValueError):
    """Error for a bundle that cannot be built, is damaged, or was built for another environment than this process."""


class Bundle:
    """Open bundle, from which this process loads kernels.

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
            raise BundleError(f"{root} is not a bundle: {wrong}")
        self._check_fit()
        for file in (self.manifest["runtime"], *self.manifest["archs"].values()):
            self._path(file["file"])
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
        if digest not in library["kernels"]:
            return None
        if arch not in self._libraries:
            self._libraries[arch] = self._load(library)
        try:
            function: Callable[..., None] = getattr(self._libraries[arch], symbol_of(digest))
        except AttributeError:
            lacking = f"{library['file']} contains no function {symbol_of(digest)}"
            raise BundleError(f"the bundle {self.root} is damaged: {lacking}") from None
        return function

    def _load(self, library: dict[str, Any]) -> Any:
        path = self._path(library["file"])
        self._check_digest(path, library["sha256"])
        runtime = self.runtime()
        try:
            return toolchain.load_library(path, runtime)
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
        """Check that the SHA-256 of a file equals the digest in the manifest."""
        try:
            content = files.read_again(path, LIBRARY_BYTES)
        except (OSError, ValueError) as error:
            raise BundleError(f"the bundle {self.root} is damaged: {error}") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise BundleError(f"the bundle {self.root} is damaged: {path} does not match {MANIFEST}{remedy}")

    def runtime(self) -> Path:
        """Find the DSL's runtime library: the configured file, else the bundle's file, else the DSL package's file.

        Raises:
            BundleError: if no library is found, or if the library is not the configured file and differs from the
                library that the bundle was built with.
        """
        if settings.DSL_RUNTIME is not None:
            if not settings.DSL_RUNTIME.is_file():
                raise BundleError(f"TORCH_CUTE_OPS_DSL_RUNTIME={settings.DSL_RUNTIME} is not a file")
            return settings.DSL_RUNTIME
        flavour = self.manifest["flavour"]
        bundled = self._path(self.manifest["runtime"]["file"])
        # exists(), not is_file(): a FIFO or device at this path must cause an error instead of a fall-back.
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


def symbol_of(digest: str) -> str:
    """Return the name of a kernel's function in a library."""
    return f"k{digest[:24]}"


def installed_bundles() -> list[Bundle]:
    """Return the bundles of installed packages that fit this process. Warn about the others, with the reason."""
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            package = importlib.util.find_spec(entry.value)
            folders = (package.submodule_search_locations if package is not None else None) or ()
            if not folders:
                raise BundleError(f"there is no package {entry.value}")
            found.append(Bundle(Path(next(iter(folders)), "bundle")))
        except (BundleError, ImportError) as error:
            warn_ignored(entry.value, error)
    return found


def warn_ignored(package: str, error: Exception) -> None:
    """Warn, once, that the kernels of an installed package are not used."""
    once.warn(("kernels", package), "the kernels of the package %s are not used: %s", package, error)


_FILE: Final = {"file": re.compile(r"[^\0]+"), "sha256": re.compile("[0-9a-f]{64}")}
_LIBRARY: Final = {**_FILE, "kernels": dict}
_FIELDS: Final = {
    **dict.fromkeys(("created", "sources", "tvm_ffi"), str),
    "flavour": re.compile(r"cu\d+"),
    "runtime": _FILE,
    "host": list,
    "archs": dict,
}


def _reason_invalid(manifest: Any) -> str | None:
    """Reason that ``manifest`` is not the manifest of a bundle, or None."""
    if isinstance(manifest, dict) and manifest.get("format") != FORMAT:
        return f"format: expected {FORMAT}, which this version of torch_cute_ops reads"
    if wrong := _mismatch(manifest, _FIELDS, MANIFEST):
        return wrong
    if not manifest["host"] or not all(isinstance(text, str) for text in manifest["host"]):
        return "host: expected one or more strings"
    libraries = (_mismatch(library, _LIBRARY, arch) for arch, library in manifest["archs"].items())
    return next(filter(None, libraries), None)


def _mismatch(value: Any, schema: Any, place: str) -> str | None:
    """Reason that ``value`` does not match ``schema``, or None.

    A schema is a type, the pattern of a string, or a dict of schemas for the fields of an object.
    """
    if isinstance(schema, type):
        kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
        return None if isinstance(value, schema) else f"{place}: expected {kinds[schema]}"
    if isinstance(schema, re.Pattern):
        matches = isinstance(value, str) and schema.fullmatch(value)
        return None if matches else f"{place}: expected a string like {schema.pattern}"
    if not isinstance(value, dict):
        return f"{place}: expected an object"
    fields = (_mismatch(value.get(name), inner, f"{place}: {name}") for name, inner in schema.items())
    return next(filter(None, fields), None)
