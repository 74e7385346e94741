"""Compilation of every kernel that a model's layers can need, before vLLM is ready to serve."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from torch_cute_ops import deployment, registry
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.integrations.vllm._gemms import Form, gemm_of
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch, arch_of_device
from torch_cute_ops.runtime.compiler import is_kept, store

logger = init_logger(__name__)


class Preparation:
    """Kernels of the layers of one model. Every layer is added while the model is built; the first layer that is loaded
    starts the compilation."""

    def __init__(self) -> None:
        self.forms: dict[Form, None] = {}
        self._is_done = False

    def add(self, form: Form) -> None:
        """Add the form of a layer."""
        self.forms[form] = None

    def run(self, device: torch.device) -> None:
        """Compile and load the kernels of all added forms; nothing on a CPU, or if it was done before.

        Raises:
            RuntimeError: if a kernel cannot be compiled.
        """
        if self._is_done or device.type != "cuda":
            return
        self._is_done = True
        config = get_current_vllm_config_or_none()
        if config is None:
            return
        arch = arch_of_device(device.index if device.index is not None else torch.cuda.current_device())
        captured = config.compilation_config.cudagraph_capture_sizes or ()
        most = max(config.scheduler_config.max_num_batched_tokens, *captured, 1)
        jobs = jobs_of(self.forms, most, arch)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            compile_missing(jobs, arch)  # other ranks share the work: a kernel that one rank compiles, others wait for
        for job in [*jobs, *jobs_of(self.forms, most, arch, captured)]:
            registry.warmup(job.op, **dict(job.properties))


def jobs_of(forms: Iterable[Form], most: int, arch: Arch, rows: Iterable[int] | None = None) -> list[deployment.Job]:
    """Return calls that together need every kernel which forms need for up to ``most`` rows.

    Args:
        forms: forms of layers.
        most: largest number of rows.
        arch: architecture that chooses among kernels.
        rows: numbers of rows; each bucket of them gets a call, also if it needs no further kernel. By default only
            calls that need another kernel than the calls before them.
    """
    counts = sorted({bucket(m): m for m in (rows if rows is not None else _one_of_each_bucket(most))}.values())
    known: set[object] = set()
    jobs: dict[deployment.Job, None] = {}
    for form in forms:
        gemm = gemm_of(form)
        for m in counts:
            for op, properties in gemm.calls(form, m):
                job = deployment.Job(op, tuple(properties.items()))
                if job in jobs:
                    continue
                needed = {kernel.digest for kernel in registry.kernels_of(op, arch.name, **properties)}
                if rows is not None or not needed <= known:
                    known |= needed
                    jobs[job] = None
    return list(jobs)


def _one_of_each_bucket(most: int) -> Iterator[int]:
    m = 1
    while m < most:
        yield m
        m = bucket(m + 1)
    yield most


def compile_missing(jobs: list[deployment.Job], arch: Arch) -> None:
    """Compile the kernels of calls that the cache on disk lacks, in one process for each processor.

    The processes belong to ``python -m torch_cute_ops warmup``: processes of this one would import the user's script
    again, and vLLM's workers of several GPUs may not start any. If the command fails, a warning says so, and the calls
    compile one kernel after the other.
    """
    if store() is None:
        return
    wanted = {job: registry.kernels_of(job.op, arch.name, **dict(job.properties)) for job in jobs}
    missing = [job for job, kernels in wanted.items() if not all(is_kept(kernel, arch) for kernel in kernels)]
    if not missing:
        return
    logger.info("torch_cute_ops: compiling the kernels of %d calls", len(missing))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "deployment.toml")
        path.write_text("".join(map(_table, missing)))
        command = [sys.executable, "-m", "torch_cute_ops", "warmup", "--config", str(path), "--arch", arch.name]
        environment = {**os.environ, "TORCH_CUTE_OPS_CACHE_DIR": str(settings.cache_folder())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        logger.warning("torch_cute_ops: kernels were not compiled in parallel: %s", done.stderr[-1000:])


def _table(job: deployment.Job) -> str:
    """Return a table of a deployment's file for a call."""
    lines = [f"{name} = {json.dumps(_name_of(value))}" for name, value in job.properties]
    return "\n".join(["[[kernel]]", f"op = {json.dumps(job.op)}", *lines, "", ""])


def _name_of(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
