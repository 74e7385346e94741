"""Compile kernels through TVM-FFI and keep them in memory and on disk: the one place that calls the compiler.

A kernel is an object with a frozen ``config``, an ``arguments()`` method that describes its run-time arguments, and a
``__call__`` that the DSL traces. The cache key is derived from these, so nothing that a kernel depends on can be left
out of it.
"""

import functools
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg
from torch_cute_ops.runtime.provenance import kernel_digest, text_digest
from torch_cute_ops.runtime.toolchain import compiler_environment, compiler_flavour, compiler_versions, host_features

if TYPE_CHECKING:
    from torch_cute_ops.runtime.bundle import Bundle
    from torch_cute_ops.runtime.store import Store

log = logging.getLogger("torch_cute_ops")

OPTIONS = "--enable-tvm-ffi"

# cute.compile has global state, so one kernel is compiled at a time. The lock is held from the look-up to the store, so
# two threads that ask for the same kernel compile it once.
_lock = threading.Lock()
_compiled: dict[tuple["KernelSpec", str], Callable[..., None]] = {}


class Kernel(Protocol):
    """What the DSL compiles."""

    config: Any

    def arguments(self) -> tuple[Argument, ...]:
        """The run-time arguments in order, without the stream, which comes last."""

    def __call__(self, *args: Any) -> None:
        """Trace the launch."""


class _Digested:
    """A value with a digest."""

    @property
    def digest(self) -> str:
        """SHA-256 of all its fields, hexadecimal; the same in every process."""
        return text_digest(repr(self))


@dataclass(frozen=True)
class KernelSpec(_Digested):
    """A kernel by name: what identifies it without the DSL.

    Attributes:
        kernel: module and name of its class.
        config: what the class is instantiated with.
    """

    kernel: str
    config: Any

    def make(self) -> Kernel:
        """The kernel; imports the DSL."""
        module, _, name = self.kernel.rpartition(".")
        kernel: Kernel = getattr(importlib.import_module(module), name)(self.config)
        return kernel


@dataclass(frozen=True)
class Key(_Digested):
    """Everything that a compiled kernel depends on.

    Attributes:
        kernel: its class.
        config, arguments: the kernel's.
        arch, options: what is compiled for, and how.
        versions: of the compiler's packages and of TVM-FFI.
        flavour: which of the compiler's builds is loaded, ``"cu12"`` or ``"cu13"``; ``None``: unknown.
        environment: the variables that the compiler reads.
        host: the processor that the launching code is compiled for.
        sources: digest of this package's files that kernels are made from.
    """

    kernel: str
    config: Any
    arguments: tuple[Argument, ...]
    arch: str
    options: str
    versions: tuple[str, ...]
    flavour: str | None
    environment: tuple[str, ...]
    host: tuple[str, ...]
    sources: str


def key_of(kernel: Kernel, arch: Arch) -> Key:
    """The cache key of ``kernel`` compiled for ``arch``."""
    cls = type(kernel)
    return Key(
        kernel=f"{cls.__module__}.{cls.__qualname__}",
        config=kernel.config,
        arguments=kernel.arguments(),
        arch=arch.name,
        options=OPTIONS,
        versions=compiler_versions(),
        flavour=compiler_flavour(),
        environment=compiler_environment(),
        host=host_features(),
        sources=kernel_digest(),
    )


def compile_kernel(kernel: KernelSpec, arch: Arch) -> Callable[..., None]:
    """The compiled function of ``kernel`` for ``arch``: from memory, a bundle, the disk, or the compiler.

    The function takes torch tensors and numbers as the kernel's ``arguments()`` describe them, launches on torch's
    current stream of the first tensor's device, and raises ``ValueError`` or ``TypeError`` for arguments that do not
    match.

    Raises:
        BundleError: if the bundle in use does not fit.
        RuntimeError: if the kernel is in no bundle, and the compiler is not installed.
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
        function = kernels.function(kernel, arch.name)
        if function is not None:
            log.info("from the bundle %s: %s", kernels.root, kernel)
            return function
    try:
        made = kernel.make()
    except ModuleNotFoundError as error:
        where = "is in no bundle" if kernels is None else f"is not in the bundle {kernels.root}"
        raise RuntimeError(f"a kernel {where}, and cannot be compiled here ({error}): {kernel}") from None
    return _from_store(made, arch, key_of(made, arch))


def bundle() -> "Bundle | None":
    """The bundle that is in use; ``None`` if there is none.

    Raises:
        BundleError: if it does not fit.
    """
    return _bundle(settings.BUNDLE) if settings.BUNDLE is not None else None


@functools.cache
def _bundle(folder: Path) -> "Bundle":
    from torch_cute_ops.runtime.bundle import Bundle

    return Bundle(folder)


def _from_store(kernel: Kernel, arch: Arch, key: Key) -> Callable[..., None]:
    """The function from disk; else from the compiler, and then it is stored for the next process."""
    kernels = store()
    if kernels is None or key.flavour is None:
        return _raw(_timed(kernel, arch, key))
    digest = key.digest
    function: Callable[..., None] | None = kernels.load(digest, load_object)
    if function is None:
        with kernels.writing(digest):
            # Another process may have been faster.
            function = kernels.load(digest, load_object)
            if function is None:
                compiled = _timed(kernel, arch, key)
                kernels.save(repr(key), functools.partial(export_object, compiled))
                return _raw(compiled)
    log.info("loaded %s: %s", key.kernel, key)
    return function


def keep(kernel: KernelSpec, arch: Arch) -> None:
    """Have ``kernel`` for ``arch`` on disk.

    Raises:
        RuntimeError: if no kernels are kept on disk, or this one cannot be written.
    """
    kernels = store()
    if kernels is None:
        raise RuntimeError(f"no kernels are kept on disk: {why_no_store()}")
    with _lock:
        made = kernel.make()
        key = key_of(made, arch)
        if key.flavour is None:
            raise RuntimeError("no kernels are kept on disk: which build of the DSL compiles them is unknown")
        _from_store(made, arch, key)
        if not kernels.has(key.digest):
            raise RuntimeError(f"the kernel is compiled, but cannot be kept in {kernels.root}: {kernels.failure}")


def is_kept(kernel: KernelSpec, arch: Arch) -> bool:
    """Whether the bundle in use, or the cache on disk, has ``kernel`` for ``arch``."""
    found, kernels = bundle(), store()
    if found is not None and found.has(kernel, arch.name):
        return True
    try:
        return kernels is not None and kernels.has(key_of(kernel.make(), arch).digest)
    except ModuleNotFoundError:  # without the DSL nothing can be looked up on disk
        return False


def _timed(kernel: Kernel, arch: Arch, key: Key) -> Any:
    started = time.perf_counter()
    compiled = trace_and_compile(kernel, arch)
    log.info("compiled %s in %.2f s: %s", key.kernel, time.perf_counter() - started, key)
    return compiled


def _raw(compiled: Any) -> Callable[..., None]:
    """The TVM-FFI function without the DSL's wrapper for keyword arguments: 0.3 µs less per call."""
    return compiled.__tvm_ffi_object__() or compiled


def store() -> "Store | None":
    """The kernels on disk; ``None`` if none are kept."""
    folder = settings.cache_folder() if settings.CACHE else None
    return _store(folder, settings.CACHE_MB) if folder is not None else None


def why_no_store() -> str:
    """Why ``store`` answers ``None``."""
    return "there is no home folder; set TORCH_CUTE_OPS_CACHE_DIR" if settings.CACHE else "TORCH_CUTE_OPS_CACHE=0"


@functools.cache
def _store(folder: Path, megabytes: int) -> "Store":
    from torch_cute_ops.runtime.store import Store

    return Store(folder, megabytes * 2**20)


def export_object(compiled: Any, path: Path, symbol: str) -> None:
    """Write a compiled kernel to an object file, its function under this name.

    Raises:
        OSError: if that fails.
    """
    try:
        compiled.export_to_c(str(path), function_name=symbol)
    except OSError:
        raise
    except Exception as error:  # the DSL's errors have no common base
        raise OSError(f"{type(error).__name__}: {error}") from None


def load_object(path: Path, symbol: str) -> Callable[..., None]:
    """The function of this name in an object file.

    Raises:
        OSError: if it cannot be loaded, which may be the file's fault or this process's: the DSL does not say.
    """
    from cutlass.cute.runtime import load_module

    try:
        function: Callable[..., None] = getattr(load_module(str(path), enable_tvm_ffi=True), symbol)
    except Exception as error:  # the DSL's errors have no common base
        raise OSError(f"{type(error).__name__}: {error}") from None
    return function


def trace_and_compile(kernel: Kernel, arch: Arch, options: str = "") -> Any:
    """The DSL's compiled object of ``kernel``, not cached; ``options`` are added to the compiler's."""
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
    """Replace the lock: in a child that was forked while another thread compiled, nobody would release it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def clear() -> None:
    """Forget every compiled kernel in memory."""
    with _lock:
        _compiled.clear()
