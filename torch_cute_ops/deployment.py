"""Compile and load the kernels of a deployment. A file lists the deployment's calls. Their kernels are compiled in
parallel processes, then loaded.

The TOML file contains one table ``[[kernel]]`` for each kind of call. The keys of the table are ``op`` and the static
properties that ``torch_cute_ops.warmup`` takes; dtypes are written as names. A list of values stands for one call per
value:

    [[kernel]]
    op = "add_rmsnorm_fp4quant"
    hidden = [4096, 7168]
    dtype = "bfloat16"
    scale_layout = "128x4"
"""

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from torch_cute_ops import registry
from torch_cute_ops.ops._define import OpSpec
from torch_cute_ops.ops._properties import Property, size_in_words
from torch_cute_ops.runtime import files
from torch_cute_ops.runtime.arch import ARCHS, arch_of_device
from torch_cute_ops.runtime.compile_pool import Task, compile_ahead, compile_all, is_intact

DTYPES: Final = {
    name: dtype
    for dtype, names in {
        torch.bfloat16: ("bfloat16", "bf16"),
        torch.float16: ("float16", "fp16", "half"),
        torch.float32: ("float32", "fp32", "float"),
        torch.float8_e4m3fn: ("float8_e4m3fn",),
        torch.uint8: ("uint8",),
        torch.int32: ("int32",),
        torch.int64: ("int64",),
    }.items()
    for name in names
}
LIMIT: Final = 10_000
"""Maximum number of calls in a file. Compiling takes about a second per kernel, so more calls would take hours."""
FILE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class Job:
    """A call whose kernels are to be prepared.

    Attributes:
        op: name of the op.
        properties: names and values of static properties, as ``torch_cute_ops.warmup`` takes them.
    """

    op: str
    properties: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        shown = (f"{name}={str(value).removeprefix('torch.')}" for name, value in self.properties)
        return f"{self.op} {' '.join(shown)}"


@dataclass(frozen=True)
class Outcome:
    """Result of compiling a job's kernels for an architecture. ``error`` is empty on success."""

    job: Job
    arch: str
    error: str


def expected(known: Property, value: Any = None) -> str:
    """Describe the values that a property accepts, in the syntax of a deployment file, for an error message about
    ``value``."""
    if known.choices:
        return f"one of {', '.join(map(_shown, known.choices))}"
    if known.kind is torch.dtype:
        return f"a dtype: one of {', '.join(DTYPES)}"
    if known.kind is int:
        return size_in_words(value)
    return {bool: "true or false", str: "a string"}[known.kind]


def jobs_of(op: str, **properties: Any) -> list[Job]:
    """Return one job for each combination of property values. A property may be a list of values, and a dtype may be a
    name.

    Raises:
        ValueError: for an unknown op, an unknown or missing property, a value that the op does not accept, or more
            combinations than ``LIMIT``.
        TypeError: for a combination of properties that the op refuses.
    """
    if not isinstance(op, str) or op not in registry.OPS:
        raise ValueError(f"{_shown(op)} is no op; the ops are {', '.join(registry.OPS)}")
    spec = registry.OPS[op]
    known = registry.properties_of(op)
    for name in properties:
        if name not in known:
            raise ValueError(f"{name}: no property of {op}; expected one of {', '.join(known)}")
    if missing := [name for name, each in known.items() if each.is_required and name not in properties]:
        raise ValueError(f"{', '.join(missing)}: missing; {op} needs {'them' if len(missing) > 1 else 'it'}")
    values = {name: _values(name, value, known[name]) for name, value in properties.items()}
    count = math.prod(map(len, values.values()))
    if count > LIMIT:
        sizes = " × ".join(f"{len(found)} {name}" for name, found in values.items() if len(found) > 1)
        raise ValueError(f"{sizes} are {count:,} combinations; the limit is {LIMIT:,}")
    jobs = [Job(op, tuple(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]
    for job in jobs:
        _check(spec, job)
    return jobs


def _check(spec: OpSpec, job: Job) -> None:
    """Check that the op accepts the combination of properties on at least one architecture.

    Raises:
        ValueError, TypeError: if the op refuses the combination.
    """
    try:
        given = spec.path.example(**dict(job.properties), device="meta")
    except (RuntimeError, OverflowError) as error:  # raised by torch, for example for sizes beyond 64 bits
        raise ValueError(f"{job}: {str(error).splitlines()[0]}") from None
    refusals: list[Exception] = []
    for arch in ARCHS.values():
        try:
            spec.kernels(arch, **given)
            return
        except (TypeError, ValueError) as error:
            refusals.append(error)
    raise refusals[0]


def _values(name: str, stated: Any, known: Property) -> list[Any]:
    """Return the list of values that the file states for a property. A single value becomes a list of one.

    Raises:
        ValueError: if the list of values is empty, or the op does not accept a value.
    """
    values = stated if isinstance(stated, list) else [stated]
    if not values:
        raise ValueError(f"{name} = []: expected at least one value")
    found = []
    for value in values:
        if known.kind is torch.dtype and isinstance(value, str):
            value = DTYPES.get(value, value)
        if known.reason_unfit(value) is not None:
            raise ValueError(f"{name} = {_shown(value)}: expected {expected(known, value)}")
        found.append(value)
    return found


def _shown(value: Any) -> str:
    """Format a value in the syntax of a deployment file, shortened if it is long."""
    text = json.dumps(value) if isinstance(value, (str, bool, int, float)) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read(path: str | Path) -> list[Job]:
    """Read the jobs in a deployment's file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is invalid; the message names the file, table, op and key.
        ModuleNotFoundError: on Python 3.10 without tomli.
    """
    content = _toml(Path(path))
    tables = content.get("kernel")
    if not isinstance(tables, list) or not tables or content.keys() != {"kernel"}:
        raise ValueError(f"{path}: expected one or more tables [[kernel]], and nothing else")
    jobs: dict[Job, None] = {}
    for i, table in enumerate(tables, 1):
        try:
            jobs |= dict.fromkeys(_jobs_of_table(table))
        except (TypeError, ValueError) as error:
            op = f" ({table['op'][:80]})" if isinstance(table, dict) and isinstance(table.get("op"), str) else ""
            raise ValueError(f"{path}: [[kernel]] {i}{op}: {error}") from None
        if len(jobs) > LIMIT:
            raise ValueError(
                f"{path}: the first {i} tables [[kernel]] stand for {len(jobs):,} calls; the limit is {LIMIT:,}"
            )
    return list(jobs)


def _jobs_of_table(table: Any) -> list[Job]:
    if not isinstance(table, dict):
        raise TypeError(f"{_shown(table)}: expected a table")
    if "op" not in table:
        raise ValueError("op: missing")
    return jobs_of(**table)


def _toml(path: Path) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"reading {path} on Python 3.10 needs the package tomli", name="tomli") from None
    try:
        return tomllib.loads(files.read(path, FILE_BYTES).decode())
    except files.Unusable:
        raise
    except RecursionError:
        raise ValueError(f"{path}: not TOML: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None


def compile_jobs(
    jobs: Iterable[Job], archs: Iterable[str], workers: int | None = None
) -> Generator[Outcome, None, None]:
    """Compile the kernels of jobs for architectures into the cache on disk, in parallel processes. Yield each outcome
    as soon as it is known. Kernels that the cache already contains are only loaded, as a check; no process is started
    for them.

    No GPU is needed. The processes end when the iterator is closed, or when an exception such as ``KeyboardInterrupt``
    occurs in it.

    Args:
        jobs: jobs to compile.
        archs: names of architectures.
        workers: number of processes, or None for one per processor, up to 32.

    Raises:
        ValueError: if ``workers`` is less than 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers!r}; use 1 or more")
    waiting: dict[tuple[Job, str], set[Task]] = {}
    intact: dict[Task, bool] = {}
    for job, arch in dict.fromkeys(itertools.product(jobs, archs)):
        try:
            kernels = registry.kernels_of(job.op, arch, **dict(job.properties))
        except (TypeError, ValueError) as refusal:
            yield Outcome(job, arch, f"{type(refusal).__name__}: {refusal}")
            continue
        tasks = {Task(kernel, arch) for kernel in kernels}
        for task in tasks - intact.keys():
            intact[task] = is_intact(task.kernel, ARCHS[arch])
        if missing := {task for task in tasks if not intact[task]}:
            waiting[job, arch] = missing
        else:
            yield Outcome(job, arch, "")
    outcomes = compile_all(itertools.chain.from_iterable(waiting.values()), workers)
    with contextlib.closing(outcomes):
        for task, error in outcomes:
            for (job, arch), tasks in list(waiting.items()):
                if task in tasks:
                    tasks.remove(task)
                    if error or not tasks:
                        del waiting[job, arch]
                        yield Outcome(job, arch, error)


def prepare(path: str | Path, workers: int | None = None) -> None:
    """Compile and load, on the current CUDA device, every kernel in a deployment's file.

    Kernels that the cache on disk lacks are first compiled in parallel processes. Afterwards, the calls that the file
    lists run without compiling, loading or synchronising.

    Args:
        path: deployment's file.
        workers: number of processes, or None for one per processor.

    Raises:
        OSError: if the file cannot be read.
        ValueError: for a bad file, or properties that an op refuses.
        RuntimeError: without a CUDA device, or if a compilation fails.
    """
    jobs = read(path)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "prepare() needs a CUDA device; `python -m torch_cute_ops warmup --arch` compiles without one"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = (registry.kernels_of(job.op, device, **dict(job.properties)) for job in jobs)
    compile_ahead(itertools.chain.from_iterable(kernels), arch_of_device(device.index), workers)
    for job in jobs:
        registry.warmup(job.op, **dict(job.properties))
