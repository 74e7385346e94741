"""Compilation of kernels in parallel processes, ahead of the calls that need them."""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from torch_cute_ops.runtime.arch import ARCHS, Arch
from torch_cute_ops.runtime.bundle import symbol_of
from torch_cute_ops.runtime.compiler import (
    KernelSpec,
    export_object,
    is_compiled,
    is_kept,
    keep,
    key_of,
    load_object,
    store,
    trace_and_compile,
)
from torch_cute_ops.runtime.toolchain import expected_flavour
from torch_cute_ops.runtime.workers import Died, Workers

log = logging.getLogger("torch_cute_ops")

MOST_WORKERS: Final = 32
"""Maximum number of processes by default. A process needs about 0.7 GB of memory."""
FEWEST_KERNELS: Final = 3
"""Smallest number of kernels that ``compile_ahead`` compiles in a pool. Starting a process takes as long as compiling
two kernels."""
MOST_FAILURES: Final = 3
"""Number of failed kernels after which ``compile_ahead`` stops, because the cause, such as a full disk, probably
affects all kernels."""

DEFAULT_TILE_N: Final = 128
"""Number of columns of an output tile to assume for kernels whose configuration does not contain it."""


class Task(NamedTuple):
    """Kernel to compile.

    Attributes:
        kernel: kernel and its configuration.
        arch: name of the architecture.
        path: object file to write, for a bundle; None to write to the cache on disk.
    """

    kernel: KernelSpec
    arch: str
    path: Path | None = None


Pool: TypeAlias = Workers[Task, str]


class Ranks(NamedTuple):
    """Processes of this machine that compile the same kernels at the same time.

    Attributes:
        size: number of these processes.
        own: index of this process, modulo ``size``.
    """

    size: int
    own: int


def ranks_of_torchrun() -> Ranks:
    """Return the ranks of this machine, from the environment variables that ``torchrun`` sets."""
    return Ranks(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")))


def compile_all(
    tasks: Iterable[Task], workers: int | None = None, ranks: Ranks | None = None, pool: Pool | None = None
) -> Generator[tuple[Task, str], None, None]:
    """Compile kernels in parallel processes, the slowest kernels first. Yield each task in the order of completion,
    with the error or an empty string.

    No GPU is needed. When the iterator is closed, or an exception such as ``KeyboardInterrupt`` passes through it, the
    processes are ended.

    Args:
        tasks: kernels to compile; equal tasks count once.
        workers: number of processes; None for one per processor that this process may use, at most ``MOST_WORKERS``,
            divided among ``ranks``.
        ranks: processes that share the processors; None for the ranks of ``torchrun``.
        pool: unused pool, which the caller closes; None for a new pool.
    """
    distinct = sorted(dict.fromkeys(tasks), key=_duration, reverse=True)
    ranks = ranks or ranks_of_torchrun()
    # Ranks that compile the same kernels begin at different kernels, so that they do not wait for each other.
    first = len(distinct) * (ranks.own % ranks.size) // ranks.size
    count = min(_count(workers, ranks), len(distinct))
    with contextlib.nullcontext(pool) if pool else Workers(_compile, count, _import_compiler) as processes:
        for task, result in processes.map(distinct[first:] + distinct[:first]):
            yield task, result if isinstance(result, str) else _fate(result)


def _count(workers: int | None, ranks: Ranks) -> int:
    """Return the number of processes, as :func:`compile_all` describes it."""
    return max(1, min(len(os.sched_getaffinity(0)), MOST_WORKERS) // ranks.size) if workers is None else workers


class EarlyPool:
    """Context manager whose pool may start before all kernels are known, because the pool's imports take seconds.

    Args:
        workers: number of processes, as for :func:`compile_all`.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers, self._missing = workers, set[KernelSpec]()
        self._pool: Pool | None = None

    def __enter__(self) -> "EarlyPool":
        return self

    def __exit__(self, *error: object) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.__exit__(None, None, None)

    def expect(self, kernels: Iterable[KernelSpec], arch: Arch) -> None:
        """Start the pool if this call and earlier calls together name enough kernels that still need compiling."""
        if self._pool is None and len(self._missing) < FEWEST_KERNELS and _pool_helps(self._workers):
            self._missing.update(each for each in kernels if _is_missing(each, arch))
            if len(self._missing) >= FEWEST_KERNELS:
                with contextlib.suppress(OSError):  # ``compile_ahead`` tries again, and warns
                    self._pool = Workers(_compile, _count(self._workers, ranks_of_torchrun()), _import_compiler)
                    self._pool.begin()

    def compile_ahead(self, kernels: Iterable[KernelSpec], arch: Arch) -> None:
        """Compile kernels as :func:`compile_ahead` does, in the pool if it has started. Close the pool."""
        try:
            compile_ahead(kernels, arch, self._workers, pool=self._pool)
        finally:
            self.__exit__()


def _is_missing(kernel: KernelSpec, arch: Arch) -> bool:
    """Return True if a kernel is not in memory, the bundle or the cache on disk."""
    return not is_compiled(kernel, arch) and not is_kept(kernel, arch)


def is_intact(kernel: KernelSpec, arch: Arch) -> bool:
    """Return True if the cache on disk contains ``kernel`` for ``arch``, and the entry can be loaded. Imports the DSL
    only if the entry is an object file."""
    kernels = store()
    if kernels is None or expected_flavour() is None:
        return False
    return kernels.load(key_of(kernel, arch).digest, load_object) is not None


def _pool_helps(workers: int | None) -> bool:
    """Return True if compiled kernels can be kept, and several processes may run."""
    return store() is not None and (workers or len(os.sched_getaffinity(0))) >= 2


def compile_ahead(
    kernels: Iterable[KernelSpec],
    arch: Arch,
    workers: int | None = None,
    ranks: Ranks | None = None,
    pool: Pool | None = None,
) -> None:
    """Compile, in parallel processes, the kernels that are not in memory, the bundle or the cache on disk. Show the
    progress on a terminal, and log it.

    This function only saves time. It raises no error if compilation fails, because the call that needs a kernel
    compiles the kernel, or raises the error. After a failed kernel, the remaining kernels are still compiled here,
    until ``MOST_FAILURES`` kernels have failed. Warnings name the failed kernels, and the reason if no process can
    start. :func:`compile_all` describes ``workers``, ``ranks`` and ``pool``.
    """
    if not _pool_helps(workers):
        return
    missing = [each for each in dict.fromkeys(kernels) if _is_missing(each, arch)]
    if len(missing) < FEWEST_KERNELS:
        return
    try:
        _compile_missing(missing, arch, workers, ranks, pool)
    except (OSError, ImportError) as error:
        log.warning("kernels cannot be compiled in parallel processes: %s: %s", type(error).__name__, error)


def _compile_missing(
    missing: Sequence[KernelSpec], arch: Arch, workers: int | None, ranks: Ranks | None, pool: Pool | None
) -> None:
    """Compile kernels in a pool, and log failures.

    Raises:
        OSError: if a process or a pipe cannot be created.
        ImportError: without tqdm.
    """
    started, outcomes = time.monotonic(), compile_all((Task(each, arch.name) for each in missing), workers, ranks, pool)
    log.info("compiling %d kernels for %s in parallel processes", len(missing), arch.name)
    compiled = failures = 0  # not counted by the bar: without a terminal it is disabled and counts nothing
    with contextlib.closing(outcomes), progress(len(missing)) as bar:
        for task, error in outcomes:
            if not error:
                compiled += 1
                bar.update()
                continue
            failures += 1
            log.warning("%s is not compiled ahead, because a worker failed: %s", task.kernel, error)
            if failures == MOST_FAILURES:
                log.warning("%d kernels failed; calls compile the remaining kernels one by one", failures)
                break
    log.info("%d of %d kernels compiled in %.1f s", compiled, len(missing), time.monotonic() - started)


def progress(total: int, *, always: bool = False) -> Any:
    """Return a progress bar with the kernels done and the seconds left; without ``always``, only on a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit="kernel", desc="compiling", disable=False if always else None)


def _compile(task: Task) -> str:
    """Compile a kernel in a worker. Return the error, or an empty string."""
    arch = ARCHS[task.arch]
    try:
        if task.path is None:
            keep(task.kernel, arch)
        else:
            export_object(trace_and_compile(task.kernel.make(), arch), task.path, symbol_of(task.kernel.digest))
    except Exception as error:  # the DSL's errors have no common base, and some cannot be sent between processes
        return f"{type(error).__name__}: {error}"
    return ""


def _duration(task: Task) -> int:
    """Return a number by which kernels can be ordered roughly by the time that they take to compile.

    The number is the number of elements of a GEMM's output tile, because the code that handles accumulators is
    unrolled. Kernels with the largest tiles take 3 to 4 s to compile, and most kernels 0.6 to 1 s. If a kernel with the
    largest tile began last, the other processes would be idle until its end.
    """
    config = task.kernel.config
    return int(getattr(config, "tile_m", 0) * getattr(config, "tile_n", DEFAULT_TILE_N))


def _import_compiler() -> None:
    """Import the DSL. If the DSL is missing, workers report this for each kernel."""
    # Name a GPU on which none of the kernels runs. Otherwise the DSL initialises CUDA in each worker to find its GPU,
    # and prepares each kernel to be called in the worker, which takes 0.15 s. The compiled code does not depend on this
    # name: the option ``--gpu-arch``, passed with each kernel, names the architecture to compile for.
    os.environ["CUTE_DSL_ARCH"] = "sm_80"
    with contextlib.suppress(Exception):
        importlib.import_module("torch_cute_ops.kernels.common.core.ptx")


def _fate(died: Died) -> str:
    status = died.status or 0
    return f"the process that compiled it {f'was killed by signal {-status}' if status < 0 else f'ended with {status}'}"
