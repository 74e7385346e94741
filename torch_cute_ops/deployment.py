"""The kernels of a deployment: listed in a file, compiled side by side, then loaded.

A file (TOML) has a table ``[[kernel]]`` for each kind of call: ``op``, and the facts of ``torch_cute_ops.warmup`` with
dtypes by name; a list stands for each of its entries:

    [[kernel]]
    op = "add_rmsnorm_fp4quant"
    hidden = [4096, 7168]
    dtype = "bfloat16"
    scale_layout = "128x4"
"""

import concurrent.futures
import concurrent.futures.process
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops import registry
from torch_cute_ops.runtime.arch import arch_of_device
from torch_cute_ops.runtime.compiler import is_kept, store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = {
    name: dtype
    for dtype, names in {
        torch.bfloat16: ("bfloat16", "bf16"),
        torch.float16: ("float16", "fp16", "half"),
        torch.float32: ("float32", "fp32", "float"),
    }.items()
    for name in names
}
DTYPE_FACTS = ("dtype", "weight_dtype", "out_dtype")


@dataclass(frozen=True)
class Job:
    """One kernel to make ready.

    Attributes:
        op: name of the op.
        facts: as ``torch_cute_ops.warmup`` takes them.
    """

    op: str
    facts: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        shown = (f"{name}={str(value).removeprefix('torch.')}" for name, value in self.facts)
        return f"{self.op} {' '.join(shown)}"


@dataclass(frozen=True)
class Outcome:
    """How the compilation of a job ended; ``error`` is empty where it went well."""

    job: Job
    arch: str
    error: str


def jobs_of(op: str, **facts: Any) -> list[Job]:
    """A job for every combination of the facts that are lists; dtypes may be names.

    Raises:
        ValueError: for an unknown op or dtype.
    """
    if op not in registry.OPS:
        raise ValueError(f"{op!r} is no op; the ops are {', '.join(registry.OPS)}")
    if empty := [name for name, value in facts.items() if value == []]:
        raise ValueError(f"{', '.join(empty)}: an empty list stands for no call at all")
    named = {name: value if isinstance(value, list) else [value] for name, value in facts.items()}
    for name in DTYPE_FACTS:
        if name in named:
            named[name] = [_dtype(value) for value in named[name]]
    return [Job(op, tuple(zip(named, values, strict=True))) for values in itertools.product(*named.values())]


def read(path: str | Path) -> list[Job]:
    """The jobs that a deployment's file lists.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no such file; with the table that is wrong.
    """
    with open(path, "rb") as file:
        content = tomllib.load(file)
    tables = content.get("kernel")
    if not isinstance(tables, list) or not tables or content.keys() != {"kernel"}:
        raise ValueError(f"{path}: expected one or more tables [[kernel]], and nothing else")
    jobs: dict[Job, None] = {}
    for i, table in enumerate(tables, 1):
        try:
            jobs |= dict.fromkeys(jobs_of(**table))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: kernel {i}: {error}") from None
    return list(jobs)


def compile_jobs(jobs: Iterable[Job], archs: Iterable[str], workers: int | None = None) -> Iterator[Outcome]:
    """Compile jobs for architectures into the cache on disk, in parallel processes; outcomes as they come.

    Needs no GPU. As with all of ``multiprocessing``, a script that calls this does so under
    ``if __name__ == "__main__"``.
    """
    tasks = list(itertools.product(jobs, archs))
    # Spawned: a process that has initialised CUDA must not be forked.
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(tasks)))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(_compile, job, arch): (job, arch) for job, arch in tasks}
        for future in concurrent.futures.as_completed(futures):
            try:
                error = future.result()
            except concurrent.futures.process.BrokenProcessPool as broken:
                error = f"a process that compiled was killed: {broken}"
            yield Outcome(*futures[future], error)


def prepare(path: str | Path, workers: int | None = None) -> None:
    """Compile and load, on the current CUDA device, every kernel that a deployment's file lists.

    What the cache on disk lacks is compiled in parallel processes first. After it, the calls that the file lists
    neither compile nor load nor synchronise.

    Raises:
        ValueError: for a bad file, or facts that an op refuses.
        RuntimeError: without a CUDA device, or where a compilation fails.
    """
    jobs = read(path)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "prepare() needs a CUDA device; `python -m torch_cute_ops warmup --arch` compiles without one"
        )
    arch = arch_of_device(torch.cuda.current_device())
    if store() is not None:
        wanted = {job: registry.kernels_of(job.op, arch.name, **dict(job.facts)) for job in jobs}
        missing = [job for job, kernels in wanted.items() if not all(is_kept(kernel, arch) for kernel in kernels)]
        failed = [outcome for outcome in compile_jobs(missing, [arch.name], workers) if outcome.error]
        if failed:
            raise RuntimeError("; ".join(f"{outcome.job}: {outcome.error}" for outcome in failed))
    for job in jobs:
        registry.warmup(job.op, **dict(job.facts))


def _compile(job: Job, arch: str) -> str:
    try:
        registry.precompile(job.op, arch, **dict(job.facts))
    except Exception as error:  # the DSL's errors have no common base, and cannot all travel between processes
        return f"{type(error).__name__}: {error}"
    return ""


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if value not in DTYPES:
        raise ValueError(f"{value!r} is no dtype of an op; use one of {', '.join(DTYPES)}")
    return DTYPES[value]
