"""Compilation of every kernel that a model's layers can need, before vLLM is ready to serve."""

from collections.abc import Iterable, Iterator

import torch
from vllm.config import get_current_vllm_config_or_none

from torch_cute_ops import deployment, registry
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.integrations.vllm._gemms import Form, gemm_of
from torch_cute_ops.runtime.arch import Arch, arch_of_device
from torch_cute_ops.runtime.compile_pool import compile_ahead
from torch_cute_ops.runtime.compiler import KernelSpec


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
            compile_ahead(kernels_of(jobs, arch), arch)  # other ranks wait for these kernels
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


def kernels_of(jobs: Iterable[deployment.Job], arch: Arch) -> Iterator[KernelSpec]:
    """Yield the kernels of calls."""
    for job in jobs:
        yield from registry.kernels_of(job.op, arch.name, **dict(job.properties))


def _one_of_each_bucket(most: int) -> Iterator[int]:
    m = 1
    while m < most:
        yield m
        m = bucket(m + 1)
    yield most
