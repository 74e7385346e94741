"""Interface that every GEMM backend implements."""

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Launch = Callable[[Any, Any], None]
"""Function that launches a GEMM. It takes ``Operands`` and the result, or ``GatedOperands`` and a pair of results, and
writes the result.

If the backend ``checks_operands``, calls may pass a plain tuple of the fields of ``Operands`` instead, because creating
a plain tuple takes 0.16 µs less. The backend's function then accesses the fields only by unpacking the tuple.

The function queues its work on the GPU's current stream. The result contains at least one row and one column."""


@dataclass(frozen=True)
class Target:
    """Device for which a GEMM is planned.

    Attributes:
        device: device of the tensors.
        arch: architecture of the GPU, or None if this package has no kernels for the device, for example for a CPU.
        sms: number of streaming multiprocessors.
        name: name of the GPU, or None if it is not a GPU of this machine. GEMMs are then not tuned.
        bandwidth: peak DRAM bandwidth in bytes per second, or None to derive it from the architecture and the SMs.
    """

    device: torch.device
    arch: Arch | None
    sms: int
    name: str | None = None
    bandwidth: float | None = None


class Backend(abc.ABC):
    """One way to compute some kinds of GEMMs on some devices. A backend has no state."""

    name: str
    by_name_only: bool = False
    """True if, on a GPU, the backend is selected only by its name. ``"auto"`` then selects the backend only on a
    CPU."""
    tactic_type: ClassVar[Any] = None
    """Named tuple of the tactics' fields, or None if tactics are plain tuples."""
    computes_prologue: ClassVar[bool] = False
    """True if some tactics of the backend compute a prologue in the same launch as the GEMM.

    For other backends, ``backends.separate_prologue`` computes the activations in a separate launch."""

    @abc.abstractmethod
    def handles(self, problem: GemmProblem) -> bool:
        """Return True if the backend can handle the problem's formats and grouping, on any device."""

    @abc.abstractmethod
    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        """Return the reason why the backend cannot compute a problem on ``target``, whatever M is, or None if it can.

        ``handles(problem)`` must be True.
        """

    @abc.abstractmethod
    def tactics(self, problem: GemmProblem, m: int, target: Target) -> Sequence[Tactic]:
        """Return the tactics for a supported problem with up to ``m`` rows. At least one exists."""

    @abc.abstractmethod
    def estimate(self, problem: GemmProblem, m: int, tactic: Any, target: Target) -> float:
        """Estimate the time of a call in seconds, from its bytes, operations and waves of CTAs."""

    @abc.abstractmethod
    def kernels(self, problem: GemmProblem, tactic: Any, arch: Arch) -> tuple[KernelSpec, ...]:
        """Return the kernels of this package that the tactic launches. Warm-up and bundles compile them."""

    @abc.abstractmethod
    def launcher(self, problem: GemmProblem, tactic: Any, target: Target) -> Launch:
        """Compile the tactic's kernels, and return the function that computes the problem."""

    def named(self, tactic: Iterable[int | str]) -> Tactic:
        """Convert a sequence of a tactic's elements, such as a list from JSON, to a tactic of this backend."""
        named: Tactic = tuple(tactic) if self.tactic_type is None else self.tactic_type._make(tactic)
        return named

    def checks_operands(self, problem: GemmProblem, tactic: Any) -> bool:
        """Return True if the tactic launches a single compiled function. That function checks the strides and the
        alignment of its operands."""
        return False
