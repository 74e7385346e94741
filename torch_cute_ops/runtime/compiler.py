"""Compilation of kernels through TVM-FFI, with caches in memory and on disk. Only this module calls the compiler.

A kernel is an object with a frozen ``config``, an ``arguments()`` method that describes its run-time arguments, and a
``__call__`` that the DSL traces. Both methods depend on the config and on this package's sources only. So the cache key
consists of the kernel's name and config, the sources' digest and the toolchain, and is known without the DSL: a process
that finds its kernels on disk never imports the DSL.
"""

import functools
import importlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg
from torch_cute_ops.runtime.provenance import kernel_digest, text_digest
from torch_cute_ops.runtime.toolchain import (
    RUNTIME,
    compiler_environment,
    compiler_flavour,
    compiler_versions,
    expected_flavour,
    find_linker,
    host_features,
    link,
    load_library,
    packaged_runtimes,
)

if TYPE_CHECKING:
    from torch_cute_ops.runtime.bundle import Bundle
    from torch_cute_ops.runtime.store import Store

log = logging.getLogger("torch_cute_ops")

OPTIONS = "--enable-tvm-ffi"

# cute.compile keeps global state, so only one thread compiles at a time. The lock is held from the look-up until the
# kernel is stored, so a kernel that two threads need is compiled only once.
_lock = threading.Lock()
_compiled: dict[tuple["KernelSpec", str], Callable[..., None]] = {}


class Kernel(Protocol):
    """Interface of the objects that the DSL compiles."""

    config: Any

    def arguments(self) -> tuple[Argument, ...]:
        """Describe the run-time arguments in order. The stream, which is always the last argument, is left out."""

    def __call__(self, *args: Any) -> None:
        """Launch the device code. The DSL traces this method."""


class _Digested:
    """Base class of dataclasses that are identified by a digest of their fields."""

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, hexadecimal. Equal fields give the same digest in every process."""
        return text_digest(repr(self))


@dataclass(frozen=True)
class KernelSpec(_Digested):
    """Name and configuration of a kernel, which identify it without the DSL.

    Attributes:
        kernel: module and name of the kernel's class.
        config: argument of the class.
    """

    kernel: str
    config: Any

    def make(self) -> Kernel:
        """Instantiate the kernel. Imports the DSL."""
        module, _, name = self.kernel.rpartition(".")
        kernel: Kernel = getattr(importlib.import_module(module), name)(self.config)
        return kernel


@dataclass(frozen=True)
class Key(_Digested):
    """Cache key: everything that a compiled kernel depends on.

    Attributes:
        kernel: module and name of the kernel's class.
        config: configuration of the kernel.
        arch: name of the architecture.
        options: options passed to the compiler.
        versions: versions of the DSL's packages and of TVM-FFI.
        flavour: build of the compiler, ``"cu12"`` or ``"cu13"``, or None if unknown.
        environment: environment variables that the compiler reads.
        host: features of the processor that the launching code is compiled for.
        sources: digest of this package's files that kernels are made from.
    """

    kernel: str
    config: Any
    arch: str
    options: str
    versions: tuple[str, ...]
    flavour: str | None
    environment: tuple[str, ...]
    host: tuple[str, ...]
    sources: str


def key_of(kernel: KernelSpec, arch: Arch) -> Key:
    """Return the cache key of ``kernel`` compiled for ``arch``. Does not import the DSL."""
    return Key(
        kernel=kernel.kernel,
        config=kernel.config,
        arch=arch.name,
        options=OPTIONS,
        versions=compiler_versions(),
        flavour=expected_flavour(),
        environment=compiler_environment(),
        host=host_features(),
        sources=kernel_digest(),
    )


def compile_kernel(kernel: KernelSpec, arch: Arch) -> Callable[..., None]:
    """Return the compiled function of ``kernel`` for ``arch``, from memory, a bundle, the disk, or the compiler.

    The function takes torch tensors and numbers, as the kernel's ``arguments()`` describe them. The function launches
    on torch's current stream of the first tensor's device. It raises ``ValueError`` or ``TypeError`` for arguments that
    do not match their descriptions.

    Raises:
        BundleError: if this process cannot use the configured bundle.
        RuntimeError: if no bundle contains the kernel and the compiler is not installed.
    """
    with _lock:
        key = (kernel, arch.name)
        function = _compiled.get(key)
        if function is None:
            function = _find(kernel, arch)
            _compiled[key] = function
        return function


def _find(kernel: KernelSpec, arch: Arch) -> Callable[..., None]:
    kernels = bundle()
    if kernels is not None:
        function = kernels.function(kernel.digest, arch.name)
        if function is not None:
            log.info("from the bundle %s: %s", kernels.root, kernel)
            return function
    if (function := _from_package(kernel, arch)) is not None:
        return function
    try:
        return _from_store(kernel, arch)
    except ModuleNotFoundError as error:
        sources = [] if kernels is None else [f"the bundle {kernels.root} lacks it"]
        sources += [f"the package {each.root.parent.name} lacks it" for each in packaged_bundles()]
        lacking = ", and ".join(sources) or "no bundle is in use"
        raise RuntimeError(f"a kernel cannot be compiled here ({error}), and {lacking}: {kernel}") from None


def bundle() -> "Bundle | None":
    """Return the bundle that the settings name, or None if they name no bundle.

    Raises:
        BundleError: if this process cannot use the bundle.
    """
    return _bundle(settings.BUNDLE) if settings.BUNDLE is not None else None


def _from_package(kernel: KernelSpec, arch: Arch) -> Callable[..., None] | None:
    """Load the function from the bundle of an installed package, or return None."""
    from torch_cute_ops.runtime.bundle import BundleError, warn_ignored

    for found in packaged_bundles():
        if found.has(kernel.digest, arch.name):
            try:
                function = found.function(kernel.digest, arch.name)
            except BundleError as error:
                warn_ignored(found.root.parent.name, error)
            else:
                log.info("from the package %s: %s", found.root.parent.name, kernel)
                return function
    return None


@functools.cache
def packaged_bundles() -> "tuple[Bundle, ...]":
    """Return the bundles of installed packages that fit this process."""
    from torch_cute_ops.runtime.bundle import installed_bundles

    return tuple(installed_bundles())


@functools.cache
def _bundle(folder: Path) -> "Bundle":
    from torch_cute_ops.runtime.bundle import Bundle

    return Bundle(folder)


def _from_store(kernel: KernelSpec, arch: Arch) -> Callable[..., None]:
    """Load the function from disk, or compile it and store it for the next process.

    Raises:
        ModuleNotFoundError: if the kernel must be compiled, and the DSL is not installed.
    """
    kernels, key = store(), key_of(kernel, arch)
    if kernels is None or key.flavour is None:
        return _raw(_timed(kernel.make(), arch, key))
    function: Callable[..., None] | None = kernels.load(key.digest, load_object)
    if function is None:
        with kernels.writing(key.digest):
            # Look again: another process may have compiled the kernel while this process waited for the lock.
            function = kernels.load(key.digest, load_object)
            if function is None:
                return _compiled_and_kept(kernels, kernel, arch, key)
    log.info("loaded %s: %s", key.kernel, key)
    return function


def _compiled_and_kept(kernels: "Store", kernel: KernelSpec, arch: Arch, key: Key) -> Callable[..., None]:
    made = kernel.make()
    loaded = replace(key, flavour=compiler_flavour())
    if loaded != key:  # the DSL has loaded another build than expected
        function: Callable[..., None] | None = kernels.load(loaded.digest, load_object) if loaded.flavour else None
        if function is not None:
            return function
    compiled = _timed(made, arch, loaded)
    if loaded.flavour is not None:
        kernels.save(repr(loaded), functools.partial(export_library, compiled))
    return _raw(compiled)


def keep(kernel: KernelSpec, arch: Arch) -> None:
    """Compile ``kernel`` for ``arch`` unless the bundle or the cache on disk already contains it.

    Raises:
        RuntimeError: if the cache on disk is off or cannot be used, or this kernel cannot be written.
    """
    kernels = store()
    if kernels is None:
        raise RuntimeError(f"no kernels are kept on disk: {reason_no_store()}")
    with _lock:
        if expected_flavour() is None:
            kernel.make()  # raises an error without the DSL
            raise RuntimeError("no kernels are kept on disk: it is unknown which build of the DSL compiles them")
        _from_store(kernel, arch)
        if not kernels.has(key_of(kernel, arch).digest):
            raise RuntimeError(f"the kernel is compiled, but cannot be kept in {kernels.root}: {kernels.failure}")


def is_compiled(kernel: KernelSpec, arch: Arch) -> bool:
    """Return True if ``kernel`` for ``arch`` is in memory."""
    return (kernel, arch.name) in _compiled


def is_kept(kernel: KernelSpec, arch: Arch) -> bool:
    """Return True if the bundle in use, an installed package or the cache on disk contains ``kernel`` for ``arch``."""
    bundles, kernels = [each for each in (bundle(), *packaged_bundles()) if each is not None], store()
    if any(each.has(kernel.digest, arch.name) for each in bundles):
        return True
    return kernels is not None and expected_flavour() is not None and kernels.has(key_of(kernel, arch).digest)


def _timed(kernel: Kernel, arch: Arch, key: Key) -> Any:
    started = time.perf_counter()
    compiled = trace_and_compile(kernel, arch)
    log.info("compiled %s in %.2f s: %s", key.kernel, time.perf_counter() - started, key)
    return compiled


def _raw(compiled: Any) -> Callable[..., None]:
    """Return the bare TVM-FFI function. The DSL's wrapper, which handles keyword arguments, costs 0.3 µs per call."""
    return compiled.__tvm_ffi_object__() or compiled


def store() -> "Store | None":
    """Return the cache on disk, or None if it is off or cannot be used."""
    folder = settings.cache_folder() if settings.CACHE else None
    return _store(folder, settings.CACHE_MB) if folder is not None else None


def reason_no_store() -> str:
    """Return the reason that ``store`` returns None."""
    return "there is no home folder; set TORCH_CUTE_OPS_CACHE_DIR" if settings.CACHE else "TORCH_CUTE_OPS_CACHE=0"


@functools.cache
def _store(folder: Path, megabytes: int) -> "Store":
    from torch_cute_ops.runtime.store import Store

    return Store(folder, megabytes * 2**20)


def export_object(compiled: Any, path: Path, symbol: str) -> None:
    """Write a compiled kernel to an object file, with ``symbol`` as the name of its function.

    Raises:
        OSError: if the DSL cannot write the file.
    """
    try:
        compiled.export_to_c(str(path), function_name=symbol)
    except OSError:
        raise
    except Exception as error:  # the DSL raises exceptions without a common base class
        raise OSError(f"{type(error).__name__}: {error}") from None


def export_library(compiled: Any, path: Path, symbol: str) -> None:
    """Write a compiled kernel as ``export_object`` does, then link it, if a linker is present, to a shared library next
    to ``path``, which replaces the object file. Only the DSL can load an object file.

    Raises:
        OSError: if the file cannot be written.
    """
    export_object(compiled, path, symbol)
    if (linker := find_linker()) is not None:
        try:
            link(linker, [path], path.with_suffix(".so"))
        except OSError as error:
            log.info("the kernel stays an object file, which only the DSL can load: %s", error)
        else:
            path.unlink()


def load_object(path: Path, symbol: str) -> Callable[..., None]:
    """Load the function ``symbol`` from a shared library or an object file. Loading an object file imports the DSL.

    Raises:
        OSError: if loading fails. The DSL does not report whether the file is damaged or this process lacks something.
    """
    try:
        function: Callable[..., None]
        if path.suffix == ".so":
            runtime = settings.DSL_RUNTIME or next(packaged_runtimes(expected_flavour() or ""), None)
            if runtime is None:
                raise OSError(f"the DSL's package contains no {RUNTIME}")
            function = getattr(_loaded(path, runtime), symbol)
        else:
            from cutlass.cute.runtime import load_module

            function = getattr(load_module(str(path), enable_tvm_ffi=True), symbol)
    except OSError:
        raise
    except Exception as error:  # the DSL's errors have no common base
        raise OSError(f"{type(error).__name__}: {error}") from None
    return function


def _loaded(path: Path, runtime: Path) -> Any:
    """Load a library of the cache from a copy. Otherwise, if another host deleted the entry, a library that is mapped
    from a network file system would be lost."""
    try:
        # On a network file system, the mapped copy cannot be deleted before the process ends.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return load_library(shutil.copyfile(path, Path(folder, path.name)), runtime)
    except (OSError, RuntimeError):  # for example, no temporary folder exists, or it is mounted with noexec
        return load_library(path, runtime)


def trace_and_compile(kernel: Kernel, arch: Arch, options: str = "") -> Any:
    """Compile ``kernel`` without caching. ``options`` are appended to the compiler's options."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    arguments = _fake_arguments(kernel.arguments())
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options=f"{OPTIONS} --gpu-arch {arch.name} {options}")


def _fake_arguments(arguments: tuple[Argument, ...]) -> list[Any]:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    symbols: dict[Dim, Any] = {}

    def extent(dim: int | Dim) -> Any:
        if isinstance(dim, int):
            return dim
        if dim not in symbols:
            symbols[dim] = cute.sym_int(dim.bits, divisibility=dim.divisibility, symbol=dim.name)
        return symbols[dim]

    def fake(argument: Argument) -> Any:
        if isinstance(argument, TensorArg):
            shape, stride = (tuple(map(extent, dims)) for dims in (argument.shape, argument.stride))
            return make_fake_tensor(getattr(cutlass, argument.dtype), shape, stride, assumed_align=argument.align)
        if isinstance(argument, ScalarArg):
            return getattr(cutlass, argument.dtype)(0)
        return None

    return [fake(argument) for argument in arguments]


def _after_fork() -> None:
    """Replace the lock in a forked child. Otherwise a lock that another thread held during the fork is never
    released."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def clear() -> None:
    """Forget all compiled kernels in memory."""
    with _lock:
        _compiled.clear()
