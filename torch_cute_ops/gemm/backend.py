"""The interface of a GEMM backend."""

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Launch = Callable[[Any, Any], None]
"""Function of ``Operands`` and the result, or of ``GatedOperands`` and a pair of results; it writes the result.

If the backend ``checks_operands``, calls may pass a plain tuple of the fields of ``Operands``, which is made 0.16 µs
faster than a named tuple. Such a backend's function unpacks the tuple into all names.

It queues its work on the GPU's current stream. The result has at least one row and one column."""


@dataclass(frozen=True)
class Target:
    """Device that computes a GEMM.

    Attributes:
        device: the device.
        arch: architecture, or None if no kernel supports it, as on a CPU.
        sms: number of streaming multiprocessors.
        name: name of the GPU, or None if the target is not a GPU of this machine; GEMMs are then not tuned.
        bandwidth: peak DRAM bandwidth, bytes per second, or None to derive it from the architecture and the SMs.
    """

    device: torch.device
    arch: Arch | None
    sms: int
    name: str | None = None
    bandwidth: float | None = None


class Backend(abc.ABC):
    """Implementation of some kinds of GEMMs on some devices. A backend has no state."""

    name: str
    by_name_only: bool = False
    """True if ``"auto"`` selects the backend on a CPU only."""
    tactic_type: ClassVar[Any] = None
    """Named tuple of the tactics' fields, or None if tactics are plain tuples."""
    computes_prologue: ClassVar[bool] = False
    """True if the backend also handles problems with a prologue, with those of its tactics that support it.

    For other backends ``backends.separate_prologue`` computes the activations in a launch of their own."""

    @abc.abstractmethod
    def handles(self, problem: GemmProblem) -> bool:
        """Return True if the backend can handle the problem's formats and grouping."""

    @abc.abstractmethod
    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        """Return the reason that the backend cannot compute a problem that it handles on ``target``, or None.

        The answer holds for every M.
        """

    @abc.abstractmethod
    def tactics(self, problem: GemmProblem, m: int, target: Target) -> Sequence[Tactic]:
        """Return the tactics for a supported problem with up to ``m`` rows; at least one."""

    @abc.abstractmethod
    def estimate(self, problem: GemmProblem, m: int, tactic: Any, target: Target) -> float:
        """Estimate the seconds of a call from its bytes, operations and waves of CTAs."""

    @abc.abstractmethod
    def kernels(self, problem: GemmProblem, tactic: Any, arch: Arch) -> tuple[KernelSpec, ...]:
        """Return the kernels of this package that the tactic launches."""

    @abc.abstractmethod
    def launcher(self, problem: GemmProblem, tactic: Any, target: Target) -> Launch:
        """Return the function that computes the problem, after compiling its kernels."""

    def named(self, tactic: Iterable[int | str]) -> Tactic:
        """Convert the elements of a tactic, for example a list from JSON, to a tactic of this backend."""
        named: Tactic = tuple(tactic) if self.tactic_type is None else self.tactic_type._make(tactic)
        return named

    def checks_operands(self, problem: GemmProblem, tactic: Any) -> bool:
        """Return True if the tactic launches one compiled function, which refuses misaligned operands by itself."""
        return False
