"""What a backend is asked for, and what it answers."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Launch = Callable[..., Any]
"""A function of the fields of ``Operands``, in order, and of the result, which it writes; of a problem with a gate, of
those of ``GatedOperands``, of ``y`` and of its scales. Queued on the current stream of a GPU. There is at least one row
and one column."""


@dataclass(frozen=True)
class Target:
    """Where a GEMM is computed.

    Attributes:
        device: the device.
        arch: its architecture; ``None``: no kernel of ours supports it, as on a CPU.
        sms: its streaming multiprocessors.
        name: the GPU's; ``None``: there is none, and so nothing that was tuned on it.
        bandwidth: peak of its DRAM, bytes a second; ``None``: by its architecture and SMs.
    """

    device: torch.device
    arch: Arch | None
    sms: int
    name: str | None = None
    bandwidth: float | None = None


class Backend(abc.ABC):
    """One way to compute some kinds of GEMMs, on the devices that it supports. Has no state."""

    name: str
    by_name_only: bool = False
    """Whether ``"auto"`` takes it on a CPU alone."""
    makes_input: ClassVar[bool] = False
    """Whether it computes problems of which ``GemmProblem.makes_input`` holds too, by those of its tactics that it has
    then. To others ``backends.input_first`` passes activations that it has made."""

    @abc.abstractmethod
    def handles(self, problem: GemmProblem) -> bool:
        """Whether ``problem`` is of a kind that it computes at all: formats and grouping."""

    @abc.abstractmethod
    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        """Why it cannot compute a problem that it handles on ``target``, for no M; ``None`` if it can, for every M."""

    @abc.abstractmethod
    def tactics(self, problem: GemmProblem, m: int, target: Target) -> Sequence[Tactic]:
        """The ways in which it can compute a problem that it supports, for ``m`` rows or fewer; at least one."""

    @abc.abstractmethod
    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        """Seconds that a call will take, by a model of bytes, operations and waves."""

    @abc.abstractmethod
    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        """Our kernels that the tactic launches."""

    @abc.abstractmethod
    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        """The function that computes; its kernels are compiled."""

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        """Whether all that the tactic launches is one compiled function's, which refuses operands that do not lie as
        they must before anything is launched."""
        return False
