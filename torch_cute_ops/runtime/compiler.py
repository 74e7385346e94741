"""Compile kernels once through TVM-FFI and keep them, in memory and on disk: the one place that calls the compiler.

A kernel is an object with a frozen ``config``, an ``arguments()`` method that describes its run-time arguments, and a
``__call__`` that the DSL traces. The cache key is derived from those, so that nothing a kernel depends on can be left
out.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg
from torch_cute_ops.runtime.provenance import kernel_digest

if TYPE_CHECKING:
    from torch_cute_ops.runtime.bundle import Bundle
    from torch_cute_ops.runtime.store import Store

log = logging.getLogger("torch_cute_ops")

OPTIONS = "--enable-tvm-ffi"

# cute.compile keeps global state: one compilation at a time. Held from look-up to store, the lock also makes two
# threads that ask for the same kernel compile it once.
_lock = threading.Lock()
_compiled: dict[tuple["Wanted", str], Callable[..., None]] = {}


class Kernel(Protocol):
    """What the DSL compiles."""

    config: Any

    def arguments(self) -> tuple[Argument, ...]:
        """The run-time arguments, in order; the stream, which comes last, is not among them."""

    def __call__(self, *args: Any) -> None:
        """Trace the launch."""


class _Digested:
    """What has a digest."""

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, hexadecimal; the same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True)
class Wanted(_Digested):
    """A kernel that is wanted, by name: what can be said of it without the DSL.

    Attributes:
        kernel: module and name of its class.
        config: what it is made from.
    """

    kernel: str
    config: Any

    def make(self) -> Kernel:
        """The kernel itself; imports the DSL."""
        module, _, name = self.kernel.rpartition(".")
        kernel: Kernel = getattr(importlib.import_module(module), name)(self.config)
        return kernel


@dataclass(frozen=True)
class Key(_Digested):
    """Everything that decides what a compiled kernel is.

    Attributes:
        kernel: its class.
        config, arguments: as the kernel has them.
        arch, options: as the compiler is given them.
        versions: of the compiler's packages and of TVM-FFI.
        flavour: which of the compiler's builds runs: ``"cu12"`` or ``"cu13"``.
        environment: variables that the compiler reads.
        host: the processor, for which the launching code is compiled.
        sources: digest of the package's files that kernels are made from.
    """

    kernel: str
    config: Any
    arguments: tuple[Argument, ...]
    arch: str
    options: str
    versions: tuple[str, ...]
    flavour: str
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
        environment=_environment(),
        host=host_features(),
        sources=kernel_digest(),
    )


def installed_packages() -> dict[str, str | None]:
    """Versions of the DSL's packages and of TVM-FFI; ``None``: not installed."""
    # The DSL is several packages, which one release pins to each other; but what is installed is what compiles.
    names = ("nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")))
    found: dict[str, str | None] = {}
    for name in (*names, "apache-tvm-ffi"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def compiler_versions() -> tuple[str, ...]:
    """Of the packages that are installed, as pip writes them."""
    return tuple(f"{name}=={version}" for name, version in installed_packages().items() if version is not None)


@functools.cache
def compiler_flavour() -> str:
    """Which of the DSL's builds runs: ``"cu12"`` or ``"cu13"``."""
    import cutlass  # noqa: F401  chooses one by the driver

    library = getattr(sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir"), "__file__", None) or ""
    match = re.search(r"_cutlass_ir\.(cu\d+)\.", library)
    return match.group(1) if match else library


_INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|bmi|fma|f16c|movbe|popcnt|abm|adx|sha|aes|vaes|v?pclmul|gfni|asimd|sve)"
)


@functools.cache
def host_features() -> tuple[str, ...]:
    """The processor's kind and instruction sets: the compiler takes all that it finds for the code that launches."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return platform.machine(), *sorted(flag for flag in flags if _INSTRUCTION_SETS.match(flag))


def _environment() -> tuple[str, ...]:
    # The architecture is given, and where libraries lie decides nothing.
    ignored = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS")
    return tuple(sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in ignored))


def compile_kernel(kernel: Wanted, arch: Arch) -> Callable[..., None]:
    """The compiled function of ``kernel`` for ``arch``: from memory, a bundle, the disk, or the compiler.

    The function takes torch tensors and numbers as the kernel's ``arguments()`` describe them, launches on torch's
    current stream of the first tensor's device, and raises ``ValueError`` or ``TypeError`` for arguments that do not
    fit.

    Raises:
        BundleError: if a bundle is named that does not fit.
        RuntimeError: if the kernel is in no bundle, and the compiler is not installed.
    """
    with _lock:
        key = (kernel, arch.name)
        function = _compiled.get(key)
        if function is None:
            function = _find(kernel, arch)
            _compiled[key] = function
        return function


def _find(kernel: Wanted, arch: Arch) -> Callable[..., None]:
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
    """The function from disk; or from the compiler, and then it is on disk for the next process."""
    kernels = store()
    if kernels is None:
        return _raw(_timed(kernel, arch, key))
    digest = key.digest
    function: Callable[..., None] | None = kernels.load(digest, load_object)
    if function is None:
        with kernels.writing(digest):
            # Another process may have been faster.
            function = kernels.load(digest, load_object)
            if function is None:
                compiled = _timed(kernel, arch, key)
                symbol = f"k{digest[:16]}"
                kernels.save(digest, repr(key), symbol, lambda path: export_object(compiled, path, symbol))
                return _raw(compiled)
    log.info("loaded %s: %s", key.kernel, key)
    return function


def keep(kernel: Wanted, arch: Arch) -> None:
    """See to it that ``kernel`` for ``arch`` is on disk.

    Raises:
        RuntimeError: if nothing is kept there, or it cannot be written.
    """
    kernels = store()
    if kernels is None:
        raise RuntimeError("no kernels are kept on disk: TORCH_CUTE_OPS_CACHE=0")
    with _lock:
        made = kernel.make()
        key = key_of(made, arch)
        _from_store(made, arch, key)
        if not kernels.has(key.digest):
            raise RuntimeError(f"the kernel is compiled, but cannot be kept in {kernels.root}")


def is_kept(kernel: Wanted, arch: Arch) -> bool:
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
    """The TVM-FFI function itself, without the DSL's keyword-argument wrapper: 0.3 µs less a call."""
    return compiled.__tvm_ffi_object__() or compiled


def store() -> "Store | None":
    """The kernels on disk; ``None`` if there shall be none."""
    return _store(settings.cache_folder(), settings.CACHE_MB) if settings.CACHE else None


@functools.cache
def _store(folder: Path, megabytes: int) -> "Store":
    from torch_cute_ops.runtime.store import Store

    return Store(folder, megabytes * 2**20)


def export_object(compiled: Any, path: Path, symbol: str) -> None:
    """Write a compiled kernel as an object file whose function has this name.

    Raises:
        OSError: if that does not work.
    """
    try:
        compiled.export_to_c(str(path), function_name=symbol)
    except Exception as error:  # the DSL's errors have no common base
        raise OSError(f"{type(error).__name__}: {error}") from None


def load_object(path: Path, symbol: str) -> Callable[..., None]:
    """The function of this name in an object file.

    Raises:
        Damaged: if it cannot be loaded.
    """
    from cutlass.cute.runtime import load_module

    from torch_cute_ops.runtime.store import Damaged

    try:
        function: Callable[..., None] = getattr(load_module(str(path), enable_tvm_ffi=True), symbol)
    except Exception as error:  # the DSL's errors have no common base
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return function


def trace_and_compile(kernel: Kernel, arch: Arch, options: str = "") -> Any:
    """The DSL's compiled object of ``kernel``, uncached; ``options`` are added to the compiler's."""
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
    """In a child that was forked while another thread compiled, nobody would release the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def clear() -> None:
    """Forget every compiled kernel in memory."""
    with _lock:
        _compiled.clear()
