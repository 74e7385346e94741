"""GEMMs with a gate in front of their activations (``GemmProblem.gates_input``), by the backends of those without."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.decode import activation_dtype, reason_no_kernel
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

APART: Final = "apart"
"""What a tactic begins with by which the gate is a launch of its own."""


class GateFirst(Backend):
    """Another backend, behind the kernel of ``silu_mul``, or alone where it gates the activations itself.

    A tactic is one of the other backend's: as it is, one that gates; behind ``APART``, one that multiplies what
    ``silu_mul`` wrote. Both give the same results.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name, self.by_name_only = backend, backend.name, backend.by_name_only

    def handles(self, problem: GemmProblem) -> bool:
        return problem.gates_input and self.backend.handles(_without_gate(problem))

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = None if self.backend.gates else reason_no_kernel(target)
        return reason or self.backend.reason_unsupported(_without_gate(problem), target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        gating = self.backend.tactics(problem, m, target) if self.backend.gates else ()
        apart = self.backend.tactics(_without_gate(problem), m, target) if reason_no_kernel(target) is None else ()
        return (*gating, *((APART, *tactic) for tactic in apart))

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        multiplied, own = _multiplied(problem, tactic)
        seconds = self.backend.estimate(multiplied, m, own, target)
        if multiplied.gates_input:
            return seconds
        # Gate and up are read, and activations written.
        return seconds + cost.memory_seconds(3 * m * problem.a.row_bytes(problem.k), 1, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        multiplied, own = _multiplied(problem, tactic)
        kernels = self.backend.kernels(multiplied, own, arch)
        return kernels if multiplied.gates_input else (gating_kernel(problem, arch), *kernels)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        multiplied, own = _multiplied(problem, tactic)
        multiply = self.backend.launcher(multiplied, own, target)
        if multiplied.gates_input:
            return multiply
        gate = _gate(problem, target)
        return lambda a, *rest: multiply(gate(a), *rest)

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        multiplied, own = _multiplied(problem, tactic)
        return multiplied.gates_input and self.backend.checks_operands(multiplied, own)


def gating_kernel(problem: GemmProblem, arch: Arch) -> KernelSpec:
    """The kernel of ``silu_mul``, from gate and up to the activations."""
    rows = row_quant.Problem.of_gated_rows(activation_dtype(problem), problem.k)
    return KernelSpec(row_quant.KERNEL, row_quant.plan(rows, arch, pdl=settings.PDL))


def _gate(problem: GemmProblem, target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from gate and up (M, 2K) to the activations (M, K), on a GPU."""
    assert target.arch is not None
    kernel = gating_kernel(problem, target.arch)
    function, max_ctas = compile_kernel(kernel, target.arch), target.sms * kernel.config.waves
    device, k, dtype = target.device, problem.k, activation_dtype(problem)
    nothing: tuple[Any, ...] = (None,) * 6

    def gate(rows: torch.Tensor) -> torch.Tensor:
        gated = allocator(device)((rows.shape[0], k), (k, 1), dtype)
        function(rows, *nothing, gated, None, None, 0.0, None, None, None, max_ctas)
        return gated

    return gate


def _without_gate(problem: GemmProblem) -> GemmProblem:
    return replace(problem, gates_input=False)


def _multiplied(problem: GemmProblem, tactic: Tactic) -> tuple[GemmProblem, Tactic]:
    """The problem and the tactic of the other backend; with the gate, if it gates the activations itself."""
    return (_without_gate(problem), tactic[1:]) if tactic[:1] == (APART,) else (problem, tactic)
