"""FP8 activations and an FP4 weight on Hopper, for many rows: ``kernels/fp4_to_fp8`` writes the weight to memory in
FP8, and ``kernels/fp8_fp4_recoded`` multiplies as with an FP8 weight."""

from typing import Any

import torch

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8FP4Backend
from torch_cute_ops.gemm.backends.fp8_wgmma import many_rows_seconds
from torch_cute_ops.gemm.cost import bytes_per_second
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import Tile
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_to_fp8, fp8_fp4_recoded
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

RECODE_SECONDS = 3e-6
"""Time of the first kernel with next to no work (measured on an H200)."""
RECODE_RATE = 0.82
"""Rate at which it reads and writes, over that of a copy (measured on an H200)."""


class FP8FP4Recoded(FP8FP4Backend):
    """A tactic is (rows of ``a`` in a tile, rows of the weight)."""

    name = "recode"

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((MANY, fp4_to_fp8.COLUMNS),)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        weight = problem.experts * problem.n * (problem.b.row_bytes(problem.k) + problem.k)
        recode = RECODE_SECONDS + weight / (RECODE_RATE * bytes_per_second(target))
        return recode + many_rows_seconds(self.tile(tactic), problem, m, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        rows, pdl = problem.grouping.rows, settings.PDL
        recode = fp4_to_fp8.Config(fp4_format(problem), weight_scales(problem), rows.is_plain, pdl)
        multiply = fp8_fp4_recoded.plan(rows=rows, epilogue=problem.epilogue, arch=arch, pdl=pdl)
        return KernelSpec(fp4_to_fp8.KERNEL, recode), KernelSpec(fp8_fp4_recoded.KERNEL, multiply)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        assert target.arch is not None
        recode, multiply = (
            compile_kernel(kernel, target.arch) for kernel in self.kernels(problem, tactic, target.arch)
        )
        device, experts, n, k = target.device, problem.experts, problem.n, problem.k
        is_plain, max_ctas = problem.grouping.rows.is_plain, self.tile(tactic).clusters(target.sms)
        shape, strides = (experts, n, k), (n * k, k, 1)
        words = fp4_to_fp8.note_words(n, k, experts)

        def launch(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, *rest: Any) -> None:
            alpha, bias, offsets, counts, out = rest
            new = allocator(device)
            weight = new(shape, strides, torch.float8_e4m3fn)
            notes = new((words,), (1,), torch.int32)
            recode(b, b_scale, weight, notes)
            recoded = weight[0].t() if is_plain else weight
            multiply(a, recoded, a_scale, notes, offsets, counts, alpha, bias, out, max_ctas)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return False

    def tile(self, tactic: Tactic) -> Tile:
        tokens, columns = map(int, tactic)
        return Tile(tokens, columns)
