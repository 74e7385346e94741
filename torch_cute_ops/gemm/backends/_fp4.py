"""What the backends of FP4 GEMMs share."""

from typing import Any, ClassVar

from torch_cute_ops.gemm.backend import Backend, Target
from torch_cute_ops.gemm.decode import reason_misaligned, reason_no_kernel, reason_no_wgmma
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.compiler import compile_kernel


class FP4Backend(Backend):
    """A GEMM with a weight in FP4, and activations in FP4 or 16 bits."""

    groupings: ClassVar[tuple[str, ...]] = ("none",)
    """What experts may divide."""

    def handles(self, problem: GemmProblem) -> bool:
        return problem.b.is_fp4 and not problem.a.is_fp8 and problem.grouping.over in self.groupings


class FP4KernelBackend(FP4Backend):
    """One by a kernel that reads the weight's codes."""

    has_wgmma: ClassVar[bool] = True
    """Whether that kernel needs warpgroup MMA."""

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = reason_no_wgmma(target) if self.has_wgmma else reason_no_kernel(target)
        return reason or reason_misaligned(problem) or self.reason_unfit(problem)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        """Why the kernel cannot compute a problem whose operands are aligned; ``None`` if it can."""
        raise NotImplementedError

    def compiled(self, problem: GemmProblem, tactic: Tactic, target: Target) -> tuple[Any, Any]:
        """The function of the first kernel that a tactic launches, and its configuration."""
        assert target.arch is not None
        kernel = self.kernels(problem, tactic, target.arch)[0]
        return compile_kernel(kernel, target.arch), kernel.config
