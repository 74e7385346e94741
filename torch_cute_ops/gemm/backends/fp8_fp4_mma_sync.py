"""GEMMs of FP8 activations and an FP4 weight by ``mma.sync``, plain or grouped by rows, on every GPU:
``kernels/fp8_fp4_mma``.

With per-token scales, torch's operations prepare the weight's scales at each call if they are not prepared."""

from typing import Final

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_blocks_and_fp4, has_tokens_and_fp4
from torch_cute_ops.gemm.backends.fp8_fp4_token_wgmma import arranging, preparing_seconds
from torch_cute_ops.gemm.backends.fp8_mma_sync import FP8MmaSync, FP8MmaTactic
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_mma
from torch_cute_ops.kernels.common.core.layouts import SCHEDULERS
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DECODING_INSTRUCTIONS: Final = {16: 80.0, 32: 70.0}
"""Number of instructions with which a warp decodes eight weight rows of a k tile, including a sixteenth of a CTA's
instructions for scales, keyed by the block size of the format. Counted in the source, not measured."""


class FP8FP4MmaSync(FP8MmaSync):
    """Backend for FP8 activations with block scales and an FP4 weight, on every GPU."""

    def handles(self, problem: GemmProblem) -> bool:
        return has_blocks_and_fp4(problem)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8MmaTactic, ...]:
        return tuple(map(FP8MmaTactic, fp8_fp4_mma.TILES))

    def more_clocks(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> float:
        groups = fp8_fp4_mma.TILE_N // 8
        return groups / SCHEDULERS * DECODING_INSTRUCTIONS[fp4_format(problem).block_size]

    def config(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> fp8_fp4_mma.Config | None:
        return fp8_fp4_mma.plan(
            rows=problem.grouping.rows,
            epilogue=self.epilogue(problem),
            fmt=fp4_format(problem),
            layout=weight_scales(problem) if self.has_blocks else None,
            tile_m=tactic.tile_m,
            arch=arch,
            pdl=settings.PDL,
            is_interleaved=problem.a.is_interleaved,
        )

    def kernels(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(fp8_fp4_mma.KERNEL, self.config(problem, tactic, arch)),)


class FP8FP4TokenMmaSync(FP8FP4MmaSync):
    """Backend for FP8 activations with per-token or per-tensor scales and an FP4 weight, on every GPU. Sums leave the
    tensor cores each 128 elements of K, regardless of ``fast_accum``."""

    has_blocks = False

    def handles(self, problem: GemmProblem) -> bool:
        return has_tokens_and_fp4(problem)

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> float:
        return super().estimate(problem, m, tactic, target) + preparing_seconds(problem, target)

    def launcher(self, problem: GemmProblem, tactic: FP8MmaTactic, target: Target) -> Launch:
        launch = super().launcher(problem, tactic, target)
        if problem.b.is_prepared and not problem.a.is_interleaved:
            return launch
        return arranging(launch, problem, lambda a: a.flatten(-2))

    def checks_operands(self, problem: GemmProblem, tactic: FP8MmaTactic) -> bool:
        return problem.b.is_prepared
