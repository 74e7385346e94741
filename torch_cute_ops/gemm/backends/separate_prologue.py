"""GEMMs with a prologue (``GemmProblem.has_prologue``), whose activations a separate launch may compute first."""

from collections.abc import Callable
from typing import Final

import torch

from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.decode import activation_dtype, fp4_format, reason_no_kernel, weight_scales
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator, contiguous_strides
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

SEPARATE: Final = "separate"
"""First element of a tactic that computes the activations in a separate launch."""

Activations = tuple[torch.Tensor, torch.Tensor | None]
"""Type of activations: a tensor, and its block scales or None."""


class SeparatePrologue(Backend):
    """Backend that adds a prologue to another backend.

    If a tactic begins with ``SEPARATE``, the kernel of ``silu_mul``, ``fp4_quantize`` or ``silu_mul_fp4quant`` runs
    first. Otherwise the other backend's kernel computes the prologue itself. The results are the same in both cases.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name, self.by_name_only = backend, backend.name, backend.by_name_only

    def handles(self, problem: GemmProblem) -> bool:
        return problem.has_prologue and self.backend.handles(problem.without_prologue)

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = None if self.backend.computes_prologue else reason_no_kernel(target)
        return reason or self.backend.reason_unsupported(problem.without_prologue, target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        backend = self.backend
        fused = backend.tactics(problem, m, target) if backend.computes_prologue else ()
        separate = backend.tactics(problem.without_prologue, m, target) if reason_no_kernel(target) is None else ()
        return (*fused, *((SEPARATE, *tactic) for tactic in separate))

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        multiplied, own = self._multiplied(problem, tactic)
        seconds = self.backend.estimate(multiplied, m, own, target)
        if multiplied.has_prologue:
            return seconds
        moved = problem.a.row_bytes(problem.a_width) + multiplied.a.row_bytes(problem.k)
        return seconds + cost.memory_seconds(m * moved, 1, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        multiplied, own = self._multiplied(problem, tactic)
        kernels = self.backend.kernels(multiplied, own, arch)
        return kernels if multiplied.has_prologue else (prologue_kernel(problem, arch), *kernels)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        multiplied, own = self._multiplied(problem, tactic)
        multiply = self.backend.launcher(multiplied, own, target)
        if multiplied.has_prologue:
            return multiply
        compute = _prologue(problem, target)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, a_scale = compute(given.a, given.a_scale)
            multiply(given._replace(a=a, a_scale=a_scale), out)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        multiplied, own = self._multiplied(problem, tactic)
        return multiplied.has_prologue and self.backend.checks_operands(multiplied, own)

    def _multiplied(self, problem: GemmProblem, tactic: Tactic) -> tuple[GemmProblem, Tactic]:
        """Return the problem and the tactic that are passed to the other backend."""
        if tactic[:1] != (SEPARATE,):
            return problem, self.backend.named(tactic)
        _, *own = tactic
        return problem.without_prologue, self.backend.named(own)


def prologue_kernel(problem: GemmProblem, arch: Arch) -> KernelSpec:
    """Return the kernel that computes the prologue: the kernel of ``silu_mul``, ``fp4_quantize`` or
    ``silu_mul_fp4quant``."""
    given, gate = (activation_dtype(problem), problem.k), problem.prologue_gate
    if problem.prologue_quant is None:
        assert gate is not None
        rows = row_quant.RowQuantSpec.for_gated_rows(*given, gate)
    else:
        is_scaled, fmt = problem.prologue_quant == "scaled", fp4_format(problem)
        rows = row_quant.RowQuantSpec.for_fp4_rows(*given, gate, fmt, weight_scales(problem), is_scaled)
    return KernelSpec(row_quant.KERNEL, row_quant.plan(rows, arch, pdl=settings.PDL))


def _prologue(problem: GemmProblem, target: Target) -> Callable[[torch.Tensor, torch.Tensor | None], Activations]:
    """Return a function that computes the activations (M, K) on a GPU from a call's input rows and global scale."""
    assert target.arch is not None
    kernel = prologue_kernel(problem, target.arch)
    function, max_ctas = compile_kernel(kernel, target.arch), target.sms * kernel.config.waves
    device, k, dtype = target.device, problem.k, activation_dtype(problem)
    scalars = (0.0, None, None, None, max_ctas)

    def gate(rows: torch.Tensor, global_scale: torch.Tensor | None) -> Activations:
        gated = allocator(device)((rows.shape[0], k), (k, 1), dtype)
        function(rows, *(None,) * 7, gated, *(None,) * 3, *scalars)
        return gated, None

    if problem.prologue_quant is None:
        return gate
    fmt, layout = fp4_format(problem), weight_scales(problem)
    dtypes = torch.uint8, fmt.scale_dtype

    def quantise(rows: torch.Tensor, global_scale: torch.Tensor | None) -> Activations:
        shapes, new = fp4_shapes((rows.shape[0], k), fmt, layout), allocator(device)
        codes, scale = (new(shape, contiguous_strides(shape), kind) for shape, kind in zip(shapes, dtypes, strict=True))
        function(rows, None, None, None, global_scale, codes, scale, *(None,) * 5, *scalars)
        return codes, scale

    return quantise
