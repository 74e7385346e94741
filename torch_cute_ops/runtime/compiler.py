"""Compile kernels once through TVM-FFI and keep them: the one place that calls the DSL's compiler.

A kernel is an object with a frozen ``config``, an ``arguments()`` method that describes its run-time arguments, and a
``__call__`` that the DSL traces. The cache key is derived from those, so that nothing a kernel depends on can be left
out.
"""

import importlib.metadata
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg

log = logging.getLogger("torch_cute_ops")

OPTIONS = "--enable-tvm-ffi"

# cute.compile keeps global state: one compilation at a time. Held from look-up to store, the lock also makes two
# threads that ask for the same kernel compile it once.
_lock = threading.Lock()
_compiled: dict["Key", Callable[..., None]] = {}


class Kernel(Protocol):
    """What ``compile_kernel`` takes."""

    config: Any

    def arguments(self) -> tuple[Argument, ...]:
        """The run-time arguments, in order; the stream, which comes last, is not among them."""

    def __call__(self, *args: Any) -> None:
        """Trace the launch."""


@dataclass(frozen=True)
class Key:
    """Everything that decides what a compiled kernel is."""

    kernel: str
    config: Any
    arguments: tuple[Argument, ...]
    arch: str
    options: str
    versions: tuple[str, ...]


def key_of(kernel: Kernel, arch: Arch) -> Key:
    """The cache key of ``kernel`` compiled for ``arch``."""
    cls = type(kernel)
    versions = tuple(f"{name}=={importlib.metadata.version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    return Key(f"{cls.__module__}.{cls.__qualname__}", kernel.config, kernel.arguments(), arch.name, OPTIONS, versions)


def compile_kernel(kernel: Kernel, arch: Arch) -> Callable[..., None]:
    """The compiled function of ``kernel`` for ``arch``, from memory or from the compiler.

    The function takes torch tensors and numbers as ``kernel.arguments()`` describes them, launches on torch's current
    stream of the first tensor's device, and raises ``ValueError`` or ``TypeError`` for arguments that do not fit.
    """
    with _lock:
        key = key_of(kernel, arch)
        function = _compiled.get(key)
        if function is None:
            started = time.perf_counter()
            compiled = trace_and_compile(kernel, arch)
            # The raw TVM-FFI function, without the DSL's keyword-argument wrapper: 0.3 µs less a call.
            function = compiled.__tvm_ffi_object__() or compiled
            log.info("compiled %s in %.2f s: %s", key.kernel, time.perf_counter() - started, key)
            _compiled[key] = function
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


def clear() -> None:
    """Forget every compiled kernel."""
    with _lock:
        _compiled.clear()
