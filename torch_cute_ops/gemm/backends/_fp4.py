"""Base classes of the FP4 backends."""

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from torch_cute_ops.gemm.backend import Backend, Target
from torch_cute_ops.gemm.backends._tcgen05 import Tcgen05Model
from torch_cute_ops.gemm.decode import (
    reason_misaligned,
    reason_no_kernel,
    reason_no_tcgen05,
    reason_no_wgmma,
    reason_not_words,
    weight_scales,
)
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_K
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

T = TypeVar("T")


class FP4Backend(Backend):
    """Base class of backends with an FP4 weight. The activations are FP4 or 16 bits."""

    groupings: ClassVar[tuple[str, ...]] = ("none",)
    """Supported values of ``Grouping.over``."""

    def handles(self, problem: GemmProblem) -> bool:
        return problem.b.is_fp4 and not problem.a.is_fp8 and problem.grouping.over in self.groupings


class FP4KernelBackend(FP4Backend):
    """Base class of backends with a kernel that reads the weight's FP4 codes."""

    kernel: ClassVar[str]
    """Module and name of the kernel's class."""
    has_wgmma: ClassVar[bool] = True
    """True if the kernel needs wgmma instructions."""
    adds_expert_bias: ClassVar[bool] = False
    """True if the kernel adds each expert's bias to the expert's sum over K."""

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = reason_no_wgmma(target) if self.has_wgmma else reason_no_kernel(target)
        reason = reason or reason_misaligned(problem)
        if reason is None and problem.grouping.over == "k" and problem.epilogue.bias_dtype is not None:
            reason = None if self.adds_expert_bias else "its kernel adds no bias to the sums of experts"
        return reason or self.reason_unfit(problem)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        """Return the reason why the kernel cannot compute a problem with aligned operands, or None if it can."""
        raise NotImplementedError

    def config(self, problem: GemmProblem, tactic: Any, arch: Arch) -> Any:
        """Return the kernel's configuration, or None if the kernel cannot be built for ``arch``."""
        raise NotImplementedError

    def built(self, problem: GemmProblem, tactic: Any, arch: Arch) -> Any:
        """Return the result of ``config``. The result is cached, because planning needs it several times."""
        key = self.kernel, tactic, arch.name, settings.PDL
        if key not in problem.configs:
            problem.configs[key] = self.config(problem, tactic, arch)
        return problem.configs[key]

    def buildable(self, problem: GemmProblem, tactics: Iterable[T], target: Target) -> tuple[T, ...]:
        """Return the tactics whose kernels can be built for the target. Without a GPU as target, return all tactics."""
        arch = target.arch
        return tuple(one for one in tactics if arch is None or self.built(problem, one, arch) is not None)

    def kernels(self, problem: GemmProblem, tactic: Any, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(self.kernel, self.built(problem, tactic, arch)),)

    def compiled(self, problem: GemmProblem, tactic: Any, target: Target) -> tuple[Any, Any]:
        """Return the compiled function of the tactic's first kernel, and its configuration."""
        assert target.arch is not None
        kernel = self.kernels(problem, tactic, target.arch)[0]
        return compile_kernel(kernel, target.arch), kernel.config


class Tcgen05Backend(Tcgen05Model, FP4KernelBackend):
    """Base class of backends that multiply FP4 codes on the block-scaled tensor cores of data-center Blackwell."""

    name = "tcgen05"
    has_wgmma = False

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_tcgen05(target) or super().reason_unsupported(problem, target)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        layout = weight_scales(problem)
        if not problem.a.is_fp4:
            return f"both operands have to be in FP4; a is {problem.a.format}"
        if problem.a.scale_layout != layout:
            return f"a's scales have to be in the weight's layout, {layout.name}"
        name, width = "an expert's width is " if problem.grouping.over == "k" else "k=", problem.expert_k
        if width % MMA_K:
            return f"{name}{width}: it has to be a multiple of {MMA_K}"
        return reason_not_words(problem)

    def checks_operands(self, problem: GemmProblem, tactic: Any) -> bool:
        return True
