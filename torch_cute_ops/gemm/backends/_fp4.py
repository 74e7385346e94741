"""What the backends of FP4 GEMMs share."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch_cute_ops.gemm.backend import Backend, Target
from torch_cute_ops.gemm.decode import (
    reason_misaligned,
    reason_no_kernel,
    reason_no_tcgen05,
    reason_no_wgmma,
    reason_not_words,
    weight_scales,
)
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_K
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel


class FP4Backend(Backend):
    """A GEMM with a weight in FP4, and activations in FP4 or 16 bits."""

    groupings: ClassVar[tuple[str, ...]] = ("none",)
    """What experts may divide."""

    def handles(self, problem: GemmProblem) -> bool:
        return problem.b.is_fp4 and not problem.a.is_fp8 and problem.grouping.over in self.groupings


class FP4KernelBackend(FP4Backend):
    """One by a kernel that reads the weight's codes."""

    kernel: ClassVar[str]
    """Module and name of the kernel's class."""
    has_wgmma: ClassVar[bool] = True
    """Whether that kernel needs warpgroup MMA."""
    adds_expert_bias: ClassVar[bool] = False
    """Whether it adds a bias to each expert's sum, where experts divide K."""

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = reason_no_wgmma(target) if self.has_wgmma else reason_no_kernel(target)
        reason = reason or reason_misaligned(problem)
        if reason is None and problem.grouping.over == "k" and problem.epilogue.bias_dtype is not None:
            reason = None if self.adds_expert_bias else "its kernel adds no bias to the sums of experts"
        return reason or self.reason_unfit(problem)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        """Why the kernel cannot compute a problem whose operands are aligned; ``None`` if it can."""
        raise NotImplementedError

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> Any:
        """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
        raise NotImplementedError

    def buildable(self, problem: GemmProblem, tactics: Iterable[Tactic], target: Target) -> tuple[Tactic, ...]:
        """The tactics for which the kernel can be built for the target; all of them, where it is no GPU."""
        arch = target.arch
        return tuple(one for one in tactics if arch is None or self.config(problem, one, arch) is not None)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(self.kernel, self.config(problem, tactic, arch)),)

    def compiled(self, problem: GemmProblem, tactic: Tactic, target: Target) -> tuple[Any, Any]:
        """The function of the first kernel that a tactic launches, and its configuration."""
        assert target.arch is not None
        kernel = self.kernels(problem, tactic, target.arch)[0]
        return compile_kernel(kernel, target.arch), kernel.config


class Tcgen05Backend(FP4KernelBackend):
    """One that multiplies FP4 codes on the block-scaled tensor cores of data-center Blackwell.

    No such GPU was at hand: kernels run in an emulator of PTX, and every constant here is from data sheets and nothing
    measured.
    """

    name = "tcgen05"
    has_wgmma = False
    ramp_seconds: ClassVar[float] = 1.5e-6
    """Pipeline fill, tensor memory's allocation and the last tile's epilogue of a CTA."""
    cluster_bytes_per_second: ClassVar[float] = 1.5e11
    """Rate at which a CTA of a cluster exchanges and adds up partial sums (that of an H200)."""
    l2_shares: ClassVar[int] = 2
    """Bandwidth of L2, as a multiple of memory's."""
    least_columns: ClassVar[int] = 64
    """Rows of the operand on the N side below which an MMA takes no less time: it reads 128 rows of the other one from
    shared memory."""

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_tcgen05(target) or super().reason_unsupported(problem, target)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        layout = weight_scales(problem)
        if not problem.a.is_fp4:
            return f"both operands have to be in FP4; a is {problem.a.format}"
        if problem.a.scale_layout != layout:
            return f"a's scales have to be in the weight's layout, {layout.name}"
        what, width = ("an expert's width is ", problem.expert_k) if problem.experts > 1 else ("k=", problem.k)
        if width % MMA_K:
            return f"{what}{width}: it has to be a multiple of {MMA_K}"
        return reason_not_words(problem)

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return True
