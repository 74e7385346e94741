"""Compilation of every kernel that a model's layers can need, before an engine is ready to serve."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from torch_cute_ops import deployment, registry
from torch_cute_ops.integrations._engines.gemms import Call
from torch_cute_ops.runtime.arch import arch_of_device
from torch_cute_ops.runtime.compile_pool import Ranks, compile_ahead
from torch_cute_ops.runtime.compiler import KernelSpec


class Form(Hashable, Protocol):
    """Static description of a layer: layers with equal forms call the same kernels."""

    def bucket(self, m: int) -> Hashable:
        """Return a key that is equal for numbers of rows that call the same kernels."""

    def calls(self, m: int) -> Iterator[Call]:
        """Yield the op calls that the layer makes for ``m`` rows."""


class Serving(NamedTuple):
    """Settings of an engine.

    Attributes:
        most: largest number of rows of a call.
        captured: numbers of rows whose calls are captured in CUDA graphs.
        ranks_of_node: number of GPUs of this node that the engine uses.
    """

    most: int
    captured: tuple[int, ...]
    ranks_of_node: int


class Preparation:
    """Kernels of the layers of one model. Every layer is added while the model is built; the first layer that is loaded
    starts the compilation.

    Args:
        serving: function that returns the engine's settings, or None if they are unknown.
    """

    def __init__(self, serving: Callable[[], Serving | None]) -> None:
        self.forms: dict[Form, None] = {}
        self._serving = serving
        self._prepared: set[Form] = set()

    def add(self, form: Form) -> None:
        """Add the form of a layer."""
        self.forms[form] = None

    def run(self, device: torch.device) -> None:
        """Compile and load the kernels of the forms that were added since the last call. On a CPU, do nothing.

        Each rank compiles the kernels that it needs itself, because the ranks of other nodes may use another cache,
        and layers of other ranks may need other kernels. The ranks of a node share its processors. If two ranks need a
        kernel, the cache's lock lets one of them compile it.

        Raises:
            RuntimeError: if a kernel cannot be compiled.
        """
        forms = [form for form in self.forms if form not in self._prepared]
        if not forms or device.type != "cuda":
            return
        serving = self._serving()
        if serving is None:
            return
        self._prepared.update(forms)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        most = max(serving.most, *serving.captured, 1)
        jobs = jobs_of(forms, most, device)
        ranks = Ranks(max(1, min(serving.ranks_of_node, torch.cuda.device_count())), device.index)
        compile_ahead(kernels_of(jobs, device), arch_of_device(device.index), ranks=ranks)
        for job in [*jobs, *jobs_of(forms, most, device, serving.captured)]:
            registry.warmup(job.op, **dict(job.properties))


def arch_of(device: torch.device) -> str | None:
    """Return the name of a GPU's architecture, or None for a device that is not a GPU."""
    if device.type != "cuda":
        return None
    return arch_of_device(device.index if device.index is not None else torch.cuda.current_device()).name


def jobs_of(
    forms: Iterable[Form], most: int, where: str | torch.device, rows: Iterable[int] | None = None
) -> list[deployment.Job]:
    """Return calls that together need every kernel that the forms need for up to ``most`` rows.

    Args:
        forms: forms of layers.
        most: largest number of rows.
        where: GPU that chooses among kernels, or the name of an architecture for all its known GPUs.
        rows: numbers of rows; each bucket of them gets a call, even if it needs no further kernel. By default, a number
            of rows gets a call only if the call needs a kernel that no earlier call needs.
    """
    numbers: Iterable[int] = range(1, most + 1) if rows is None else sorted(rows)
    known: set[object] = set()
    jobs: dict[deployment.Job, None] = {}
    for form in forms:
        for m in {form.bucket(m): m for m in numbers}.values():
            for op, properties in form.calls(m):
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
