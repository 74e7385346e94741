"""GEMMs whose activations are gated or quantised first (``GemmProblem.makes_input``), by the backends of others."""

from collections.abc import Callable
from typing import Any, Final

import torch

from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.decode import activation_dtype, fp4_format, reason_no_kernel, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

APART: Final = "apart"
"""What a tactic begins with by which the activations are made by a launch of their own."""

Made = tuple[torch.Tensor, torch.Tensor | None]
"""Activations, and their scales if they are in FP4."""


class InputFirst(Backend):
    """Another backend, behind the kernel of the op that makes its activations, or alone where it makes them itself.

    A tactic is one of the other backend's: as it is, one that makes the activations; behind ``APART``, one that
    multiplies what ``silu_mul``, ``fp4_quantize`` or ``silu_mul_fp4quant`` wrote. Both give the same results.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name, self.by_name_only = backend, backend.name, backend.by_name_only

    def handles(self, problem: GemmProblem) -> bool:
        return problem.makes_input and self.backend.handles(problem.of_activations)

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = None if self.backend.makes_input else reason_no_kernel(target)
        return reason or self.backend.reason_unsupported(problem.of_activations, target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        alone = self.backend.tactics(problem, m, target) if self.backend.makes_input else ()
        apart = self.backend.tactics(problem.of_activations, m, target) if reason_no_kernel(target) is None else ()
        return (*alone, *((APART, *tactic) for tactic in apart))

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        multiplied, own = _multiplied(problem, tactic)
        seconds = self.backend.estimate(multiplied, m, own, target)
        if multiplied.makes_input:
            return seconds
        moved = problem.a.row_bytes(problem.a_width) + multiplied.a.row_bytes(problem.k)
        return seconds + cost.memory_seconds(m * moved, 1, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        multiplied, own = _multiplied(problem, tactic)
        kernels = self.backend.kernels(multiplied, own, arch)
        return kernels if multiplied.makes_input else (making_kernel(problem, arch), *kernels)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        multiplied, own = _multiplied(problem, tactic)
        multiply = self.backend.launcher(multiplied, own, target)
        if multiplied.makes_input:
            return multiply
        make = _maker(problem, target)

        def launch(rows: torch.Tensor, b: torch.Tensor, global_scale: torch.Tensor | None, *rest: Any) -> None:
            a, a_scale = make(rows, global_scale)
            multiply(a, b, a_scale, *rest)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        multiplied, own = _multiplied(problem, tactic)
        return multiplied.makes_input and self.backend.checks_operands(multiplied, own)


def making_kernel(problem: GemmProblem, arch: Arch) -> KernelSpec:
    """The kernel that makes the activations of what calls pass: that of the op ``silu_mul``, ``fp4_quantize`` or
    ``silu_mul_fp4quant``."""
    given = activation_dtype(problem), problem.k
    if problem.quantises_input is None:
        rows = row_quant.RowQuantSpec.for_gated_rows(*given)
    else:
        is_scaled, fmt = problem.quantises_input == "scaled", fp4_format(problem)
        rows = row_quant.RowQuantSpec.for_fp4_rows(*given, problem.gates_input, fmt, weight_scales(problem), is_scaled)
    return KernelSpec(row_quant.KERNEL, row_quant.plan(rows, arch, pdl=settings.PDL))


def _maker(problem: GemmProblem, target: Target) -> Callable[[torch.Tensor, torch.Tensor | None], Made]:
    """A function from what calls pass, and a global scale, to the activations (M, K), on a GPU."""
    assert target.arch is not None
    kernel = making_kernel(problem, target.arch)
    function, max_ctas = compile_kernel(kernel, target.arch), target.sms * kernel.config.waves
    device, k, dtype = target.device, problem.k, activation_dtype(problem)
    numbers = (0.0, None, None, None, max_ctas)

    def gate(rows: torch.Tensor, global_scale: torch.Tensor | None) -> Made:
        gated = allocator(device)((rows.shape[0], k), (k, 1), dtype)
        function(rows, *(None,) * 6, gated, None, None, *numbers)
        return gated, None

    if problem.quantises_input is None:
        return gate
    fmt, layout = fp4_format(problem), weight_scales(problem)
    dtypes = torch.uint8, fmt.scale_dtype

    def quantise(rows: torch.Tensor, global_scale: torch.Tensor | None) -> Made:
        shapes, new = fp4_shapes((rows.shape[0], k), fmt, layout), allocator(device)
        codes, scale = (new(shape, (shape[1], 1), kind) for shape, kind in zip(shapes, dtypes, strict=True))
        function(rows, None, None, global_scale, codes, scale, None, None, None, None, *numbers)
        return codes, scale

    return quantise


def _multiplied(problem: GemmProblem, tactic: Tactic) -> tuple[GemmProblem, Tactic]:
    """The problem and the tactic of the other backend; with what it makes, if it makes the activations itself."""
    return (problem.of_activations, tactic[1:]) if tactic[:1] == (APART,) else (problem, tactic)
