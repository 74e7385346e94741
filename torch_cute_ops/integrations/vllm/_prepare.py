"""Compilation of every kernel that a model's layers can need, before vLLM is ready to serve."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none

from torch_cute_ops import deployment, registry
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.integrations.vllm._gemms import Form, gemm_of
from torch_cute_ops.runtime.arch import arch_of_device
from torch_cute_ops.runtime.compile_pool import Ranks, compile_ahead
from torch_cute_ops.runtime.compiler import KernelSpec


class Preparation:
    """Kernels of the layers of one model. Every layer is added while the model is built; the first layer that is loaded
    starts the compilation."""

    def __init__(self) -> None:
        self.forms: dict[Form, None] = {}
        self._prepared: set[Form] = set()

    def add(self, form: Form) -> None:
        """Add the form of a layer."""
        self.forms[form] = None

    def run(self, device: torch.device) -> None:
        """Compile and load the kernels of the forms that were added since the last call; nothing on a CPU.

        Each rank compiles the kernels that it needs itself, because the ranks of other nodes may use another cache,
        and layers of other ranks may need other kernels. The ranks of a node share its processors. If two ranks need a
        kernel, the cache's lock lets one of them compile it.

        Raises:
            RuntimeError: if a kernel cannot be compiled.
        """
        forms = [form for form in self.forms if form not in self._prepared]
        if not forms or device.type != "cuda":
            return
        self._prepared.update(forms)
        config = get_current_vllm_config_or_none()
        if config is None:
            return
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        captured = config.compilation_config.cudagraph_capture_sizes or ()
        most = max(config.scheduler_config.max_num_batched_tokens, *captured, 1)
        jobs = jobs_of(forms, most, device)
        ranks = Ranks(_ranks_of_node(config.parallel_config), device.index)
        compile_ahead(kernels_of(jobs, device), arch_of_device(device.index), ranks=ranks)
        for job in [*jobs, *jobs_of(forms, most, device, captured)]:
            registry.warmup(job.op, **dict(job.properties))


def arch_of(device: torch.device) -> str | None:
    """Return the name of a GPU's architecture, or None for a device that is no GPU."""
    if device.type != "cuda":
        return None
    return arch_of_device(device.index if device.index is not None else torch.cuda.current_device()).name


def _ranks_of_node(parallel: Any) -> int:
    """Return the number of GPUs of this node that vLLM uses. With Ray, vLLM does not know the number of nodes."""
    ranks: int = parallel.local_world_size * max(parallel.data_parallel_size_local, 1)
    return max(1, min(ranks, torch.cuda.device_count()))


def jobs_of(
    forms: Iterable[Form], most: int, where: str | torch.device, rows: Iterable[int] | None = None
) -> list[deployment.Job]:
    """Return calls that together need every kernel which forms need for up to ``most`` rows.

    Args:
        forms: forms of layers.
        most: largest number of rows.
        where: GPU that chooses among kernels, or the name of an architecture for all its known GPUs.
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
                needed = {kernel.digest for kernel in registry.kernels_of(op, where, **properties)}
                if rows is not None or not needed <= known:
                    known |= needed
                    jobs[job] = None
    return list(jobs)


def kernels_of(jobs: Iterable[deployment.Job], where: str | torch.device) -> Iterator[KernelSpec]:
    """Yield the kernels of calls on a GPU, or on all known GPUs of the architecture with this name."""
    for job in jobs:
        yield from registry.kernels_of(job.op, where, **dict(job.properties))


def _one_of_each_bucket(most: int) -> Iterator[int]:
    m = 1
    while m < most:
        yield m
        m = bucket(m + 1)
    yield most
